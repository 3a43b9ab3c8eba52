"""Common to all engines: description, reason of death, the tasks that wait for a change of load, memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dynamo_local.core.gpus import SIMULATED
from dynamo_local.core.types import Missing
from dynamo_local.engines.sleep import EngineMemory, answer_of
from dynamo_local.errors import EngineDead, EngineError, GpuError, InvalidRequest
from dynamo_local.ports import EngineInfo, EngineRequest
from dynamo_local.system.gpus import NvmlInventory
from dynamo_local.system.processes import session_members

T = TypeVar("T")


class EngineBase:
    """For engines of `ports.Engine`. `_info` is there from `start` on, `_death` says why it died, if it did."""

    probe_tokens = 16
    """How many tokens of `probe` are asked for."""

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._death: str | None = None
        self._changed: asyncio.Event | None = None
        self._probes = 0

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine has not been started; await start() first")
        return self._info

    async def load_changed(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def changed_within(self, timeout_s: float) -> None:
        """Return when `load()` may differ, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.load_changed()

    def counters(self) -> Mapping[str, float]:
        return {}

    def why_not_continued(self, request: EngineRequest) -> str | None:
        """The answer of an engine that can always go on."""
        return None

    def cannot_sleep(self) -> str | None:
        """The answer of an engine without a sleep mode (`engines.sleep.CanSleep`)."""
        return f"the engine {self.info.engine} has no sleep mode"

    def death(self) -> str | None:
        return self._death

    async def sleep(self, level: int) -> None:
        raise EngineError(f"the engine {self.info.engine} has no sleep mode")

    async def wake(self) -> None:
        raise EngineError(f"the engine {self.info.engine} has no sleep mode")

    async def memory(self) -> EngineMemory:
        unknown = Missing("it was not measured")
        return EngineMemory(unknown, unknown)

    async def probe(self) -> tuple[Any, ...]:
        self._probes += 1
        return await answer_of(self, f"standby-probe-{self._probes}", self.probe_tokens)

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _alive(self, inner: T | None) -> T:
        """`inner`, which computes. Raises `EngineDead`, or `EngineError` before the start and after the end."""
        if self._death is not None:
            raise EngineDead(self._death)
        if inner is None:
            raise EngineError("the engine does not run: it was closed, or not started")
        return inner

    def _check(self, request: EngineRequest) -> None:
        """Raises `InvalidRequest` for lengths that no engine takes."""
        length, longest = len(request.prompt_token_ids), self.info.max_model_len
        if not length:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if length >= longest:
            raise InvalidRequest(
                f"the prompt has {length} tokens; this model takes {longest} for prompt and output together",
                param="prompt",
            )
        if request.sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be 1 or more, not {request.sampling.max_tokens}", param="max_tokens")


# Memory of this worker's processes: main memory from `/proc`, GPU memory from NVML. Blocks, so call it in a thread.


def of_this_session() -> EngineMemory:
    """Memory of all processes in this session: the worker's, its engine's, its command's."""
    pids = frozenset(session_members(os.getsid(0)))
    return EngineMemory(vram_bytes(pids), host_bytes(pids))


def host_bytes(pids: Iterable[int]) -> int | Missing:
    """Main memory of these processes, in bytes. Shared pages are divided among the processes that share them (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
            except PermissionError as error:
                return Missing(f"the memory of pid {pid} cannot be read: {error}")
            total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def vram_bytes(pids: frozenset[int]) -> int | Missing:
    """The most that they hold on one of the devices that they may use; missing where NVML does not say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return Missing("it has no GPU")
    if visible.startswith(SIMULATED):
        return 0  # a simulated GPU has no memory that a process could hold
    inventory = NvmlInventory(visible=visible)
    try:
        devices = inventory.sample()
    except GpuError as error:
        return Missing(str(error))
    finally:
        inventory.close()
    most = 0
    for device in devices:
        if isinstance(device.processes, Missing):
            return device.processes
        used = [process.memory_bytes for process in device.processes if process.pid in pids]
        unknown = next((each for each in used if isinstance(each, Missing)), None)
        if unknown is not None or not used:
            return unknown or Missing(f"GPU {device.index} shows no process of this worker (another pid namespace?)")
        most = max(most, sum(each for each in used if not isinstance(each, Missing)))
    return most

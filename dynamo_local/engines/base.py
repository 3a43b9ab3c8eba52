"""What every engine has: its description, the reason of its death, and the tasks that wait for its load to change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, TypeVar

from dynamo_local.core.types import Missing
from dynamo_local.engines.sleeping import EngineMemory, answer_of
from dynamo_local.errors import EngineDead, EngineError, InvalidRequest
from dynamo_local.ports import EngineInfo, EngineRequest

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

    def cannot_sleep(self) -> str | None:
        """See `engines.sleeping.CanSleep`: what an engine says that has no sleep of its own."""
        return f"the engine {self.info.engine} has no sleep mode"

    async def sleep(self, level: int) -> None:
        raise EngineError(f"the engine {self.info.engine} has no sleep mode")

    async def wake(self) -> None:
        raise EngineError(f"the engine {self.info.engine} has no sleep mode")

    async def memory(self) -> EngineMemory:
        unknown = Missing("it was not measured")
        return EngineMemory(unknown, unknown)

    async def probe(self) -> tuple[Any, ...]:
        """See `engines.sleeping.CanSleep`."""
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

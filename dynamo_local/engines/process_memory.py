"""What the processes of this worker hold: main memory from `/proc`, and each GPU's from NVML. Blocks: call it in a
thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dynamo_local.core.types import Missing
from dynamo_local.engines.sleeping import EngineMemory
from dynamo_local.errors import GpuError
from dynamo_local.gpus.inventory import NvmlInventory
from dynamo_local.system.processes import session_members


def of_this_session() -> EngineMemory:
    """Of all processes in the session of this one: the worker's, its engine's, its command's."""
    pids = frozenset(session_members(os.getsid(0)))
    return EngineMemory(vram_bytes(pids), host_bytes(pids))


def host_bytes(pids: Iterable[int]) -> int | Missing:
    """Main memory, shared pages divided among those that share them (PSS)."""
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

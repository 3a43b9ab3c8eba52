"""What sleeping workers keep on devices that others may use meanwhile: values, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynamo_local.core.types import Missing

if TYPE_CHECKING:
    from dynamo_local.core.gpus import GpuDevice

DEFAULT_VRAM_SHARE = 0.92
"""The part of a device's memory that an awake worker takes where nobody says otherwise: vLLM's own default."""


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A worker that sleeps: the devices that its process is pinned to, and what it keeps.

    `vram_bytes` is on each of the devices, `host_bytes` in main memory. `pids` are those of its processes.
    """

    uuids: tuple[str, ...]
    vram_bytes: int | Missing
    host_bytes: int | Missing
    pids: frozenset[int] = frozenset()


def sleepers_on(uuid: str, sleepers: Mapping[str, Sleeper], apart_from: str | None = None) -> dict[str, Sleeper]:
    """Those that are pinned to that device, by watcher name."""
    return {name: each for name, each in sleepers.items() if uuid in each.uuids and name != apart_from}


def residue_bytes(sleepers: Mapping[str, Sleeper]) -> int | Missing:
    """What they keep together on one device; missing where that of one is."""
    total = 0
    for name, sleeper in sleepers.items():
        if isinstance(sleeper.vram_bytes, Missing):
            return Missing(f"what {name} keeps was not measured: {sleeper.vram_bytes.reason}")
        total += sleeper.vram_bytes
    return total


def room_bytes(device: GpuDevice, sleepers: Mapping[str, Sleeper]) -> int | Missing:
    """What they leave of the device's memory."""
    kept = residue_bytes(sleepers)
    if isinstance(kept, Missing):
        return kept
    if isinstance(device.memory_total_bytes, Missing):
        return Missing(f"the memory of GPU {device.index} is not known: {device.memory_total_bytes.reason}")
    return device.memory_total_bytes - kept


def why_no_room(device: GpuDevice, sleepers: Mapping[str, Sleeper], share: float) -> str | None:
    """Why a worker that takes this `share` of the device does not fit beside them, in numbers; None if it does."""
    if not sleepers:
        return None
    names = ", ".join(sleepers)
    room, total = room_bytes(device, sleepers), device.memory_total_bytes
    if isinstance(room, Missing) or isinstance(total, Missing):
        why = room.reason if isinstance(room, Missing) else "unknown"
        return f"GPU {device.index}: nobody knows what fits beside {names} ({why})"
    needed = share * total
    if needed <= room:
        return None
    return (
        f"GPU {device.index}: {names} sleep there and keep {gib(total - room)} of {gib(total)}; a worker takes "
        f"{gib(needed)} ({share:.0%}), {gib(room)} are left"
    )


def without_sleepers(device: GpuDevice, sleepers: Mapping[str, Sleeper]) -> GpuDevice:
    """The device as it would look if they were not there: for finding out who else is on it."""
    if not sleepers:
        return device
    ours = frozenset[int]().union(*(each.pids for each in sleepers.values()))
    kept, used, processes = residue_bytes(sleepers), device.memory_used_bytes, device.processes
    if isinstance(kept, Missing):
        used = Missing(kept.reason)
    elif not isinstance(used, Missing):
        used = max(0, used - kept)
    if not isinstance(processes, Missing):
        processes = tuple(process for process in processes if process.pid not in ours)
    return replace(device, memory_used_bytes=used, processes=processes)


def gib(size_bytes: float) -> str:
    """For a person: `1.5 GiB`."""
    return f"{size_bytes / 1024**3:.1f} GiB"


def told(sleepers: Mapping[str, Sleeper], index: Mapping[str, int]) -> Sequence[str]:
    """One line each, for a refusal: who sleeps where, and what it keeps. `index` is by UUID."""
    lines = []
    for name, sleeper in sleepers.items():
        where = ", ".join(f"GPU {index[uuid]}" for uuid in sleeper.uuids if uuid in index)
        kept = "an unknown amount" if isinstance(sleeper.vram_bytes, Missing) else gib(sleeper.vram_bytes)
        if where:
            lines.append(f"{name} sleeps on {where} and keeps {kept} there")
    return lines

"""Other work on this host while engines are measured: processors that others use, and other processes on the GPUs.

Both lengthen the measured times. The repetitions do not show a disturbance that lasts all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import Missing
from dynamo_local.errors import GpuError
from dynamo_local.profile.repetitions import Noticed, busy_processors, on_processors, strangers
from dynamo_local.system.gpus import Inventory
from dynamo_local.system.processes import cpu_s, family_of

log = logging.getLogger(__name__)

EVERY_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ours:
    """Whose processes are ours: the arbiter's and the workers' pids; and the devices that are measured, by UUID."""

    pids: frozenset[int]
    uuids: frozenset[str]


@dataclass(slots=True)
class HostWatch:
    """Looks every five seconds. `ours` says what is ours now; `inventory` is None where there are no devices.

    `busy_s` and `ours_s`: seconds that all processors worked, and of these for us, in the `elapsed_s` of looking.
    """

    ours: Callable[[], Ours]
    inventory: Inventory | None = None
    busy_s: float = 0.0
    ours_s: float = 0.0
    elapsed_s: float = 0.0
    _strangers: dict[tuple[int, str], int] = field(default_factory=dict)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look on as long as the block runs."""
        task = asyncio.create_task(self._watch(), name="looking at the host")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def noticed(self) -> list[Noticed]:
        """The observations so far."""
        others_s, cores = self.busy_s - self.ours_s, os.cpu_count() or 1
        share = others_s / (cores * self.elapsed_s) if self.elapsed_s > 0 else 0.0
        return [*busy_processors(share), *strangers(self._strangers)]

    # --- inside ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        before = await asyncio.to_thread(_processors, self.ours().pids)
        while True:
            await asyncio.sleep(EVERY_S)
            ours = self.ours()
            now = await asyncio.to_thread(_processors, ours.pids)
            self.busy_s += now.busy_s - before.busy_s
            self.ours_s += sum(s - before.ours.get(pid, 0.0) for pid, s in now.ours.items())
            self.elapsed_s += now.at_s - before.at_s
            before = now
            if self.inventory is not None:
                try:
                    devices = await asyncio.to_thread(self.inventory.sample)
                except GpuError as error:
                    log.debug("the GPUs were not looked at: %s", error)
                else:
                    self._see(devices, ours)

    def _see(self, devices: tuple[GpuDevice, ...], ours: Ours) -> None:
        family = family_of(*ours.pids)
        for device in devices:
            processes = device.processes
            if device.uuid not in ours.uuids or isinstance(processes, Missing):
                continue
            if not any(process.pid in family for process in processes):
                continue  # the driver counts pids otherwise (a container): nobody can be told from anybody
            for process in processes:
                if process.pid not in family and process.kind == "compute":
                    self._strangers[process.pid, process.name] = device.index


def share_processors(engines: Collection[str], inventory: Inventory) -> bool:
    """Whether engines of those names compute where all else of the host does: their devices are simulated, they not."""
    return inventory.simulated and any(engine != "sim" for engine in engines)


def processors() -> list[Noticed]:
    """That such engines' times are those of these processors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")
    return list(on_processors(len(os.sched_getaffinity(0)), model))


@dataclass(frozen=True, slots=True)
class _Processors:
    """At one moment: seconds that all processors worked since the boot, and those of our processes, by pid."""

    at_s: float
    busy_s: float
    ours: Mapping[int, float]


def _processors(pids: frozenset[int]) -> _Processors:
    ours = {pid: cpu_s(pid) for pid in {*family_of(*pids), os.getpid()}}
    return _Processors(time.monotonic(), _busy_s(), ours)


def _busy_s() -> float:
    """user, nice, system, irq, softirq and what a hypervisor took of all processors together."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def gpu_bytes(pid: int, devices: tuple[GpuDevice, ...]) -> int | None:
    """GPU memory of a worker's whole session; None where the driver does not tell it by process."""
    family = family_of(pid)
    sizes = [
        process.memory_bytes
        for device in devices
        for process in (() if isinstance(device.processes, Missing) else device.processes)
        if process.pid in family
    ]
    known = [number for number in sizes if not isinstance(number, Missing)]
    return sum(known) if known and len(known) == len(sizes) else None

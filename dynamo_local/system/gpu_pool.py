"""The GPUs of a run: what NVML shows, and the locks that other namespaces respect.

The fleet's ledger (`core.gpus`) says which worker holds which GPU. This module only reads and locks. A hung driver
blocks one thread of its own. Decisions then use the last inventory, which `freshness` calls stale until the driver
answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.fleet.events import GpusSeen
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError, GpuError
from dynamo_local.system.executors import CallOverdue, DaemonExecutor
from dynamo_local.system.gpu_locks import GpuLocks, LockHolder
from dynamo_local.system.gpus import Inventory

log = logging.getLogger(__name__)

SAMPLE_DEADLINE_S = 5.0
"""Deadline of a sample during the run: it takes milliseconds, and a decision waits for it."""
FIRST_SAMPLE_DEADLINE_S = 60.0
"""Deadline of the sample before the start: a driver without persistence mode wakes each device for a second or two."""
CLOSE_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The devices at one moment, and who has reserved which outside of this namespace, by UUID (in words).

    `stale` says why the devices could not be read; then the sample is empty. `host_free_bytes` is the main memory that
    a process could still take.
    """

    devices: tuple[GpuDevice, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    stale: str | None = None
    host_free_bytes: int | Missing = Missing("nobody looked")  # noqa: RUF009 - frozen

    def seen(self, stimulus_id: str) -> GpusSeen:
        """As the machine is told of it."""
        return GpusSeen(
            stimulus_id=stimulus_id,
            devices=self.devices,
            elsewhere=self.elsewhere,
            stale=self.stale,
            host_free_bytes=self.host_free_bytes,
        )


@dataclass(frozen=True, slots=True)
class Freshness:
    """The age of the inventory that decisions use: seconds since the last look (None: nobody has looked).

    `stale` says why the latest look failed; None if it did not. An idle arbiter does not look, so
    an old inventory is not yet stale.
    """

    age_s: float | None
    stale: str | None

    def as_json(self) -> dict[str, float | str | None]:
        """For `dynamo status --json`."""
        return {"age_s": None if self.age_s is None else round(self.age_s, 3), "stale": self.stale}


@dataclass(frozen=True, slots=True)
class _Look:
    """One scan: the devices, and UUID -> lock holder in words. `began_s` is monotonic."""

    devices: tuple[GpuDevice, ...]
    holders: Mapping[str, str]
    began_s: float
    host_free_bytes: int | Missing


def host_free_bytes(path: Path = Path("/proc/meminfo")) -> int | Missing:
    """Main memory that processes could still take without swapping, as the kernel estimates it."""
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError) as error:
        return Missing(f"{path} cannot be read: {error}")
    return Missing(f"{path} has no MemAvailable")


class GpuPool:
    """The devices that this run may use. `inventory` is None where nobody asked for a GPU, or the user pins.

    `sample_deadline_s` is how long a decision waits for the driver.
    """

    def __init__(
        self,
        namespace: str,
        inventory: Inventory | None,
        locks: GpuLocks,
        *,
        sample_deadline_s: float = SAMPLE_DEADLINE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._inventory = inventory
        self._locks = locks
        self._sample_deadline_s = sample_deadline_s
        self._now_s = now_s
        self._driver = DaemonExecutor("GPU driver", threads=1)
        self._looked_s: float | None = None
        self._stale: str | None = None

    # --- looking -------------------------------------------------------------------------------

    def sample(self) -> GpuSample:
        """Look once, before there is an event loop. Raises `GpuError`."""
        if self._inventory is None:
            return GpuSample()
        held = self._locks.held()
        try:
            look = self._driver.run_now(self._look, FIRST_SAMPLE_DEADLINE_S, what="the GPU driver")
        except CallOverdue as error:
            raise GpuError(
                f"{error}: see whether `nvidia-smi` answers; to run without GPUs use --gpus sim:8"
            ) from error
        return self._seen(look, held)

    async def look(self) -> GpuSample:
        """Look once, in a thread. Never raises for a driver that fails or hangs: then the sample is `stale`.

        A hung driver costs the first caller `sample_deadline_s`, the later ones nothing.
        """
        if self._inventory is None:
            return GpuSample()
        held = self._locks.held()
        try:
            look = await self._driver.run(self._look, self._sample_deadline_s, what="the GPU driver")
        except DynamoError as error:
            if self._stale is None:
                log.warning("decisions go by the last GPU inventory: %s", error)
            self._stale = str(error)
            return GpuSample(stale=self._stale)
        return self._seen(look, held)

    def freshness(self) -> Freshness:
        """How far the last inventory can be trusted."""
        return Freshness(None if self._looked_s is None else self._now_s() - self._looked_s, self._stale)

    def _look(self) -> _Look:
        """Runs in a thread: it changes nothing."""
        assert self._inventory is not None
        began_s = self._now_s()
        devices = tuple(self._inventory.sample())
        return _Look(devices, self._locks.holders_of(device.uuid for device in devices), began_s, host_free_bytes())

    def _seen(self, look: _Look, held_before: frozenset[str]) -> GpuSample:
        """The sample of a look that succeeded, without locks that were ours at any moment of it: those do not show who
        else holds them."""
        ours = held_before | self._locks.held()
        if self._stale is not None:
            log.warning("the GPU inventory is fresh again")
        self._looked_s, self._stale = look.began_s, None
        elsewhere = {uuid: who for uuid, who in look.holders.items() if uuid not in ours}
        return GpuSample(look.devices, elsewhere, host_free_bytes=look.host_free_bytes)

    # --- locking -------------------------------------------------------------------------------

    def lock(self, watcher_name: str, uuids: Sequence[str]) -> tuple[str, ...]:
        """Reserve devices for that worker; those that we hold already stay ours. Returns the newly locked ones.

        All or none, and without waiting: raises `GpuLocked` where somebody else holds one.
        """
        held = self._locks.held()
        wanted = tuple(uuid for uuid in uuids if uuid not in held)
        self._locks.try_acquire(wanted, LockHolder(self._namespace, watcher_name, os.getpid()))
        return wanted

    def lock_rest(self, watcher_name: str, uuids: Sequence[str]) -> None:
        """For a running worker, which holds the locks of its devices itself: lock them in the places where it does not
        (an earlier release had fewer)."""
        self._locks.take_free(uuids, LockHolder(self._namespace, watcher_name, os.getpid()))

    def unlock(self, uuids: Sequence[str]) -> None:
        """Let go of our part of these locks; those that we do not hold are ignored."""
        self._locks.release(uuids)

    def inherited_fds(self, uuids: Sequence[str]) -> list[int]:
        """Descriptors of the locks that we hold: the worker inherits them, so they hold as long as *it* lives."""
        held = self._locks.held()
        return self._locks.fds_for([uuid for uuid in uuids if uuid in held])

    def close(self) -> None:
        """Let go of all locks and of NVML. A driver that hangs is left to the end of the process."""
        self._locks.close()
        if self._inventory is not None:
            try:
                self._driver.run_now(self._inventory.close, CLOSE_DEADLINE_S, what="the GPU driver")
            except DynamoError as error:
                log.warning("NVML was not closed: %s", error)

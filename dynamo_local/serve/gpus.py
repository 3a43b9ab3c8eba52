"""The GPUs of a run: what NVML shows, what the ledger says, and the locks that other namespaces respect.

The ledger decides; this looks, locks, and waits. A device goes back only when its process is gone *and* NVML shows
its memory returned (lesson 4); what is never returned is quarantined and shown.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from dynamo_local.clock import Clock
from dynamo_local.core.gpus import GpuDevice, GpuLedger, occupant
from dynamo_local.errors import GpuError
from dynamo_local.serve.gpu_locks import GpuLocks, LockHolder
from dynamo_local.serve.inventory import Inventory

log = logging.getLogger(__name__)

RETURN_DEADLINE_S = 30.0
"""A driver takes up to a few seconds to give back a killed process's memory."""
RETURN_POLL_S = 0.1


class GpuPool:
    """The devices that this run may use. `inventory` is None where nobody asked for a GPU, or the user pins."""

    def __init__(self, namespace: str, inventory: Inventory | None, locks: GpuLocks) -> None:
        self._namespace = namespace
        self._inventory = inventory
        self._locks = locks
        self.ledger = GpuLedger(())

    def sample(self) -> tuple[GpuDevice, ...]:
        """Look once (blocks: NVML), and tell the ledger. Raises `GpuError`."""
        if self._inventory is None:
            return ()
        devices = tuple(self._inventory.sample())
        self.ledger.observe(devices, elsewhere=self._locks.elsewhere(device.uuid for device in devices))
        return devices

    async def refresh(self) -> None:
        """`sample` off the loop."""
        await asyncio.to_thread(self.sample)

    def take(self, watcher_name: str, devices: Sequence[GpuDevice]) -> None:
        """Lock what the ledger gave to that worker. On `GpuError` (another namespace was quicker) it is given back."""
        try:
            holder = LockHolder(self._namespace, watcher_name, os.getpid())
            self._locks.acquire([device.uuid for device in devices], holder)
        except GpuError:
            self.ledger.release(watcher_name)
            raise

    def assign(self, watcher_name: str, uuids: Sequence[str], *, running: bool) -> tuple[GpuDevice, ...]:
        """The devices that an adopted worker has. One that runs holds the locks itself; for one that does not, we
        lock them: `()` where another namespace was quicker. Raises `GpuError` for devices that we cannot know of."""
        devices = self.ledger.assign(watcher_name, uuids)
        if not running and not self.relock(watcher_name, devices):
            self.ledger.release(watcher_name)
            return ()
        return devices

    def relock(self, watcher_name: str, devices: Sequence[GpuDevice]) -> bool:
        """Make sure that we hold the locks of a worker that is gone: an adopted one took its own along.

        False, and nothing taken, where somebody else holds one now.
        """
        held = self._locks.held()
        holder = LockHolder(self._namespace, watcher_name, os.getpid())
        try:
            self._locks.acquire([device.uuid for device in devices if device.uuid not in held], holder)
        except GpuError as error:
            log.warning("%s cannot have its GPUs back: %s", watcher_name, error)
            return False
        return True

    def allocate(self, watcher_name: str, count: int) -> tuple[GpuDevice, ...]:
        """Devices for one more worker, locked. Raises `GpuError` that says who holds what."""
        devices = self.ledger.allocate(watcher_name, count)
        self.take(watcher_name, devices)
        return devices

    def let_go(self, watcher_name: str, devices: Sequence[GpuDevice]) -> None:
        """Undo an `allocate` whose worker was never started."""
        self.ledger.release(watcher_name)
        self._locks.release([device.uuid for device in devices])

    def inherited_fds(self, devices: Sequence[GpuDevice]) -> list[int]:
        """Descriptors of the locks that we hold: the worker inherits them, so they hold as long as *it* lives."""
        held = self._locks.held()
        return self._locks.fds_for([device.uuid for device in devices if device.uuid in held])

    async def returned(self, devices: Sequence[GpuDevice], clock: Clock) -> list[GpuDevice]:
        """Wait until nothing occupies these devices; those that still are occupied at the deadline come back."""
        deadline_s = clock.now_s() + RETURN_DEADLINE_S
        uuids = {device.uuid for device in devices}
        while uuids:
            await self.refresh()
            seen = {device.uuid: device for device in self.ledger.devices()}
            busy = [seen[uuid] for uuid in uuids if uuid in seen and occupant(seen[uuid]) is not None]
            if not busy or clock.now_s() > deadline_s:
                return busy
            await clock.sleep_until(clock.now_s() + RETURN_POLL_S)
        return []

    def give_back(self, watcher_name: str, devices: Sequence[GpuDevice], busy: Sequence[GpuDevice]) -> list[str]:
        """Release a worker's devices after `returned`, which found these `busy`: they are quarantined.

        Returns what to tell a person about them.
        """
        self.ledger.release(watcher_name)
        self._locks.release([device.uuid for device in devices])
        told = []
        for device in busy:
            why = f"{occupant(device)} still holds it {RETURN_DEADLINE_S:g} s after {watcher_name} ended"
            self.ledger.quarantine(device.uuid, why)
            told.append(f"GPU {device.index} ({device.uuid}) is quarantined: {why}")
        return told

    def close(self) -> None:
        """Let go of all locks and of NVML."""
        self._locks.close()
        if self._inventory is not None:
            self._inventory.close()

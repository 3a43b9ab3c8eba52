"""A simulated process's side of standby: the real `worker.sleep`, on an engine that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_local.errors import EngineError
from dynamo_local.worker.sleep import Sleeping

if TYPE_CHECKING:
    from tests.simulation.process import SimProcess

SLEEP_S = 0.1


class SimStandby:
    """See `worker.sleep.StandbySteps`. `on_gpus`: its process holds its devices' memory."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self.sleeping = Sleeping(process.drain, self, self._failed)
        self.on_gpus = True
        self.wakes = 0

    def facts(self) -> dict[str, Any]:
        """What its ready key says."""
        process, sleeping = self._process, self.sleeping
        recycle = process.fate.recycles_after is not None and self.wakes >= process.fate.recycles_after
        return {
            "order": sleeping.done,
            "asleep": sleeping.asleep,
            "level": sleeping.level,
            "vram_bytes": 1024**3 if sleeping.asleep else None,
            "host_bytes": 1024**3,
            "pids": [process.pid],
            "cannot": process.fate.cannot_sleep,
            "recycle": "its memory has grown" if recycle else None,
        }

    def _failed(self, what: str, error: BaseException) -> None:
        process = self._process
        process.world.note(f"{process.name} ({process.pid}): {what} failed: {error}")
        process.world.exits(process, 1)

    async def op_sleep(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """An operation of its control endpoint."""
        self.sleeping.sleep(int(args["order"]), int(args["level"]))
        return {"state": str(self._process.drain.phase)}

    async def op_wake(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """An operation of its control endpoint."""
        self.sleeping.wake(int(args["order"]))
        return {"state": str(self._process.drain.phase)}

    # --- worker.sleeping.StandbySteps ----------------------------------------------------------------

    async def withdraw(self) -> None:
        """See `StandbySteps`."""
        await self._process.withdraw()

    def stop_accepting(self, linger_s: float) -> None:
        """See `StandbySteps`."""

    async def finish(self) -> None:
        """See `StandbySteps`."""
        await self._process.finish()

    async def sleep_engine(self, level: int) -> None:
        """See `StandbySteps`."""
        await asyncio.sleep(SLEEP_S)
        await self._process.goes()
        self.on_gpus = False
        self._process.world.let_go(self._process)

    async def wake_engine(self) -> None:
        """See `StandbySteps`."""
        self.on_gpus = True
        self._process.world.takes(self._process)
        fate = self._process.fate
        await asyncio.sleep(fate.wake_s if fate.wake_s is not None else 10_000.0)
        await self._process.goes()
        self.wakes += 1
        if fate.wakes_badly:
            raise EngineError("the probe was answered otherwise")

    async def come_back(self) -> None:
        """See `StandbySteps`."""
        await self._process.come_back()

    async def tell(self) -> None:
        """See `StandbySteps`."""
        await self._process.tell()

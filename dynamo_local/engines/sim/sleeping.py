"""The simulated engine's sleep: it takes the time, and keeps the memory, that its options say."""

from __future__ import annotations

from dynamo_local.clock import Clock
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sleeping import EngineMemory
from dynamo_local.errors import EngineError

SIM_MEMORY_BYTES = 80 * 1024**3
"""Of a simulated device (`gpus.inventory`), of which an awake engine takes `SIM_SHARE`."""
SIM_SHARE = 0.9


class SimSleep:
    """Whether it sleeps, and what that costs. `wakes` counts those so far, the rehearsal's included."""

    def __init__(self, options: SimOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self.level: int | None = None
        self.wakes = 0

    @property
    def asleep(self) -> bool:
        """It takes no requests."""
        return self.level is not None

    @property
    def corrupted(self) -> bool:
        """From now on it answers otherwise than before (`corrupt_after_wakes`)."""
        after = self._options.corrupt_after_wakes
        return after is not None and self.wakes >= after

    async def sleep(self, level: int) -> None:
        """Takes `sleep_s / speed`."""
        self.level = level
        await self._clock.sleep_until(self._clock.now_s() + self._options.sleep_s / self._options.speed)

    async def wake(self) -> None:
        """Takes `wake_s / speed`, or `wake_level2_s / speed` where the weights are read again."""
        if self.level is None:
            raise EngineError("the engine does not sleep")
        wake_s = self._options.wake_s if self.level == 1 else self._options.wake_level2_s
        await self._clock.sleep_until(self._clock.now_s() + wake_s / self._options.speed)
        self.level = None
        self.wakes += 1

    def memory(self) -> EngineMemory:
        """On a device of its own, that is only simulated."""
        options, grown = self._options, self._options.sleep_growth_bytes * self.wakes
        if self.level is None:
            return EngineMemory(int(SIM_SHARE * SIM_MEMORY_BYTES), grown)
        host = options.sleep_host_bytes if self.level == 1 else 0
        return EngineMemory(options.sleep_residue_bytes + grown, host + grown)

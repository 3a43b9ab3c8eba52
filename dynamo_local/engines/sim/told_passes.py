"""Tells a sink of the simulated engine's passes, and each second without one, that the engine is alive."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_local.clock import Clock
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.sim.scheduling.watched import PassDone
from dynamo_local.ports import PassSink

HEARTBEAT_S = 1.0

Passing = tuple[Requests, Requests]
"""What is computed now, and what is queued."""


class ToldPasses:
    """`watch` is the scheduler's; `look` brings the scheduler to now, and says what it computes (None: it has none)."""

    def __init__(self, sink: PassSink, clock: Clock, look: Callable[[], Passing | None]) -> None:
        self.watch: list[PassDone] = []
        self._sink = sink
        self._clock = clock
        self._look = look
        self._count = 0
        self._last_s = clock.now_s()
        sink.refresh = self._refresh

    def tell(self) -> None:
        """The passes that have ended since the last call."""
        for done in self.watch:
            self._record(done.end_s, done.wall_time_s, done.scheduled, done.queued)
        self.watch.clear()

    async def beat(self) -> None:
        """For ever: a heartbeat after each second without a pass."""
        while True:
            await self._clock.sleep_until(self._last_s + HEARTBEAT_S)
            passing, now_s = self._look(), self._clock.now_s()
            if now_s - self._last_s < HEARTBEAT_S:
                continue
            if passing is None:
                return
            self._record(now_s, 0.0, *passing)

    def _refresh(self) -> None:
        self._look()

    def _record(self, at_s: float, wall_time_s: float, scheduled: Requests, queued: Requests) -> None:
        self._count += 1
        self._last_s = at_s
        self._sink.record(ForwardPass(EngineId(""), self._count, wall_time_s, scheduled, queued, at_s))

"""A whole measurement: points in their order, kept after each, told to whoever watches, ended by Ctrl-C in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from zlib import crc32

from dynamo_local.errors import DynamoError
from dynamo_local.measuring.graph import MeasuredGraph, Worker
from dynamo_local.measuring.repetition import TIMEOUT_S, request_of, sample_of
from dynamo_local.profile.document import keep
from dynamo_local.profile.points import Kind, Limits, Point
from dynamo_local.profile.repetitions import Progress, Sample

KEEP_EVERY_S = 2.0
WARM_UP = 2
"""Repetitions of a small and a large point on each worker that nobody counts: caches, graphs and clocks warm up."""


class Session:
    """Measures the points of `progress` on the workers of the point's kind.

    All workers of a kind repeat a point at once. `in_turn`: one after the other, because they share processors. `stop`
    ends the session after the current repetition.
    """

    def __init__(
        self,
        graph: MeasuredGraph,
        workers: Mapping[Kind, Sequence[Worker]],
        limits: Mapping[Kind, Limits],
        folder: Path,
        configuration_hash: str,
        tell: Callable[[Progress, Point | None], None],
        *,
        in_turn: bool = False,
    ) -> None:
        self._graph = graph
        self._workers = workers
        self._limits = limits
        self._folder = folder
        self._hash = configuration_hash
        self._tell = tell
        self._in_turn = in_turn
        self.stop = asyncio.Event()

    async def run(self, progress: Progress) -> Progress:
        """Run until the end or `stop`. A refusal of the engine counts as a failure of its point."""
        began_s, kept_s = time.monotonic() - progress.elapsed_s, time.monotonic()
        await self._warm_up(progress)
        while not self.stop.is_set() and (point := progress.next_point()) is not None:
            self._tell(progress, point)
            at_s = time.monotonic()
            try:
                samples, failure = await self._repeat(point, progress, at_s - began_s), None
            except DynamoError as error:
                samples, failure = [], str(error)
            progress = progress.noted(point, samples, time.monotonic() - at_s, failure)
            if time.monotonic() - kept_s > KEEP_EVERY_S:
                keep(self._folder, progress, self._hash)
                kept_s = time.monotonic()
        keep(self._folder, progress, self._hash)
        self._tell(progress, None)
        return progress

    async def _warm_up(self, progress: Progress) -> None:
        for kind in self._workers:
            points = sorted((p for p in progress.points if p.kind is kind), key=lambda point: point.cost)
            for point in points[:1] + points[len(points) // 2 : len(points) // 2 + 1]:
                for _ in range(WARM_UP):
                    with contextlib.suppress(DynamoError):  # the same refusal comes again, and is noted then
                        await self._on_all(point, seed=-1, at_s=0.0)

    async def _repeat(self, point: Point, progress: Progress, at_s: float) -> list[Sample]:
        seed = crc32(f"{progress.rules.seed}/{point}/{len(progress.of(point).samples)}".encode())
        return await self._on_all(point, seed, at_s)

    async def _on_all(self, point: Point, seed: int, at_s: float) -> list[Sample]:
        workers = self._workers[point.kind]
        if self._in_turn:
            return [await self._one(worker, point, seed, at_s) for worker in workers]
        asked = (self._one(worker, point, seed, at_s) for worker in workers)
        found = await asyncio.gather(*asked, return_exceptions=True)  # the next repetition runs beside no straggler
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return cast(list[Sample], found)

    async def _one(self, worker: Worker, point: Point, seed: int, at_s: float) -> Sample:
        asked = request_of(point, self._limits[point.kind], seed & 0x7FFFFFFF)
        answer = await self._graph.measure(worker, asked, TIMEOUT_S + 10.0)
        return sample_of(point, answer, asked, worker.name, at_s)


# --- How the budget of a measurement is divided, once the duration of the start is known. Pure.

TRACE_SHARE = 1 / 3
"""Share of the measuring time for the trace that checks the profile. At most five minutes."""
TRACE_MAX_S = 300.0
START_SHARE_MAX = 0.5
"""A start that takes more of the budget does so beside it: a profile of no points is none."""
ACTIONS_SHARE_MAX = 1 / 3
"""Share of the time that the start leaves."""
ACTION_S = 15.0
"""Time for the commands around one more worker and one less, s."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds for the points, for the trace, and kept for actions."""

    points_s: float
    trace_s: float
    actions_s: float


def spending(budget_s: float, started_s: float, cold_s: Collection[float]) -> Budget:
    """`started_s` is what the start took of the budget, `cold_s` what the cold start of each component takes that is
    to be tried again; none of them: no actions."""
    left_s = max(budget_s * (1 - START_SHARE_MAX), budget_s - started_s)
    actions_s = min(left_s * ACTIONS_SHARE_MAX, sum(each + ACTION_S for each in cold_s))
    trace_s = min(TRACE_MAX_S, (left_s - actions_s) * TRACE_SHARE)
    return Budget(left_s - actions_s - trace_s, trace_s, actions_s)

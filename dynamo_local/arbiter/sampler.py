"""Workers' loads, asked for once a second; an answer also shows that a worker is alive.

One scatter request asks all (64 pushes a second cost ten times as much, measured). A worker that does not
answer has *no* load, not a load of zero; one that stays silent while etcd and NATS answer is hung.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.kept_targets import KeptTargets
from dynamo_local.arbiter.links import Links
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.events import InfraSeen, LoadsHeard
from dynamo_local.core.served import LastMinute
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError
from dynamo_local.ports import QueueDepth

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
DEAD_LETTERS_EVERY_S = 5.0
TOLERANCE_S = 0.2
"""The planner samples as well, at intervals of its own. While it does, nobody is asked twice: the next sample here is
due so much after the planner's next one should have come."""

T = TypeVar("T")


@dataclass(slots=True)
class QueueView:
    """The prefill queue as last seen; None where it could not be."""

    depth: QueueDepth | None = None
    dead_letters: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For `dynamo status`."""
        depth = self.depth
        return {
            "pending": None if depth is None else depth.pending,
            "outstanding": None if depth is None else depth.outstanding,
            "dead_letters": self.dead_letters,
        }


@dataclass(frozen=True, slots=True)
class LoadsSample:
    """The answers of one scatter request: load and the time at which it was measured, by watcher name.

    `failed` says why nobody could be asked.
    """

    loads: Mapping[str, tuple[Load, float]]
    failed: Missing | None = None


class Sampling:
    """Samples all running workers and the prefill queue: once a second by itself, and whenever somebody asks.

    A caller that asks while a sample is under way gets that one. The loop skips workers that a caller has just asked.
    """

    def __init__(self, namespace: str, controller: FleetController, links: Links, clock: Clock) -> None:
        self.kept = KeptTargets()
        self.last_minute = LastMinute()
        self._namespace = namespace
        self._controller = controller
        self._links = links
        self._clock = clock
        self._sampler: Any = None
        self._loads = _Shared(self._ask_loads, clock)
        self._depth = _Shared(self._ask_depth, clock)
        self.queue = QueueView()
        self.dispatch: dict[str, Mapping[str, float]] = {}
        """How each worker dispatches requests, as last told, by watcher name; see `arbiter.metrics`."""

    async def run(self) -> None:
        """For ever, on deadlines that do not drift: where nobody else asks, those of `sleep_to_next`."""
        letters_s = self._clock.now_s()
        next_s = letters_s // SAMPLE_EVERY_S * SAMPLE_EVERY_S
        while True:
            await self._clock.sleep_until(next_s)
            now_s = self._clock.now_s()
            asked_s = self._loads.began_s
            if asked_s is not None and now_s - asked_s < SAMPLE_EVERY_S - TOLERANCE_S:
                next_s = asked_s + SAMPLE_EVERY_S + TOLERANCE_S
            else:
                await asyncio.gather(self._loads.get(), self._depth.get())
                next_s = max(next_s + SAMPLE_EVERY_S, self._clock.now_s())
            if self._links.queues is not None and now_s >= letters_s:
                await self._count_dead_letters()
                letters_s = now_s + DEAD_LETTERS_EVERY_S

    async def loads(self) -> LoadsSample:
        """Ask all running workers now. Never raises; takes as long as the slowest, a quarter of a second at most."""
        return await self._loads.get()

    async def depth(self) -> QueueDepth | Missing:
        """Ask for the prefill queue's depth now."""
        return await self._depth.get()

    async def _ask_loads(self) -> LoadsSample:
        from dynamo_local.transport.load import LoadSampler

        if self._sampler is None:
            self._sampler = LoadSampler(self._links.nats, self._namespace)
        failed, reports = None, {}
        try:
            reports = await self._sampler.sample(expected=len(self._controller.fleet.running()))
        except DynamoError as error:
            log.debug("no load sample: %s", error)
            failed = Missing(str(error))
        now_s = self._clock.now_s()
        answer = self._links.answer
        if answer is not self._controller.fleet.infra_ok:
            self._controller.feed(InfraSeen(stimulus_id="sample", ok=answer))
        blameless = failed is not None or not answer  # while we cannot ask, silence is nobody's fault
        loads = {name: report.load for name, report in reports.items()}
        self._controller.feed(LoadsHeard(stimulus_id="sample", loads=loads, blameless=blameless))
        heard = {name: report.dispatch for name, report in reports.items() if report.dispatch is not None}
        self.kept.heard(heard, now_s)
        served = {(report.component, name): report.served for name, report in reports.items() if report.served}
        self.last_minute.heard(served, now_s)
        known = self._controller.fleet.workers
        self.dispatch = {name: each for name, each in {**self.dispatch, **heard}.items() if name in known}
        return LoadsSample({name: (report.load, now_s - report.age_s) for name, report in reports.items()}, failed)

    async def _ask_depth(self) -> QueueDepth | Missing:
        queues = self._links.queues
        if queues is None:
            return Missing("there is no prefill queue")
        try:
            self.queue.depth = await queues.depth()
        except DynamoError as error:
            log.debug("the prefill queue was not sampled: %s", error)
            self.queue = QueueView()
            return Missing(str(error))
        return self.queue.depth

    async def _count_dead_letters(self) -> None:
        if (queues := self._links.queues) is None:
            return
        try:
            self.queue.dead_letters = await queues.dead_letters()
        except DynamoError as error:
            log.debug("the dead letters were not counted: %s", error)
            self.queue.dead_letters = None


class _Shared(Generic[T]):
    """One sample at a time: who comes while one is taken waits for that one. `began_s`: when the last was begun."""

    def __init__(self, take: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._take = take
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: tuple[float, T] | None = None
        self.began_s: float | None = None

    async def get(self) -> T:
        asked_s = self._clock.now_s()
        async with self._lock:
            if self._last is not None and self._last[0] >= asked_s:
                return self._last[1]  # taken while we waited
            self.began_s = asked_s
            sample = await self._take()
            self._last = (self._clock.now_s(), sample)
            return sample

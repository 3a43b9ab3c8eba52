"""What the workers say of themselves, once a second: their load, and that they are alive.

One scatter request for all (64 pushes a second cost ten times as much, circus-facts). A worker that does not
answer has *no* load, not a load of zero; one that stays silent while etcd and NATS answer is hung.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.errors import DynamoError
from dynamo_local.ports import QueueDepth
from dynamo_local.serve.fleet import Fleet
from dynamo_local.serve.links import Links

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
STALE_S = 3 * SAMPLE_EVERY_S
"""A load older than three samples is none (planner-rules)."""
DEAD_LETTERS_EVERY_S = 5.0


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


class Sampling:
    """Samples all running workers and the prefill queue."""

    def __init__(self, namespace: str, fleet: Fleet, links: Links, clock: Clock) -> None:
        self._namespace = namespace
        self._fleet = fleet
        self._links = links
        self._clock = clock
        self.queue = QueueView()

    async def run(self) -> None:
        """For ever, on deadlines that do not drift."""
        from dynamo_local.runtime.load import LoadSampler

        sampler = LoadSampler(self._links.nats, self._namespace)
        next_s = self._clock.now_s()
        letters_s = next_s
        while True:
            await self._loads(sampler)
            if self._links.queue is not None:
                await self._depth(letters=self._clock.now_s() >= letters_s)
                letters_s = max(letters_s, self._clock.now_s() + DEAD_LETTERS_EVERY_S - SAMPLE_EVERY_S)
            next_s = max(next_s + SAMPLE_EVERY_S, self._clock.now_s())
            await self._clock.sleep_until(next_s)

    async def _loads(self, sampler: Any) -> None:
        try:
            reports = await sampler.sample(expected=len(self._fleet.running()))
        except DynamoError as error:
            log.debug("no load sample: %s", error)
            reports = None
        now_s = self._clock.now_s()
        blameless = reports is None or not self._links.answer  # while we cannot ask, silence is nobody's fault
        for worker in self._fleet.workers.values():
            report = None if reports is None else reports.get(worker.name)
            if report is not None:
                worker.load, worker.heard_s = report.load, now_s
                continue
            if worker.heard_s is None or now_s - worker.heard_s > STALE_S:
                worker.load = None
            if worker.heard_s is not None and blameless:
                worker.heard_s = now_s

    async def _depth(self, *, letters: bool) -> None:
        queue: Any = self._links.queue
        try:
            self.queue.depth = await queue.depth()
            if letters:
                self.queue.dead_letters = len(await queue.dead_letters())
        except DynamoError as error:
            log.debug("the prefill queue was not sampled: %s", error)
            self.queue = QueueView()

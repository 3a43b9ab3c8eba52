"""The arbiter's notes to people: in its log, in `dynamo status`, and on the display of a start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.worker_requests import WorkerAsks
from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.notes import About, Ailing, Note, noted, still_due
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError, RequestError

log = logging.getLogger(__name__)


class Notes:
    """The notes that still hold. `show` prints a line on the display."""

    def __init__(self, show: Callable[[str], None], clock: Clock) -> None:
        self._show = show
        self._clock = clock
        self._kept: tuple[Note, ...] = ()

    def tell(self, text: str, about: About = None) -> None:
        log.warning("%s", text)
        self._add(text, about)
        self._show(text)

    def failed(self, worker: str, why: str) -> None:
        """Note a failed worker, for `dynamo status` only: the display shows the end of its log."""
        self._add(f"{worker} {why}", Ailing(worker))

    def _add(self, text: str, about: About) -> None:
        self._kept = noted(self._kept, text, about, self._clock.now_s())

    def as_json(self, fleet: Fleet) -> list[dict[str, Any]]:
        """For `dynamo status --json`, the latest last: text, count, first and last time (seconds since 1970)."""
        self.on_fleet(fleet)
        ahead_s = self._clock.wall_s() - self._clock.now_s()
        return [
            {
                "text": note.text,
                "count": note.count,
                "first_at": round(note.first_s + ahead_s, 3),
                "last_at": round(note.last_s + ahead_s, 3),
            }
            for note in self._kept
        ]

    def on_fleet(self, fleet: Fleet) -> None:
        """Forget notes that do not hold any more."""
        if self._kept:
            self._kept = still_due(self._kept, fleet.workers, self._clock.now_s())


LOOK_EVERY_S = 1.0
LONG_S = 2.0
"""A shorter start is not asked."""
_FAILED = (WorkerState.START_TIMED_OUT, WorkerState.CRASHED)


class StartWatch:
    """Asks starting workers once a second what they wait for. Nothing is decided by it.

    `waits_for` has the last answer of each worker that is `starting` or has just failed to, by watcher name.
    """

    def __init__(self, namespace: str, controller: FleetController, links: Links, clock: Clock) -> None:
        self._asks = WorkerAsks(links, namespace, clock)
        self._controller = controller
        self._clock = clock
        self.waits_for: dict[str, str] = {}

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self.look()
            await sleep_to_next(self._clock, LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask all workers that have been starting for a while."""
        now_s, workers = self._clock.now_s(), self._controller.fleet.workers.values()
        starting = [
            worker.name
            for worker in workers
            if worker.state is WorkerState.STARTING and now_s - worker.since_s > LONG_S
        ]
        answers = await asyncio.gather(*(self._ask(name) for name in starting))
        known = self.waits_for
        found = {
            name: what
            for name, answer in zip(starting, answers, strict=True)
            if (what := known.get(name) if answer is None else answer)
        }
        late = {name for name, worker in self._controller.fleet.workers.items() if worker.state in _FAILED}
        # A failure is reported when the process is gone. Until then the worker's last answer is needed.
        self.waits_for = {**{name: what for name, what in known.items() if name in late}, **found}

    async def _ask(self, name: str) -> str | None:
        """The answer: empty if it waits for nothing, None if it does not answer."""
        try:
            answer = (await self._asks.control(name, "status")).get("waiting_for")
        except (RequestError, DynamoError):  # it does not listen yet, is busy, or ends just now
            return None
        return str(answer or "")

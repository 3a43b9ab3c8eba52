"""What workers wait for that take long to start: asked once a second, for people. Nothing is decided by it."""

from __future__ import annotations

import asyncio

from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.control.executor.worker_asks import WorkerAsks
from dynamo_local.control.links import Links
from dynamo_local.control.shell import Shell
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError, RequestError

LOOK_EVERY_S = 1.0
LONG_S = 2.0
"""A start that is shorter has nothing to tell."""
_FAILED = (WorkerState.START_TIMED_OUT, WorkerState.CRASHED)


class StartWatch:
    """`waits_for` has the last answer of each worker that is `starting`, or has just failed to, by watcher name."""

    def __init__(self, namespace: str, shell: Shell, links: Links, clock: Clock) -> None:
        self._asks = WorkerAsks(links, namespace, clock)
        self._shell = shell
        self._clock = clock
        self.waits_for: dict[str, str] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.look()
            await sleep_to_next(self._clock, LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask all that have been starting for a while."""
        now_s, workers = self._clock.now_s(), self._shell.fleet.workers.values()
        starting = [
            worker.name
            for worker in workers
            if worker.state is WorkerState.STARTING and now_s - worker.since_s > LONG_S
        ]
        answers = await asyncio.gather(*(self._ask(name) for name in starting))
        known = self.waits_for
        told = {
            name: what
            for name, answer in zip(starting, answers, strict=True)
            if (what := known.get(name) if answer is None else answer)
        }
        late = {name for name, worker in self._shell.fleet.workers.items() if worker.state in _FAILED}
        # Its failure is reported when its process is gone: what it had waited for is wanted until then.
        self.waits_for = {**{name: what for name, what in known.items() if name in late}, **told}

    async def _ask(self, name: str) -> str | None:
        """Empty where it waits for nothing; None where it does not answer: what it said last counts on."""
        try:
            told = (await self._asks.control(name, "status")).get("waiting_for")
        except (RequestError, DynamoError):  # it does not listen yet, is busy, or ends just now
            return None
        return str(told or "")

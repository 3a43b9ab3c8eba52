"""How a run ends: in stages, each within a deadline, so that what streams is finished before its workers go.

Frontends first (they stop accepting and finish), then everything that decodes, then the prefill workers that the
decode workers may still be waiting for. The servers go last, and are not this module's.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable

from dynamo_local.clock import Clock
from dynamo_local.core import drains
from dynamo_local.core.lifecycle import NEXT, DrainDeadlinePassed, DrainRequested
from dynamo_local.core.types import Missing, Role
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.leftovers import Known
from dynamo_local.serve.processes import kill_session, send_signal
from dynamo_local.serve.progress import View

STAGES: tuple[frozenset[Role], ...] = (
    frozenset({Role.FRONTEND}),
    frozenset({Role.OTHER, Role.DECODE, Role.AGGREGATED}),
    frozenset({Role.PREFILL}),
)
POLL_S = 0.02
KILLED_GONE_S = 10.0
"""A SIGKILLed process is gone in milliseconds, or hangs in the kernel (a stuck driver): then we say so and go on."""


def drain_without_arbiter(workers: Iterable[Known], tell: Callable[[str], None]) -> None:
    """The same stages for workers whose arbiter is dead: asked by SIGTERM, waited for within each one's deadline.

    Blocks. What is still there afterwards is the caller's to end.
    """
    workers = list(workers)
    for stage in STAGES:
        asked = [worker for worker in workers if worker.role in stage and worker.alive]
        for worker in asked:
            tell(f"{worker.name}: draining")
            send_signal(worker.pid, signal.SIGTERM)
        began_s = time.monotonic()
        for worker in asked:
            while worker.alive and time.monotonic() - began_s < worker.drain_deadline_s:
                time.sleep(POLL_S)


class Leaving:
    """Ends all workers of a fleet. `now` cuts the waiting short: whole sessions are killed."""

    def __init__(self, fleet: Fleet, clock: Clock, now: asyncio.Event, view: View) -> None:
        self._fleet = fleet
        self._clock = clock
        self._now = now
        self._view = view

    async def end_workers(self) -> None:
        """Return when no worker has a process any more."""
        for stage in STAGES:
            await self._drain([worker for worker in self._fleet.running() if worker.plan.role in stage])

    async def _drain(self, workers: list[Worker]) -> None:
        asked = [worker for worker in workers if (worker.state, DrainRequested) in NEXT]
        if not self._now.is_set():
            await self._fleet.apply({w.name: DrainRequested(stimulus_id="down", reason="down") for w in asked})
            for worker in workers:
                if worker.pid is not None:
                    send_signal(worker.pid, signal.SIGTERM)
        await asyncio.gather(*(self._until_gone(worker) for worker in workers))

    async def _until_gone(self, worker: Worker) -> None:
        deadline_s = self._clock.now_s() + worker.plan.drain_deadline_s
        if not await self._gone_or_now(worker, deadline_s):
            await self._kill(worker)

    async def _gone_or_now(self, worker: Worker, deadline_s: float) -> bool:
        gone = asyncio.ensure_future(self._fleet.until(lambda: not worker.runs, deadline_s))
        now = asyncio.ensure_future(self._now.wait())
        await asyncio.wait({gone, now}, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if gone.done():
            return gone.result()
        gone.cancel()
        return not worker.runs

    async def _kill(self, worker: Worker) -> None:
        pid = worker.pid
        if pid is None:
            return
        cut = drains.cut(Missing("it published no load") if worker.load is None else worker.load)
        if not self._now.is_set():
            why = f"not gone {worker.plan.drain_deadline_s:g} s after it was asked to leave"
            count = f"{cut} requests are" if isinstance(cut, int) else "nobody knows what is"
            self._view.event(f"{worker.name}: {why}; its session is ended, {count} cut")
        if (worker.state, DrainDeadlinePassed) in NEXT:
            event = DrainDeadlinePassed(stimulus_id="down", deadline_s=worker.plan.drain_deadline_s, requests_cut=cut)
            await self._fleet.apply({worker.name: event})
        kill_session(pid)
        if not await self._fleet.until(lambda: not worker.runs, self._clock.now_s() + KILLED_GONE_S):
            self._view.event(
                f"{worker.name}: pid {pid} is still there {KILLED_GONE_S:g} s after SIGKILL (stuck driver?)"
            )

"""How one worker is asked to leave, how that is taken back, and what becomes of one that does not go.

The intent is committed before; here is what carries it out. Nothing here blocks anything else (lesson 13): steps of
one worker are in the order of its lock, which `Operations` shares, those of different workers run side by side.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core import drains
from dynamo_local.core.fleet_view import Course
from dynamo_local.core.lifecycle import DrainCancelled, DrainDeadlinePassed
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.errors import DynamoError, InfraUnavailable, RequestError
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.links import Links
from dynamo_local.serve.processes import kill_session, send_signal

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
SIGN_POLL_S = 0.005
NAMED_REQUESTS = 20


class Draining:
    """Drains of one namespace's workers."""

    def __init__(
        self,
        namespace: str,
        fleet: Fleet,
        links: Links,
        clock: Clock,
        locks: Mapping[str, asyncio.Lock],
        *,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self._namespace = namespace
        self._links = links
        self._clock = clock
        self._locks = locks
        self._background = background
        self._tell = tell

    async def ask_to_leave(self, worker: Worker, stimulus_id: str) -> None:
        """Out of routing, by the sign that fits its role; the drain is committed already. Bounded by a deadline."""
        if not await self._ask(worker):
            return
        self._background(self._watch_drain(worker, stimulus_id))

    def ask_again(self, worker: Worker) -> None:
        """A worker that leaves has registered: it came back from a drain that was ordered again meanwhile."""
        log.info("%s is asked to leave once more: it has registered again", worker.name)
        self._background(self._ask(worker))

    async def _ask(self, worker: Worker) -> bool:
        """False where that order is out of date: its process is gone, or it was called back."""
        async with self._locks[worker.name]:
            if worker.state is not WorkerState.DRAINING or worker.course is Course.RETURNING:
                return False
            if worker.asked_s is None:
                worker.asked_s = self._clock.now_s()
            sign = drains.how(worker.plan.role, registered=worker.lease is not None, etcd_ok=self._links.connected)
            revoked = sign is drains.LeaveBy.REVOKE_LEASE and await self._revoked(worker)
            if not revoked and worker.pid is not None:
                send_signal(worker.pid, signal.SIGTERM)
            worker.told = True
            return True

    async def _revoked(self, worker: Worker) -> bool:
        try:
            await self._links.revoke(worker.lease or "0")
        except InfraUnavailable as error:
            log.warning("%s: its lease cannot be revoked (%s); asking it by SIGTERM", worker.name, error)
            return False
        return True

    async def _watch_drain(self, worker: Worker, stimulus_id: str) -> None:
        """At its deadline the whole session is ended, and the requests that this cut are counted and named."""
        pid, asked_s = worker.pid, worker.asked_s

        def settled() -> bool:
            return worker.pid != pid or worker.asked_s != asked_s or worker.state is not WorkerState.DRAINING

        if pid is None or asked_s is None:
            return
        deadline_s = asked_s + drains.leave_deadline_s(worker.plan.drain_deadline_s, served=worker.served)
        while not await self.fleet.until(settled, deadline_s):
            later_s = asked_s + drains.leave_deadline_s(worker.plan.drain_deadline_s, served=worker.served)
            if later_s <= deadline_s:
                await self._cut(worker, pid, stimulus_id)
                return
            deadline_s = later_s  # it registered in the moment that it was asked: it may hold requests

    async def _cut(self, worker: Worker, pid: int, stimulus_id: str) -> None:
        cut, requests = await self._in_flight(worker)
        if worker.pid != pid or worker.state is not WorkerState.DRAINING:
            return  # it left, or its drain was taken back, while we asked
        waited_s = self._waited_s(worker)
        await self._end(
            worker, pid, f"was not gone {waited_s:.0f} s after it was asked to leave", cut, requests, stimulus_id
        )

    async def end_hung(self, worker: Worker, pid: int, reason: str) -> None:
        """One that answers nothing finishes nothing: its drain ends now, its GPU does not wait for the deadline."""
        cut = drains.cut(Missing("it did not answer") if worker.load is None else worker.load)
        await self._end(worker, pid, reason, cut, [], "health")

    def _waited_s(self, worker: Worker) -> float:
        return 0.0 if worker.asked_s is None else self._clock.now_s() - worker.asked_s

    async def _end(
        self, worker: Worker, pid: int, why: str, cut: int | Missing, requests: list[str], stimulus_id: str
    ) -> None:
        """End the session of a draining worker. `requests` are the ids of what that cuts, as far as they are known."""
        count = f"{cut} requests were cut" if isinstance(cut, int) else f"what that cut is unknown ({cut.reason})"
        worker.reason = f"{why}; {count}"
        event = DrainDeadlinePassed(stimulus_id=stimulus_id, deadline_s=self._waited_s(worker), requests_cut=cut)
        await self.fleet.apply({worker.name: event})
        more = f" and {cut - NAMED_REQUESTS} more" if isinstance(cut, int) and cut > NAMED_REQUESTS else ""
        named = f": {', '.join(requests[:NAMED_REQUESTS])}{more}" if requests else ""
        self._tell(f"{worker.name} {worker.reason}{named}")
        kill_session(pid)

    async def _in_flight(self, worker: Worker) -> tuple[int | Missing, list[str]]:
        """How many requests it holds, and the ids of some; of one that does not answer, as many as it last said."""
        try:
            answer = await self.control(worker.name, "status")
        except (RequestError, InfraUnavailable) as error:
            return drains.cut(Missing(str(error)) if worker.load is None else worker.load), []
        return int(answer["in_flight"]), [str(request) for request in answer["requests"]]

    async def call_back(self, worker: Worker, stimulus_id: str) -> None:
        """Take a drain back: the same process registers again. Raises what the worker answers if it is too late."""
        async with self._locks[worker.name]:
            try:
                if worker.told:
                    await self._until_it_knows(worker)
                await self.control(worker.name, "cancel_drain")
            except (RequestError, DynamoError) as error:
                log.warning("%s: its drain could not be taken back: %s", worker.name, error)
                raise
            if worker.state is WorkerState.DRAINING and worker.course is not Course.RETURNING:
                return  # ordered to leave again meanwhile: the later order is carried out next
            worker.asked_s = worker.reason = None
            worker.told = False
            worker.course = Course.STEADY
            if worker.state is WorkerState.DRAINING:  # its registration may have been seen before its answer
                await self.fleet.apply({worker.name: DrainCancelled(stimulus_id=stimulus_id)})

    async def resume(self, worker: Worker, stimulus_id: str) -> None:
        """Go on with the drain of an adopted worker: it may never have been told, nor heard that it was called back.

        Its deadline is watched either way: a call back may fail.
        """
        if worker.course is Course.RETURNING:
            self._background(self._watch_drain(worker, stimulus_id))
            await self.called_back(worker, stimulus_id)
        else:
            await self.ask_to_leave(worker, stimulus_id)

    async def called_back(self, worker: Worker, stimulus_id: str) -> None:
        """Nobody waits for this answer: a worker that finished first is started again when it is gone (its course)."""
        try:
            await self.call_back(worker, stimulus_id)
        except DynamoError as error:
            self._tell(f"the drain of {worker.name} came to its end before it was taken back ({error}); it starts anew")

    async def _until_it_knows(self, worker: Worker) -> None:
        """Return when the worker has begun the drain that it was told to begin. Raises what its answers are.

        The sign comes by etcd or as a signal, the call back over NATS. One that came first would find nothing to take
        back, and the worker would leave after all (seen: one in twenty, milliseconds after a drain).
        """
        deadline_s = self._clock.now_s() + CONTROL_TIMEOUT_S
        while (await self.control(worker.name, "status"))["state"] == "ready":
            if self._clock.now_s() >= deadline_s:
                await self.control(worker.name, "drain", reason=worker.reason or "it was told to")
                return
            await self._clock.sleep_until(self._clock.now_s() + SIGN_POLL_S)

    async def control(self, name: str, op: str, **args: Any) -> dict[str, Any]:
        """Ask a worker's control endpoint; raises `RequestError` kinds, `NatsUnavailable`."""
        from dynamo_local.runtime.control import ControlClient

        client = ControlClient(self._links.nats, self._namespace)
        answer: dict[str, Any] = await client.call(name, op, timeout_s=CONTROL_TIMEOUT_S, **args)
        return answer

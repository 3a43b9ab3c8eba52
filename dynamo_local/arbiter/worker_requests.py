"""Requests to a worker's control endpoint: take a drain back, name the requests that are left, sleep, wake, flip."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dynamo_local.arbiter.links import Links
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.effects import CallBack, CallOffFlip, CountRequests, FlipRole, Order
from dynamo_local.core.fleet.events import CalledBack, Event, FlipAnswered, OrderAnswered, RequestsCounted
from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.types import LEASE, Missing
from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    InfraUnavailable,
    NotSleepable,
    NoWorkers,
    RemoteError,
    RequestError,
)

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
SIGN_POLL_S = 0.005


class WorkerAsks:
    """The questions to the workers of one namespace. Each has a deadline; a refusal is an observation, too."""

    def __init__(self, links: Links, namespace: str, clock: Clock) -> None:
        self._links = links
        self._namespace = namespace
        self._clock = clock

    async def call_back(self, act: CallBack, worker: Worker | None) -> Event:
        """Have it take its drain back, once it knows that it was to drain."""
        error: str | None = None
        try:
            if act.signalled:
                await self._until_it_knows(act.name, worker)
            await self.control(act.name, "cancel_drain")
        except (RequestError, DynamoError) as refused:
            log.warning("%s: its drain could not be taken back: %s", act.name, refused)
            error = str(refused)
        cause = f"control:{act.name}"
        return CalledBack(stimulus_id=cause, name=act.name, pid=act.pid, error=error, requested_by=act.requested_by)

    async def _until_it_knows(self, name: str, worker: Worker | None) -> None:
        """Return when the worker has begun the drain that it was told to begin. Raises what its answers are.

        The sign comes by etcd or as a signal, the call back over NATS. One that came first would find nothing to take
        back, and the worker would leave after all (seen: one in twenty, milliseconds after a drain).
        """
        deadline_s = self._clock.now_s() + CONTROL_TIMEOUT_S
        while (await self.control(name, "status"))["state"] == "ready":
            if self._clock.now_s() >= deadline_s:
                why = None if worker is None else worker.reason
                await self.control(name, "drain", reason=why or "it was told to")
                return
            await self._clock.sleep_until(self._clock.now_s() + SIGN_POLL_S)

    async def order(self, act: Order) -> Event:
        """Give it an order to sleep or to wake. A worker that answers with an error will not carry it out."""
        cause = f"control:{act.name}"
        answered = partial(OrderAnswered, stimulus_id=cause, name=act.name, pid=act.pid, order=act.order)
        try:
            if act.level is None:
                await self.control(act.name, "wake", order=act.order)
            else:
                await self.control(act.name, "sleep", order=act.order, level=act.level)
        except (NotSleepable, RemoteError) as refused:
            return answered(refused=str(refused))
        except (RequestError, DynamoError) as error:
            log.warning("%s: nobody knows whether its order arrived: %s", act.name, error)
            return answered(error=str(error))
        return answered()

    async def count_requests(self, act: CountRequests) -> Event:
        """How many requests it holds, and the ids of some; missing where it does not answer."""
        requests: tuple[str, ...] = ()
        in_flight: int | Missing
        try:
            answer = await self.control(act.name, "status")
            in_flight, requests = int(answer["in_flight"]), tuple(str(request) for request in answer["requests"])
        except (RequestError, InfraUnavailable) as error:
            in_flight = Missing(str(error))
        cause = "drain-deadline"
        return RequestsCounted(stimulus_id=cause, name=act.name, pid=act.pid, in_flight=in_flight, requests=requests)

    async def control(self, name: str, op: str, *, timeout_s: float = CONTROL_TIMEOUT_S, **args: Any) -> dict[str, Any]:
        """Ask a worker's control endpoint; raises `RequestError` kinds, `NatsUnavailable`."""
        from dynamo_local.transport.control import ControlClient

        client = ControlClient(self._links.nats, self._namespace)
        answer: dict[str, Any] = await client.call(name, op, timeout_s=timeout_s, **args)
        return answer


# --- flip_asks
# Requests to a worker that is to change its role.

FLIP_TIMEOUT_S = 15.0
"""A flip takes some 100 ms; a canary that waits behind a long prefill takes as long as that."""
_NO_ANSWER = (NoWorkers, DeadlineExceeded, InfraUnavailable, RemoteError)


class FlipAsks:
    """The questions of a flip, to the workers of one namespace. A refusal is an observation, too.

    `section` gives a component's options as they are now: the worker knows those of when it was started.
    """

    def __init__(self, asks: WorkerAsks, section: Callable[[str], Mapping[str, Any]]) -> None:
        self._asks = asks
        self._section = section

    async def ask(self, act: FlipRole) -> FlipAnswered:
        """Have it flip, or tell how far it is. One that has flipped answers under its new name."""
        cause = f"control:{act.name}"
        why = ""
        section = dict(self._section(act.component))
        about = {"to": act.to, "component": act.component, "pid": act.pid, "section": section}
        for name in (act.name, act.to):
            try:
                answer = await self._asks.control(name, "flip", timeout_s=FLIP_TIMEOUT_S, **about)
            except _NO_ANSWER as error:
                why = why or str(error)
                continue
            except DynamoError as error:
                log.warning("%s does not become %s: %s", act.name, act.to, error)
                return FlipAnswered(stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, error=str(error))
            lease, named = str(answer.get("lease")), answer.get("endpoints")
            endpoints = tuple(str(each) for each in named) if isinstance(named, list) else ()
            if answer.get("pid") != act.pid or not re.fullmatch(LEASE, lease):
                why = why or f"{name} answered for another process"
                continue
            return FlipAnswered(
                stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, lease=lease, endpoints=endpoints
            )
        log.warning("nobody can tell yet whether %s is %s now: %s", act.name, act.to, why)
        return FlipAnswered(stimulus_id=cause, name=act.name, pid=act.pid, to=act.to, error=why, unknown=True)

    async def call_off(self, act: CallOffFlip) -> None:
        """Have it stay what it is. The answer to `ask` says whether it did."""
        try:
            await self._asks.control(act.name, "cancel_flip")
        except DynamoError as error:
            log.info("%s: its flip could not be taken back: %s", act.name, error)

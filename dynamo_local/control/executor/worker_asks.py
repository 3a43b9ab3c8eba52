"""What the arbiter asks of a worker itself, over its control endpoint: to take a drain back, what it still holds."""

from __future__ import annotations

import logging
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.control.links import Links
from dynamo_local.core.life.fleet import Worker
from dynamo_local.core.life.instructions import CallBack, CountRequests
from dynamo_local.core.life.stimuli import CalledBack, RequestsCounted, Stimulus
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError, InfraUnavailable, RequestError

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
SIGN_POLL_S = 0.005


class WorkerAsks:
    """The questions to the workers of one namespace. Each has a deadline; a refusal is an observation, too."""

    def __init__(self, links: Links, namespace: str, clock: Clock) -> None:
        self._links = links
        self._namespace = namespace
        self._clock = clock

    async def call_back(self, act: CallBack, worker: Worker | None) -> Stimulus:
        """Have it take its drain back, once it knows that it was to drain."""
        error: str | None = None
        try:
            if act.told:
                await self._until_it_knows(act.name, worker)
            await self.control(act.name, "cancel_drain")
        except (RequestError, DynamoError) as refused:
            log.warning("%s: its drain could not be taken back: %s", act.name, refused)
            error = str(refused)
        cause = f"control:{act.name}"
        return CalledBack(stimulus_id=cause, name=act.name, pid=act.pid, error=error, asked_by=act.asked_by)

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

    async def count_requests(self, act: CountRequests) -> Stimulus:
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
        from dynamo_local.runtime.control import ControlClient

        client = ControlClient(self._links.nats, self._namespace)
        answer: dict[str, Any] = await client.call(name, op, timeout_s=timeout_s, **args)
        return answer

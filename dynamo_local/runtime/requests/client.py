"""A live view of one endpoint's instances, and calls to them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection
from typing import Any, Final, Protocol

from dynamo_local import errors
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.runtime.requests.frames import encode_value
from dynamo_local.runtime.requests.request_sender import GONE, SILENT, RequestSender
from dynamo_local.runtime.requests.stream import ResponseStream

AVOID_S: Final = {GONE: 1.0, SILENT: 10.0}
"""How long an instance that did not take a request is passed over while there are others. Its lease lives on for up to
its TTL (10 s). Trying one without a listener again costs a quarter of a millisecond, a silent one the whole accept
timeout; and after a restart of NATS an instance is without a listener for a moment only."""

LATE_NEWS_S: Final = 5.0
"""How long a request that every known instance has refused as leaving waits for others to appear. A component's last
ready worker is not drained, so there are others: our list is late (a starved host, etcd away for a moment)."""


def late_news_s(deadline_s: float | None, now_s: float) -> float:
    """`LATE_NEWS_S`, or what is left until the deadline."""
    return LATE_NEWS_S if deadline_s is None else max(0.0, min(LATE_NEWS_S, deadline_s - now_s))


class View(Protocol):
    """What is needed of `runtime.discovery.InstanceView`. `stale`: etcd does not answer, so this may be out of date."""

    stale: bool

    def instances(self) -> tuple[Instance, ...]: ...

    async def changed(self) -> None:
        """Return when `instances()` may differ from what it was at the call."""
        ...

    async def close(self) -> None: ...


class NatsEndpointClient:
    """`ports.EndpointClient` over NATS. Made by `RequestPlane.client`, which closes it."""

    def __init__(self, sender: RequestSender, view: View, component: str, endpoint: str) -> None:
        self.component = component
        self.endpoint = endpoint
        self._sender = sender
        self._view = view
        self._turn = 0
        self._avoid_until_s: dict[int, float] = {}
        self._leaving: set[int] = set()

    def instances(self) -> tuple[Instance, ...]:
        """Registered now, in order of lease id; without those that have refused a request as leaving, if any are left.

        A draining worker knows it before etcd tells us (seen: 0.6 s later on a starved host, in which it refused three
        requests). A drain that is taken back registers under a new lease.
        """
        instances = self._view.instances()
        if not self._leaving:
            return instances
        self._leaving.intersection_update(instance.instance_id for instance in instances)
        return tuple(i for i in instances if i.instance_id not in self._leaving) or instances

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        """At least one; raises `NoWorkers` past the timeout."""
        if found := await self.wait_for_others((), timeout_s):
            return found
        hint = "; etcd does not answer" if self._view.stale else ""
        raise errors.NoWorkers(f"no {self.component} serves {self.endpoint!r} (waited {timeout_s:g} s{hint})")

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        """Instances with other ids than these, as soon as there is one; none past the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (others := tuple(i for i in self.instances() if i.instance_id not in than)):
                    await self._view.changed()
                return others
        return ()

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ResponseStream:
        """Send to that instance, or to the next one in turn. Returns once a worker has accepted it.

        Without `instance_id`, an instance that is gone, full or leaving is passed over for the next, each at
        most once; a request that was accepted is never sent again. If all known instances are leaving, it waits
        for others to appear. `timeout_s` bounds the whole answer.

        Raises `InvalidRequest` (the payload cannot travel), `NoWorkers`, `WorkerDraining`, `WorkerBusy`, `WorkerLost`,
        `DeadlineExceeded`, `NatsUnavailable`: after any of these the handler has produced nothing.
        """
        try:
            encoded = encode_value(payload)
        except (TypeError, ValueError) as error:
            raise errors.InvalidRequest(f"the request cannot be sent to {self.component}: {error}") from error
        clock = self._sender.clock
        deadline_s = None if timeout_s is None else clock.now_s() + timeout_s
        request_id = request_id or uuid.uuid4().hex
        if instance_id is not None:
            return await self._send(self._instance(instance_id), request_id, encoded, deadline_s)
        tried: set[int] = set()
        busy: errors.WorkerBusy | None = None
        last: errors.DynamoError | None = None
        while (instance := self._next(tried)) is not None:
            tried.add(instance.instance_id)
            try:
                return await self._send(instance, request_id, encoded, deadline_s)
            except errors.WorkerBusy as error:
                busy = error
            except errors.WorkerDraining as error:
                last = error
                await self.wait_for_others(tried, late_news_s(deadline_s, clock.now_s()))
            except errors.WorkerLost as error:
                last = error
        raise busy or last or errors.NoWorkers(f"no instance of {self.component}/{self.endpoint} is registered")

    async def close(self) -> None:
        """End the watch. Open streams go on."""
        await self._view.close()

    async def _send(
        self, instance: Instance, request_id: str, encoded: bytes, deadline_s: float | None
    ) -> ResponseStream:
        clock = self._sender.clock
        if deadline_s is not None and clock.now_s() >= deadline_s:
            raise errors.DeadlineExceeded(f"the deadline passed before request {request_id} was sent")
        try:
            inbound = await self._sender.send(instance, request_id, encoded, deadline_s)
        except errors.WorkerDraining:
            self._leaving.add(instance.instance_id)
            raise
        except errors.WorkerLost as error:
            self._avoid_until_s[instance.instance_id] = clock.now_s() + AVOID_S.get(
                error.details.get("reason", ""), 0.0
            )
            raise
        if deadline_s is not None:
            inbound.expire_at(asyncio.get_running_loop().time() + deadline_s - clock.now_s())
        return ResponseStream(instance.instance_id, inbound)

    def _instance(self, instance_id: int) -> Instance:
        for instance in self._view.instances():
            if instance.instance_id == instance_id:
                return instance
        raise errors.WorkerLost(
            f"{self.component}/{self.endpoint}:{lease_hex(instance_id)} is not registered (any more)"
        )

    def _next(self, tried: set[int]) -> Instance | None:
        """The next in turn that was not tried, preferably one that answered lately; None when all were tried."""
        left = [instance for instance in self.instances() if instance.instance_id not in tried]
        if self._avoid_until_s:
            now_s = self._sender.clock.now_s()
            self._avoid_until_s = {i: until_s for i, until_s in self._avoid_until_s.items() if until_s > now_s}
            left = [i for i in left if i.instance_id not in self._avoid_until_s] or left
        if not left:
            return None
        self._turn += 1
        return left[(self._turn - 1) % len(left)]

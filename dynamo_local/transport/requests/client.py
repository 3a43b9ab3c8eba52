"""The caller's side of a process: the clients of endpoints, which share one response port and one inbox."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping
from functools import partial
from typing import Any, Final, Protocol

from dynamo_local import errors
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.ports import ResponseStream as AnyResponseStream
from dynamo_local.system.request_log import unbound
from dynamo_local.transport.discovery import InstanceView
from dynamo_local.transport.nats_client import Client
from dynamo_local.transport.requests.calls import ACCEPT_TIMEOUT_S, GONE, SILENT, RequestSender
from dynamo_local.transport.requests.frames import encode_value
from dynamo_local.transport.requests.handlers import current_request
from dynamo_local.transport.requests.stream import ResponseStream

AVOID_S: Final = {GONE: 1.0, SILENT: 10.0}
"""How long an instance that did not take a request is passed over while there are others. Its lease lives on for up
to its TTL (10 s). Another try costs a quarter of a millisecond without a listener, and the whole accept timeout with
a silent one. After a restart of NATS an instance is without a listener for a moment only."""

LATE_NEWS_S: Final = 5.0
"""How long a request that every known instance has refused as leaving waits for others to appear. A component's last
ready worker is not drained, so there are others: our list is late (a starved host, etcd away for a moment)."""


def late_news_s(deadline_s: float | None, now_s: float) -> float:
    """`LATE_NEWS_S`, or what is left until the deadline."""
    return LATE_NEWS_S if deadline_s is None else max(0.0, min(LATE_NEWS_S, deadline_s - now_s))


class View(Protocol):
    """The part of `transport.discovery.InstanceView` that is needed. `stale`: etcd does not answer, so this may be
    out of date."""

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

        Without `instance_id`, the next instance is tried if one is gone, full or leaving, each at most once. An
        accepted request is never sent again. If all known instances are leaving, this waits for others. `timeout_s`
        bounds the whole answer.

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
            f"{self.component}/{self.endpoint}:{lease_hex(instance_id)} is not registered (any more)", reason=GONE
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


# A `depends(Other)` attribute at run time: a client of that component, by method name.

DEFAULT_METHOD = "generate"


class Plane(Protocol):
    """The part of `RequestPlane` that is needed here."""

    async def client(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> EndpointClient:
        """A client of that endpoint, which follows its instances until the plane is closed."""
        ...


class LazyEndpointClient:
    """An `EndpointClient` that begins to watch etcd at its first use; `instances()` is empty before."""

    def __init__(self, plane: Plane, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> None:
        self._make = partial(plane.client, kv, namespace, component, endpoint)
        self._client: EndpointClient | None = None

    async def resolve(self) -> EndpointClient:
        """The client itself, started."""
        if self._client is None:
            self._client = await self._make()
        return self._client

    def instances(self) -> tuple[Instance, ...]:
        return () if self._client is None else self._client.instances()

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return await (await self.resolve()).wait_for_instances(timeout_s)

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        return await (await self.resolve()).wait_for_others(than, timeout_s)

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AnyResponseStream:
        """As `EndpointClient.call`."""
        client = await self.resolve()
        return await client.call(payload, instance_id=instance_id, request_id=request_id, timeout_s=timeout_s)


Choose = Callable[[tuple[Instance, ...]], int | None]


class PendingCall:
    """A call that is sent when it is awaited (one value) or iterated (a stream); each use sends it anew."""

    def __init__(self, client: LazyEndpointClient, payload: Any, choose: Choose, options: Mapping[str, Any]) -> None:
        self._client = client
        self._payload = payload
        self._choose = choose
        self._options = options

    def __await__(self) -> Generator[Any, None, Any]:
        return self._single().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        stream = await self.stream()
        try:
            async for item in stream:
                yield item
        finally:
            await stream.aclose()

    async def stream(self) -> AnyResponseStream:
        """Send it. The caller must close the stream.

        Within a handler the request id is passed on, and the time that is left of the handler's deadline.
        """
        client = await self._client.resolve()
        options = dict(self._options)
        instance_id = options.pop("instance_id", None)
        if instance_id is None:
            instance_id = self._choose(client.instances())
        if (context := current_request()) is not None:
            options.setdefault("request_id", context.request_id)
            remaining_s = context.remaining_s()
            if remaining_s is not None:
                given_s = options.get("timeout_s")
                options["timeout_s"] = remaining_s if given_s is None else min(given_s, remaining_s)
        return await client.call(self._payload, instance_id=instance_id, **options)

    async def _single(self) -> Any:
        stream = await self.stream()
        try:
            items = [item async for item in stream]
        finally:
            await stream.aclose()
        if len(items) != 1:
            raise errors.RequestError(
                f"a single value was expected, the handler gave {len(items)}: iterate over the call"
            )
        return items[0]


class DependencyClient:
    """A component's endpoints by method name, and Dynamo's calls to its default endpoint `generate`.

    async for token in self.worker.generate(request): …
    score = await self.scorer.score(request)
    async for token in self.worker.direct(request, instance_id): …
    """

    def __init__(
        self, plane: Plane, kv: KeyValueStore, namespace: str, component: str, endpoints: Mapping[str, str]
    ) -> None:
        self.component = component
        self._endpoints = dict(endpoints)
        self._make = partial(LazyEndpointClient, plane, kv, namespace, component)
        self._clients: dict[str, LazyEndpointClient] = {}

    def endpoint(self, name: str) -> LazyEndpointClient:
        """The client of the endpoint of that name, such as `chat/completions`; the same object every time."""
        if name not in self._clients:
            self._clients[name] = self._make(name)
        return self._clients[name]

    async def wait_ready(self, timeout_s: float) -> None:
        """Every endpoint has an instance. `NoWorkers` past the timeout."""
        names = list(self._endpoints.values()) or [DEFAULT_METHOD]
        for name in names:
            await self.endpoint(name).wait_for_instances(timeout_s)

    def round_robin(self, payload: Any, **options: Any) -> PendingCall:
        """The next instance in turn, as `generate`."""
        return self._call(DEFAULT_METHOD, payload, _in_turn, options)

    def random(self, payload: Any, **options: Any) -> PendingCall:
        """Any instance."""
        return self._call(DEFAULT_METHOD, payload, _at_random, options)

    def direct(self, payload: Any, instance_id: int, **options: Any) -> PendingCall:
        """That instance, or an error."""
        return self._call(DEFAULT_METHOD, payload, _in_turn, {**options, "instance_id": instance_id})

    def __getattr__(self, name: str) -> Callable[..., PendingCall]:
        if name.startswith("_") or name not in self._endpoints:
            known = ", ".join(sorted(self.__dict__.get("_endpoints", ()))) or "none"
            raise AttributeError(
                f"{self.__dict__.get('component')} has no endpoint method {name!r}. Its methods: {known}"
            )

        def method(payload: Any = None, **options: Any) -> PendingCall:
            return self._call(name, payload, _in_turn, options)

        return method

    def _call(self, method: str, payload: Any, choose: Choose, options: Mapping[str, Any]) -> PendingCall:
        client = self.endpoint(self._endpoints.get(method, method))
        return PendingCall(client, payload, choose, options)


def _in_turn(instances: tuple[Instance, ...]) -> int | None:
    return None


def _at_random(instances: tuple[Instance, ...]) -> int | None:
    return random.choice(instances).instance_id if instances else None


VIEW_START_TIMEOUT_S: Final = 10.0


class RequestPlane:
    """Makes endpoint clients that share a response port. One per process and NATS connection.

    plane = RequestPlane(nats)
    await plane.start()
    client = await plane.client(kv, "dynamo", "VllmWorker", "generate")
    stream = await client.call({"prompt": …})
    """

    def __init__(self, nats: Client, clock: Clock | None = None, *, accept_timeout_s: float = ACCEPT_TIMEOUT_S) -> None:
        self.sender = RequestSender(nats, clock or AsyncioClock(), accept_timeout_s)
        self._clients: dict[tuple[str, str, str], NatsEndpointClient] = {}
        self._making = asyncio.Lock()

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        await self.sender.start()

    async def client(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> NatsEndpointClient:
        """The client of that endpoint, made at the first call. The client follows etcd from then on.

        Where etcd does not give the first list in time the client is empty until it does: calls raise `NoWorkers`.
        """
        key = (namespace, component, endpoint)
        async with self._making:
            if key not in self._clients:
                view = InstanceView(kv, namespace, component, endpoint)
                try:
                    with unbound():  # the watch outlives the request that starts it
                        await view.start(VIEW_START_TIMEOUT_S)
                except BaseException:  # cancelled: leave no watch behind
                    await view.close()
                    raise
                self._clients[key] = NatsEndpointClient(self.sender, view, component, endpoint)
            return self._clients[key]

    async def close(self) -> None:
        """Close clients, the port and the inbox; open streams end with `RequestCancelled`."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        await self.sender.close()

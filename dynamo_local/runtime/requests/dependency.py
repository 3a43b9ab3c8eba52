"""What a `depends(Other)` attribute is at run time: a client of that component, by method name."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping
from functools import partial
from typing import Any, Protocol

from dynamo_local import errors
from dynamo_local.core.types import Instance
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.ports import ResponseStream as AnyResponseStream
from dynamo_local.runtime.requests.context import current_request

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
            raise AttributeError(f"{self.__dict__.get('component')} has no endpoint method {name!r}; it has: {known}")

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

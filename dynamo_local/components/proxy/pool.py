"""The servers that can serve a model: HTTP servers of one role, from all components (sections)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components.dispatcher import Dispatcher, make_picker, samples
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.proxy import messages as payloads
from dynamo_local.core.routing.choice import RouterPolicy, Sample
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.errors import NoWorkers, WorkerLost
from dynamo_local.ports import EndpointClient, ResponseStream
from dynamo_local.sdk.context import WorkerContext
from dynamo_local.system.request_log import unbound
from dynamo_local.transport.load import LoadView

ENDPOINT = "generate"


class MultiComponentClient:
    """Several components' endpoint as one `EndpointClient`: a model may have servers of more than one section."""

    def __init__(self, clients: Sequence[EndpointClient]) -> None:
        self._clients = clients
        self._turn = 0

    def instances(self) -> tuple[Instance, ...]:
        return tuple(instance for client in self._clients for instance in client.instances())

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        """At least one; raises `NoWorkers` past the timeout."""
        if found := await self.wait_for_others((), timeout_s):
            return found
        raise NoWorkers(f"no worker of these components is registered within {timeout_s:g} s")

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        """Returns as soon as one of the components has one."""
        waits = [asyncio.ensure_future(client.wait_for_others(than, timeout_s)) for client in self._clients]
        try:
            for done in asyncio.as_completed(waits):
                if others := await done:
                    return others
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return ()

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ResponseStream:
        """As `EndpointClient.call`; without an instance, of the next component in turn that has any."""
        holders = [client for client in self._clients if _has(client, instance_id)]
        if not holders:
            if instance_id is None:
                raise NoWorkers("no worker is registered that could take the request")
            raise WorkerLost(f"instance {lease_hex(instance_id)} is not registered (any more)")
        self._turn += 1
        chosen = holders[self._turn % len(holders)]
        return await chosen.call(payload, instance_id=instance_id, request_id=request_id, timeout_s=timeout_s)


def _has(client: EndpointClient, instance_id: int | None) -> bool:
    return any(instance_id is None or instance.instance_id == instance_id for instance in client.instances())


class ModelDispatchers:
    """A dispatcher for each set of components that serves a model; `make` makes one."""

    def __init__(self, models: ModelsView, make: Callable[[tuple[str, ...]], Awaitable[Dispatcher]]) -> None:
        self.models = models
        self._make = make
        self._dispatchers: dict[tuple[str, ...], Dispatcher] = {}
        self._making = asyncio.Lock()

    async def dispatcher(self, model: str) -> Dispatcher | None:
        """The dispatcher for the model's current servers; None if it has none."""
        served = self.models.get(model)
        if served is None:
            return None
        async with self._making:
            if served.components not in self._dispatchers:
                with unbound():  # it starts to follow loads, which outlives this request
                    self._dispatchers[served.components] = await self._make(served.components)
        return self._dispatchers[served.components]


class DispatcherFactory:
    """Dispatchers over the data plane of this worker. `close` ends the views of loads."""

    def __init__(
        self, context: WorkerContext, policy: RouterPolicy, max_tries: int, clock: Clock | None = None
    ) -> None:
        self._context = context
        self._policy = policy
        self._max_tries = max_tries
        self._clock = clock or AsyncioClock()
        self._views: dict[str, LoadView] = {}
        self._stack = contextlib.AsyncExitStack()

    async def make(self, components: tuple[str, ...]) -> Dispatcher:
        """One for the workers of these components together. Raises `NatsUnavailable`."""
        clients = [await self._context.endpoint_client(component, ENDPOINT) for component in components]
        for component in components:
            await self._follow(component)

        def loads(ids: Sequence[int]) -> Mapping[int, Sample]:
            found: dict[int, Sample] = {}
            for client, component in zip(clients, components, strict=True):
                mine = {instance.instance_id for instance in client.instances()}.intersection(ids)
                found |= samples(self._views[component], self._clock, tuple(mine))
            return found

        return Dispatcher(
            clients[0] if len(clients) == 1 else MultiComponentClient(clients),
            make_picker(self._policy),
            loads,
            max_tries=self._max_tries,
            clock=self._clock,
            produced=payloads.produced,
        )

    async def _follow(self, component: str) -> None:
        if component in self._views:
            return
        view = LoadView(self._context.nats, self._context.namespace, component, self._clock)
        if self._policy not in ("round-robin", "random"):
            await view.start()
        self._stack.push_async_callback(view.close)
        self._views[component] = view

    async def close(self) -> None:
        """Stop listening to loads."""
        await self._stack.aclose()

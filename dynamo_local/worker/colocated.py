"""Components that run in another one's process (`ServiceArgs.colocate`): they live and die with the worker's role.

They have no lease and no load of their own: their keys stand under their host's lease. Calls from the same process
stay in it (`transport.requests.local`); other programs can call them over NATS. They start before their host and stop
after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from dynamo_local.core.types import Instance
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.context import COLOCATED
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import load_settings
from dynamo_local.transport.control import Op
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.transport.requests.client import DependencyClient
from dynamo_local.transport.requests.local import ColocatedPlane, LocalEndpoint
from dynamo_local.worker.context import Callback, Connections, Context, Identity, dependency_clients, required
from dynamo_local.worker.registration import Endpoints, adapted


def in_order(graph: LoadedGraph, names: Sequence[str]) -> tuple[DynamoService[Any], ...]:
    """The services in the order in which they start: each after those that it calls. Raises `ConfigError`."""
    found: dict[str, DynamoService[Any]] = {}

    def add(name: str) -> None:
        if name in found or name in under_way:
            return
        under_way.add(name)
        if name not in graph.services:
            raise ConfigError(f"{graph.target} has no service {name!r}; its services: {', '.join(graph.services)}")
        for other in graph.bindings(name).values():
            if other is not None and other.name in names:
                add(other.name)
        found[name] = graph.services[name]

    under_way: set[str] = set()
    for name in names:
        add(name)
    return tuple(found.values())


Service = DynamoService[Any]


class Host(Protocol):
    """The process, as a colocated component needs it. `served_role.RoleHost` implements this."""

    @property
    def graph(self) -> LoadedGraph:
        """The graph."""
        ...

    @property
    def kept(self) -> contextlib.AsyncExitStack:
        """Closes what stays when the role changes."""
        ...

    @property
    def on_fatal(self) -> Callable[[str, BaseException], None]:
        """Called with what failed, and how, when the worker has become useless."""
        ...

    @property
    def on_wait(self) -> Callable[[str], None]:
        """Called with what the start waits for."""
        ...

    @property
    def on_change(self) -> Callable[[], None]:
        """Called when the statefile's entry is out of date."""
        ...


@dataclass(frozen=True, slots=True)
class ColocatedComponent:
    """`component` is the instance of the user's class."""

    service: Service
    context: Context
    component: Any


class ColocatedComponents:
    """The colocated components of one role.

    Raises `ConfigError` for a component that the graph does not have, and for unknown options.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        draining: asyncio.Event,
        stack: contextlib.AsyncExitStack,
        operations: dict[str, Op],
    ) -> None:
        self._host = host
        self._identity = identity
        self._draining = draining
        self._stack = stack
        self._operations = operations
        self._services = in_order(host.graph, identity.colocated)
        self._settings = {service.name: load_settings(service) for service in self._services}
        self._made: list[ColocatedComponent] = []

    def around(self, connections: Connections, lease: LeaseKeeper) -> Connections:
        """The connections; calls to colocated components stay in the process."""
        if not self._services:
            return connections
        namespace = self._identity.namespace
        plane = ColocatedPlane(
            connections.plane, lambda component, name: Instance(namespace, component, name, lease.lease_id, subject="")
        )
        return replace(connections, plane=plane)

    async def begin(self, connections: Connections, lease: LeaseKeeper) -> list[DependencyClient]:
        """Make each component and run its start hooks. Returns the clients of dependencies that must be ready first."""
        waited: list[DependencyClient] = []
        for service in self._services:
            context = Context(
                replace(self._identity, component=service.name, colocated=()),
                connections,
                lease,
                self._settings[service.name],
                draining=self._draining,
                stack=self._stack,
                kept=self._host.kept,
                inherited={},
                on_fatal=self._host.on_fatal,
                on_facts=self._host.on_change,
                on_wait=self._host.on_wait,
                operations=self._operations,
            )
            clients = dependency_clients(self._host.graph, service, self._identity, connections)
            self._host.on_wait(f"{service.name}'s start hooks")
            self._made.append(await _within(context, partial(_started, service, context, clients)))
            assert isinstance(connections.plane, ColocatedPlane)
            connections.plane.add(service.name, _endpoints(self._made[-1]))
            waited += required(service, clients)
        return waited

    def serving(self, endpoints: Endpoints) -> list[Coroutine[Any, Any, None]]:
        """To be awaited before registering: their endpoints are served on NATS too, for callers in other processes."""
        return [endpoints.serve_colocated(made.context, made.service, made.component) for made in self._made]

    async def register_waiting_keys(self) -> None:
        for made in self._made:
            await made.context.register_waiting_keys()

    def drain_callbacks(self) -> list[Callback]:
        """Unfinished work of the colocated components."""
        return [callback for made in self._made for callback in made.context.drain_callbacks()]

    async def ready(self) -> None:
        """The worker is registered as ready."""
        for made in self._made:
            await made.context.ready()

    async def resume(self) -> None:
        """The drain was taken back."""
        for made in self._made:
            await made.context.resume()

    async def run_hooks(self, bounded: Callable[[str, Awaitable[None]], Awaitable[None]]) -> None:
        """Their shutdown hooks, the last that started first, each through `bounded`."""
        for made in reversed(self._made):
            for hook in made.service.on_shutdown:
                work = _within(made.context, partial(_call_hook, made.component, hook))
                await bounded(f"{made.service.name}'s shutdown hook {hook}", work)


def _endpoints(made: ColocatedComponent) -> dict[str, LocalEndpoint]:
    bindings = ((COLOCATED, made.context),)
    endpoints = {}
    for name, declared in made.service.endpoints.items():
        model = made.service.request_model(name)
        endpoints[name] = LocalEndpoint(name, adapted(getattr(made.component, declared.method), model), model, bindings)
    return endpoints


async def _started(
    service: Service, context: Context, clients: Mapping[str, DependencyClient | None]
) -> ColocatedComponent:
    component = service.create(clients)
    for hook in service.on_start:
        await _call_hook(component, hook)
    return ColocatedComponent(service, context, component)


async def _within(context: Context, work: Callable[[], Any]) -> Any:
    """Run it in a task whose code, and whose own tasks, ask that context."""
    scope = copy_context()
    scope.run(COLOCATED.set, context)
    return await asyncio.create_task(work(), context=scope)


async def _call_hook(component: Any, hook: str) -> None:
    result = getattr(component, hook)()
    if asyncio.iscoroutine(result):
        await result

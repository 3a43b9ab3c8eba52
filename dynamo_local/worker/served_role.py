"""One role of a worker process: its component, its lease, and everything that is registered under that.

A process has one role for most of its life. While it changes it (`flipping`) it has two, and the old one serves what it
had taken until that is finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.core.types import Load, lease_hex
from dynamo_local.errors import DynamoError
from dynamo_local.sdk import dynamo_context
from dynamo_local.sdk.context import Work, set_current_context
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import load_settings, validate_section
from dynamo_local.system.executors import together
from dynamo_local.system.unread import LOOK_EVERY_S
from dynamo_local.transport.control import ControlServer, Op
from dynamo_local.transport.load import LoadPublisher
from dynamo_local.transport.requests.client import DependencyClient
from dynamo_local.worker.colocated import ColocatedComponents
from dynamo_local.worker.context import (
    Callback,
    Connections,
    Context,
    Identity,
    dependency_clients,
    dynamo_context_of,
    required,
)
from dynamo_local.worker.registration import Endpoints, Registration, Touch

log = logging.getLogger("dynamo_local.worker")

UNREAD_SHOWN_S = 2.0
"""An answer that waits for its reader for a shorter time is no news: back-pressure is usual."""
REPORTED_WITHIN_S = 3.0
"""The arbiter asks for loads once a second."""

Operations = Mapping[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class RoleHost:
    """The process, as a role needs it. `kept`: closes what outlives a change of role. `facts`: go into the ready key.

    `on_change()`: the statefile's entry is out of date. `on_revoked(role)`: somebody revoked its lease. `serves(role)`:
    it is the current role and takes requests.
    """

    graph: LoadedGraph
    operations: Operations
    kept: contextlib.AsyncExitStack
    facts: Callable[[ServedRole], Mapping[str, Any]]
    on_fatal: Callable[[str, BaseException], None]
    on_wait: Callable[[str], None]
    on_change: Touch
    on_revoked: Callable[[ServedRole], None]
    serves: Callable[[ServedRole], bool]
    is_draining: Callable[[], Awaitable[bool]]


class ServedRole:
    """`inherited` is what the component of the role before has handed over; `section` are its options, None for those
    that the process was started with. Raises `ConfigError` for options that are none."""

    def __init__(
        self,
        host: RoleHost,
        service: DynamoService[Any],
        identity: Identity,
        inherited: Mapping[str, Any],
        section: Mapping[str, Any] | None = None,
    ) -> None:
        self.host = host
        self.service = service
        self.identity = identity
        if section is None or service.config_model is None:
            self.settings = load_settings(service)
        else:
            self.settings = validate_section(service.config_model, service.name, section)
        self.draining = asyncio.Event()
        self.endpoints = Endpoints(identity)
        self.registration = Registration(
            identity,
            self.endpoints,
            facts=lambda: host.facts(self),
            on_change=host.on_change,
            on_revoked=lambda: host.on_revoked(self),
            serves=lambda: host.serves(self),
        )
        self.context: Context | None = None
        self.component: Any = None
        self._inherited = inherited
        self._operations: dict[str, Op] = {**host.operations}
        self._stack = contextlib.AsyncExitStack()
        self._colocated = ColocatedComponents(host, identity, self.draining, self._stack, self._operations)
        self._control: ControlServer | None = None
        self._publisher: LoadPublisher | None = None
        self._unread_at_s = -math.inf
        self._unread_found: dict[str, Any] = {}

    # --- coming ----------------------------------------------------------------------------------

    async def answer(self, nats: Any) -> None:
        """Answer what the arbiter and people ask, under this role's name."""
        control = ControlServer(nats, self.identity.namespace, self.identity.watcher_name, self._operations)
        self._stack.push_async_callback(control.close)
        await control.start()
        self._control = control

    async def take_lease(self, connections: Connections) -> None:
        """Raises `EtcdUnavailable`, `LeaseNotFound` (somebody has revoked it already)."""
        self._stack.push_async_callback(self.registration.close)
        await self.registration.take_lease(connections.kv, self.host.is_draining)

    async def begin(self, connections: Connections) -> list[DependencyClient]:
        """Make the components, colocated ones first, and run their start hooks.

        Returns the clients of dependencies that must be ready first.
        """
        lease = self.registration.lease
        assert lease is not None
        connections = self._colocated.around(connections, lease)
        waited = await self._colocated.begin(connections, lease)
        self.context = Context(
            self.identity,
            connections,
            lease,
            self.settings,
            draining=self.draining,
            stack=self._stack,
            kept=self.host.kept,
            inherited=self._inherited,
            on_fatal=self.host.on_fatal,
            on_facts=self.host.on_change,
            on_wait=self.host.on_wait,
            operations=self._operations,
        )
        self.be_current()
        clients = dependency_clients(self.host.graph, self.service, self.identity, connections)
        self.component = self.service.create(clients)
        self.host.on_wait(f"{self.service.name}'s start hooks")
        for hook in self.service.on_start:
            await getattr(self.component, hook)()
        return [*waited, *required(self.service, clients)]

    def be_current(self) -> None:
        """The role's context becomes the current one of the process. No effect before `begin`."""
        lease = self.registration.lease
        if self.context is not None and lease is not None:
            set_current_context(self.context)
            dynamo_context.update(dynamo_context_of(self.context, self.service, lease))

    async def serve(self) -> None:
        """Take requests on NATS before registering: whoever sees the key may send at once."""
        context = self._made
        publisher = LoadPublisher(
            context.nats,
            context.namespace,
            context.component,
            context.watcher_name,
            lambda: context.lease_id,
            self.load,
            context.load_changed,
            dispatch=lambda: None if context.dispatch_source is None else context.dispatch_source(),
            served=lambda: None if context.served_source is None else context.served_source(),
        )
        self._stack.push_async_callback(publisher.close)
        await together(
            self.endpoints.serve(context, self.service, self.component, self.load),
            *self._colocated.serving(self.endpoints),
            publisher.start(),
            context.answer_planners(),
        )
        self._publisher = publisher

    async def register(self) -> None:
        """Put all keys but the one that says that it is ready. Raises `EtcdUnavailable`, `LeaseNotFound`."""
        await self.registration.register_endpoints()
        await self._colocated.register_waiting_keys()
        await self._made.register_waiting_keys()

    async def register_ready(self, flush: Callable[[], Awaitable[object]]) -> None:
        """Put the last key, after `flush`. Raises as `register`."""
        await self.registration.register_ready(flush)
        await self._colocated.ready()
        await self._made.ready()
        endpoints = ", ".join(self.service.endpoints) or "none"
        log.info("ready: lease %s, endpoints %s", lease_hex(self._made.lease_id), endpoints)

    async def go_on(self) -> None:
        """Let the component go on, if it had been told to stop: not where a drain was taken back early."""
        if self.draining.is_set():
            self.draining.clear()
            await self._colocated.resume()
            await self._made.resume()

    def until_finished(self) -> list[Callback]:
        """The work to await before leaving: that of its components, and the requests of its endpoints."""
        return [*self._made.drain_callbacks(), *self._colocated.drain_callbacks(), *self.endpoints.until_idle()]

    # --- going -----------------------------------------------------------------------------------

    def hush(self) -> None:
        """Another role tells of the engine's load from now on."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._hushing = asyncio.create_task(publisher.close(), name="end of the load of the old role")

    async def fall_silent(self) -> None:
        """Answer nothing more under this role's name; what is being answered is finished."""
        if self._control is not None:
            await self._control.close()

    async def run_hooks(self, bounded: Callable[[str, Awaitable[None]], Awaitable[None]]) -> None:
        """The component's shutdown hooks, each through `bounded`."""
        if self.component is not None:
            for hook in self.service.on_shutdown:
                await bounded(f"the shutdown hook {hook}", _call_hook(self.component, hook))
        await self._colocated.run_hooks(bounded)

    async def close(self) -> None:
        """Close what the component opened, the lease last."""
        await self._stack.aclose()

    # --- what others may ask -----------------------------------------------------------------------

    def load(self) -> Load:
        """The engine's load. Without an engine: the number of requests."""
        source = self.context.load_source if self.context is not None else None
        load = source() if source is not None else Load(request_active_slots=self.endpoints.in_flight)
        unread = self._unread()
        return replace(load, **unread) if any(unread.values()) else load

    def _unread(self) -> dict[str, Any]:
        """Its part of the load: looked at once a second, because loads are also published at every change."""
        now_s = time.monotonic()
        if now_s - self._unread_at_s >= LOOK_EVERY_S:
            self._unread_at_s = now_s
            work = self.work()
            unread_s = [seconds for seconds in work.unread_s if seconds >= UNREAD_SHOWN_S]
            longest_s = max(unread_s, default=0.0)
            self._unread_found = {"unread": len(unread_s), "unread_s": longest_s, "abandoned": work.abandoned}
        return self._unread_found

    async def until_reported(self) -> None:
        """If answers were ended because nobody read them: return when the arbiter has heard of it, or had the time."""
        if self._publisher is not None and self.work().abandoned:
            self._unread_at_s = -math.inf
            await self._publisher.until_asked(REPORTED_WITHIN_S)

    def work(self) -> Work:
        """The component's unfinished work, its endpoints' requests included."""
        work = Work() if self.context is None else self.context.work_source()
        return Work(
            (*self.endpoints.in_flight_ids(), *work.requests),
            work.pulled,
            work.unnamed,
            (*self.endpoints.unread_s(), *work.unread_s),
            self.endpoints.abandoned + work.abandoned,
        )

    def load_or_none(self) -> Load | None:
        """The load that the component itself tells; None where it tells none, or cannot now."""
        if self.context is None or self.context.load_source is None:
            return None
        with contextlib.suppress(DynamoError):  # the program behind the component does not answer: unknown
            return self.context.load_source()
        return None

    @property
    def _made(self) -> Context:
        assert self.context is not None
        return self.context


async def _call_hook(component: Any, hook: str) -> None:
    result = getattr(component, hook)()
    if asyncio.iscoroutine(result):
        await result

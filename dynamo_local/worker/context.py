"""A worker's identity, and what its component can call (`sdk.context.WorkerContext`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.traffic import UNREAD_BOUND_S, Recent
from dynamo_local.core.types import Load, lease_hex
from dynamo_local.errors import ConfigError
from dynamo_local.ports import EndpointClient, KeyValueStore, PrefillQueue
from dynamo_local.sdk.context import EngineSleeper, KvEvents, Work
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.transport.access import EtcdAccess, NatsAccess
from dynamo_local.transport.control import Op
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.kv_events import NatsKvEventPublisher
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.observation import Benchmarked, ObservationServer, no_benchmark
from dynamo_local.transport.passes import PassEvents, PassRecorder
from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue
from dynamo_local.transport.prefill_replies import PrefillReplies
from dynamo_local.transport.requests.client import DependencyClient, Plane, RequestPlane

log = logging.getLogger("dynamo_local.worker")

KV_EVENTS, PASSES, SLEEPER = "kv_events", "passes", "sleeper"
"""Under which what tells of an engine is handed on to the next role."""
QUEUE_KNOWN = "prefill_queue_known"
"""And that this process has seen the queue's streams."""
Callback = Callable[[], Awaitable[None]]
KeyOf = Callable[[int], str]
"""The key under a lease."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The worker's identity, from its environment. `start_deadline_s` bounds every wait of the start.

    `standby`: the worker may be put to sleep. `colocated`: colocated components. `worker_folder`: for its sockets; the
    folder may not exist yet.
    """

    namespace: str
    component: str
    watcher_name: str
    run_id: str
    statefile: Path
    etcd_endpoints: str
    nats_server: str
    etcd_access: EtcdAccess
    nats_access: NatsAccess
    lease_ttl_s: int
    start_deadline_s: float
    unread_bound_s: float = UNREAD_BOUND_S
    gpus: int = 0
    flips_to: str | None = None
    standby: bool = False
    colocated: tuple[str, ...] = ()
    worker_folder: Path | None = None

    @property
    def siblings_folder(self) -> Path | None:
        """Folder that all workers of this component share on this host."""
        return None if self.worker_folder is None else self.worker_folder.parent / f"of-{self.component}"

    @classmethod
    def of(cls, env: Mapping[str, str], component: str) -> Identity:
        """Raises `ConfigError` naming the first variable that is missing: workers are started by `dynamo serve`.

        Likewise for one by which etcd or NATS cannot be reached (`transport.access`).
        """

        def need(name: str) -> str:
            try:
                return env[name]
            except KeyError:
                raise ConfigError(f"{name} is not set; workers are started by `dynamo serve`") from None

        return cls(
            namespace=need("DYN_NAMESPACE"),
            component=component,
            watcher_name=need("DYN_WATCHER_NAME"),
            run_id=need("DYN_RUN_ID"),
            statefile=Path(need("DYN_STATEFILE")),
            etcd_endpoints=need("ETCD_ENDPOINTS"),
            nats_server=need("NATS_SERVER"),
            etcd_access=EtcdAccess.of(env),
            nats_access=NatsAccess.of(env),
            lease_ttl_s=int(env.get("DYN_LEASE_TTL_S", "10")),
            start_deadline_s=float(env.get("DYN_START_DEADLINE_S", "300")),
            unread_bound_s=float(env.get("DYN_UNREAD_BOUND_S", UNREAD_BOUND_S)),
            gpus=int(env.get("DYN_WORKER_GPUS", "0")),
            flips_to=env.get("DYN_FLIPS_TO") or None,
            standby=env.get("DYN_STANDBY") == "1",
            colocated=tuple(name for name in env.get("DYN_COLOCATED", "").split(",") if name),
            worker_folder=Path(folder) if (folder := env.get("DYN_WORKER_FOLDER")) else None,
        )


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a worker."""

    kv: KeyValueStore
    nats: Any
    plane: Plane


class Context:
    """The component's context. It holds the component's registrations: callbacks, sources, keys, facts.

    `stack`: closes what the component opened, before the connections close. `kept`: stays in the process when the role
    changes. `inherited`: what the former role kept. `on_fatal(reason)`: the worker can no longer serve. `on_facts`:
    `facts` changed. `on_wait(subject)`: the start waits for it.
    """

    def __init__(
        self,
        identity: Identity,
        connections: Connections,
        lease: LeaseKeeper,
        settings: Any,
        *,
        draining: asyncio.Event,
        stack: contextlib.AsyncExitStack,
        kept: contextlib.AsyncExitStack,
        inherited: Mapping[str, Any],
        on_fatal: Callable[[str, BaseException], None],
        on_facts: Callable[[], None],
        on_wait: Callable[[str], None],
        operations: dict[str, Op],
    ) -> None:
        self.namespace = identity.namespace
        self.component = identity.component
        self.watcher_name = identity.watcher_name
        self.run_id = identity.run_id
        self.siblings_folder = identity.siblings_folder
        self.unread_bound_s = identity.unread_bound_s
        self.gpus = identity.gpus
        self.standby = identity.standby
        self.sleeper: EngineSleeper | None = inherited.get(SLEEPER)
        self.settings = settings
        self.kv = connections.kv
        self.nats = connections.nats
        self.draining = draining
        self.inherited = inherited
        self.flips_to = identity.flips_to
        self.facts: dict[str, str] = {}
        self.load_source: Callable[[], Load] | None = None
        self.load_changed: Callback = _never
        self.work_source: Callable[[], Work] = Work
        self.dispatch_source: Callable[[], Mapping[str, float]] | None = None
        self.served_source: Callable[[], Mapping[str, float]] | None = None
        self.more_endpoints: dict[str, tuple[Callable[[Any], Any], type]] = {}
        self._counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None
        self._limits: Callable[[], Mapping[str, int | None]] = dict
        self._requests: Callable[[float], Recent | None] | None = None
        self._passes: PassRecorder | None = None
        self._pass_listeners: list[Callable[[ForwardPass], None]] = []
        self._observed = False
        self._benchmark: Callable[[], Benchmarked | None] = no_benchmark
        self._plane = connections.plane
        self._lease = lease
        self._stack = stack
        self._kept = kept
        self._events: NatsKvEventPublisher | None = None
        self._on_fatal = on_fatal
        self._on_facts = on_facts
        self._on_wait = on_wait
        self._operations = operations
        self._on_drain: list[Callback] = []
        self._on_ready: list[Callback] = []
        self._on_resume: list[Callback] = []
        self._waiting_keys: list[tuple[KeyOf, bytes]] | None = []
        self._queue_known = False

    # --- for the component (sdk.context.WorkerContext) -------------------------------------------

    @property
    def lease_id(self) -> int:
        return self._lease.lease_id

    def on_drain(self, callback: Callback) -> None:
        self._on_drain.append(callback)

    def on_ready(self, callback: Callback) -> None:
        self._on_ready.append(callback)

    def on_resume(self, callback: Callback) -> None:
        self._on_resume.append(callback)

    def on_control(self, op: str, answer: Op) -> None:
        self._operations[op] = answer

    def set_load_source(self, source: Callable[[], Load], changed: Callback | None = None) -> None:
        self.load_source, self.load_changed = source, changed or _never

    def set_dispatch_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        self.dispatch_source = source

    def set_served_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        self.served_source = source

    def set_sleeper(self, sleeper: EngineSleeper) -> None:
        self.sleeper = sleeper

    def set_work_source(self, source: Callable[[], Work]) -> None:
        self.work_source = source

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._vital_ended)
        return task

    def _vital_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(task.get_name(), error)

    def keep(self, close: Callback) -> None:
        self._kept.push_async_callback(close)

    def wait_for(self, what: str) -> None:
        self._on_wait(what)

    def serve_endpoint(self, name: str, handler: Callable[[Any], Any], model: type) -> None:
        self.more_endpoints[name] = handler, model

    async def register_key(self, prefix: str, value: bytes) -> None:
        await self._register_soon(lambda lease: f"{prefix}:{lease_hex(lease)}", value)

    async def register_whole_key(self, key: str, value: bytes) -> None:
        await self._register_soon(lambda _lease: key, value)

    async def announce(self, **facts: str) -> None:
        self.facts.update(facts)
        self._on_facts()

    async def endpoint_client(self, component: str, endpoint: str) -> EndpointClient:
        return await self._plane.client(self.kv, self.namespace, component, endpoint)

    async def prefill_queue(self, name: str = "") -> PrefillQueue:
        queue = JetStreamPrefillQueue(
            self.nats, self.namespace, self.run_id, name=name, known=self.inherited.get(QUEUE_KNOWN, False)
        )
        self._stack.push_async_callback(queue.close)
        await queue.start()
        self._queue_known = True
        return queue

    async def prefill_replies(self) -> PrefillReplies:
        replies = PrefillReplies()
        self._stack.push_async_callback(replies.close)
        await replies.start()
        return replies

    async def kv_events(self) -> KvEvents:
        events: NatsKvEventPublisher | None = self.inherited.get(KV_EVENTS)
        if events is None:
            events = NatsKvEventPublisher(self.nats, self.namespace, self.component, lambda: self.lease_id)
            self.keep(events.close)
            await events.start()
        self._events = events
        return events

    async def passes(self, *, publish: bool) -> PassRecorder:
        recorder = self._passes = self.inherited.get(PASSES) or PassRecorder()
        if publish:
            events = PassEvents(self.nats, self.namespace, self.component, lambda: str(self.lease_id))
            self._stack.push_async_callback(events.close)
            events.start()
            self._pass_listeners.append(events.publish)
        if PASSES not in self.inherited:
            recorder.listeners[:] = self._pass_listeners
        return recorder

    def observe(
        self,
        counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
        limits: Callable[[], Mapping[str, int | None]] = dict,
        requests: Callable[[float], Recent | None] | None = None,
        benchmark: Callable[[], Benchmarked | None] | None = None,
    ) -> None:
        self._counters, self._limits, self._requests, self._observed = counters, limits, requests, True
        self._benchmark = benchmark or no_benchmark

    def handed_on(self) -> dict[str, Any]:
        """The part of this context that the next role takes over."""
        known = self._queue_known or None
        own = ((PASSES, self._passes), (KV_EVENTS, self._events), (SLEEPER, self.sleeper), (QUEUE_KNOWN, known))
        return {name: each for name, each in own if each is not None}

    def take_over(self) -> None:
        """This role is the process's from now on: what was inherited tells of it."""
        if self._events is not None:
            self._events.moved(self.component, lambda: self.lease_id)
        if self._passes is not None:
            self._passes.listeners[:] = self._pass_listeners

    # --- for the process -------------------------------------------------------------------------

    def close_with_worker(self, close: Callback) -> None:
        """Await `close` when the worker shuts down, before its connections are closed."""
        self._stack.push_async_callback(close)

    async def register_waiting_keys(self) -> None:
        """The worker takes requests now: put the component's keys, and put later ones at once."""
        waiting, self._waiting_keys = self._waiting_keys or [], None
        await self._register(waiting)

    async def _register_soon(self, key_of: KeyOf, value: bytes) -> None:
        """Before the worker is ready the key waits: a model must not be listed before it can be asked."""
        if self._waiting_keys is not None:
            self._waiting_keys.append((key_of, value))
        else:
            await self._register([(key_of, value)])

    async def _register(self, keys: Iterable[tuple[KeyOf, bytes]]) -> None:
        await self._lease.register_all((key_of, partial(_always, value)) for key_of, value in keys)

    async def answer_planners(self) -> None:
        """Answer what planners ask, if the component has something to tell. Raises `NatsUnavailable`."""
        if not self._observed:
            return
        server = ObservationServer(
            self.nats,
            self.namespace,
            self.watcher_name,
            self.component,
            lambda: str(self.lease_id),
            counters=self._counters,
            passes=self._passes,
            limits=self._limits,
            requests=self._requests,
            benchmark=self._benchmark,
        )
        self._stack.push_async_callback(server.close)
        await server.start()

    def drain_callbacks(self) -> list[Callback]:
        """The component's callbacks, in its order."""
        return list(self._on_drain)

    async def ready(self) -> None:
        """Run the component's callbacks for that side by side."""
        await run_all("becoming ready", self._on_ready)

    async def resume(self) -> None:
        """Run the component's resume callbacks side by side."""
        await run_all("taking the drain back", self._on_resume)


async def run_all(what: str, callbacks: Iterable[Callback]) -> None:
    """Run them side by side to their ends. Errors of the component's code are logged."""
    results = await asyncio.gather(*(_call(callback) for callback in callbacks), return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            log.error("a callback for %s failed", what, exc_info=error)


async def _call(callback: Callback) -> None:
    await callback()


def _always(value: bytes, _lease: int) -> bytes:
    return value


async def _never() -> None:
    await asyncio.Event().wait()


CONNECT_TIMEOUT_S = 60.0


async def connect(
    identity: Identity,
    stack: contextlib.AsyncExitStack,
    on_nats: Callable[[Any], Awaitable[None]],
    *,
    on_nats_closed: Callable[[], Awaitable[None]],
    waiting_for: Callable[[str], None],
) -> Connections:
    """NATS first, with which `on_nats` is awaited: from then on the control endpoint answers. Then etcd.

    `stack` closes each in the reverse order. `waiting_for` is called with what this waits for, in words. Raises
    `NatsUnavailable`, `EtcdUnavailable`.
    """
    push = stack.push_async_callback
    waiting_for("NATS")
    nats = await connect_nats(
        identity.nats_server,
        identity.nats_access,
        name=identity.watcher_name,
        timeout_s=CONNECT_TIMEOUT_S,
        on_closed=on_nats_closed,
    )
    push(close_quietly, nats)
    await on_nats(nats)
    waiting_for(f"etcd at {identity.etcd_endpoints}")
    kv = await EtcdStore.connect_when_up(identity.etcd_endpoints, CONNECT_TIMEOUT_S, access=identity.etcd_access)
    push(kv.close)
    plane = RequestPlane(nats)
    push(plane.close)
    await plane.start()
    return Connections(kv, nats, plane)


def dependency_clients(
    graph: LoadedGraph, service: DynamoService[Any], identity: Identity, connections: Connections
) -> dict[str, DependencyClient | None]:
    """Clients for the component's `depends(...)`, by attribute; None for an optional one that does not run."""

    def client_of(other: DynamoService[Any]) -> DependencyClient:
        methods = {declared.method: name for name, declared in other.endpoints.items()}
        return DependencyClient(connections.plane, connections.kv, identity.namespace, other.name, methods)

    bindings = graph.bindings(service.name)
    return {attribute: None if other is None else client_of(other) for attribute, other in bindings.items()}


def required(service: DynamoService[Any], clients: Mapping[str, DependencyClient | None]) -> list[DependencyClient]:
    """Those without which the component cannot serve."""
    depends = service.depends
    return [client for name, client in clients.items() if client is not None and not depends[name].optional]


def dynamo_context_of(context: Context, service: DynamoService[Any], lease: LeaseKeeper) -> dict[str, Any]:
    """The entries that Dynamo's graphs expect in `dynamo_context`."""
    return {
        "runtime": context,
        "component": context.component,
        "namespace": context.namespace,
        "service_name": service.name,
        "endpoints": list(service.endpoints),
        "lease": lease,
    }

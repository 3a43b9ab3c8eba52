"""One worker process: etcd lease, endpoints, the component itself, and leaving without losing a request.

connect -> grant a lease -> make the component, run its start hooks -> wait for what it depends on
-> serve its endpoints on NATS -> register them in etcd -> ready
-> (SIGTERM, or the lease is revoked) deregister -> take nothing new -> finish -> shut down -> exit 0
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Load, WorkerState, instance_key, lease_hex
from dynamo_local.errors import ConfigError, DynamoError, InvalidRequest, StartTimedOut, StateError
from dynamo_local.ports import EndpointClient, PrefillQueue
from dynamo_local.runtime.discovery import instance_to_value, make_instance, subject_for
from dynamo_local.runtime.etcd import EtcdStore
from dynamo_local.runtime.lease import LeaseKeeper
from dynamo_local.runtime.load import LoadPublisher
from dynamo_local.runtime.nats import close_quietly, connect_nats
from dynamo_local.runtime.prefill_queue import JetStreamPrefillQueue
from dynamo_local.runtime.prefill_replies import PrefillReplies
from dynamo_local.runtime.requests import DependencyClient, EndpointServer, Handler, RequestContext, RequestPlane
from dynamo_local.sdk import dynamo_context
from dynamo_local.sdk.context import set_current_context
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import load_settings
from dynamo_local.state import State, StateStore

log = logging.getLogger("dynamo_local.worker")

LINGER_S = 0.25
"""After deregistering, requests that were already on their way are served this long; later ones are refused and go
to another worker. Clients see a deregistration within 50 ms."""
CONNECT_TIMEOUT_S = 60.0
LOAD_ENDPOINT = "load_metrics"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, from its environment. `start_deadline_s` bounds every wait of the start."""

    namespace: str
    component: str
    watcher_name: str
    run_id: str
    statefile: Path
    etcd_endpoints: str
    nats_server: str
    nats_token_file: Path | None
    lease_ttl_s: int
    start_deadline_s: float

    @classmethod
    def of(cls, env: Mapping[str, str], component: str) -> Identity:
        """Raises `ConfigError` naming the first variable that is missing: workers are started by `dynamo serve`."""

        def need(name: str) -> str:
            try:
                return env[name]
            except KeyError:
                raise ConfigError(f"{name} is not set; workers are started by `dynamo serve`") from None

        token = env.get("DYN_NATS_TOKEN_FILE")
        return cls(
            namespace=need("DYN_NAMESPACE"),
            component=component,
            watcher_name=need("DYN_WATCHER_NAME"),
            run_id=need("DYN_RUN_ID"),
            statefile=Path(need("DYN_STATEFILE")),
            etcd_endpoints=need("ETCD_ENDPOINTS"),
            nats_server=need("NATS_SERVER"),
            nats_token_file=Path(token) if token else None,
            lease_ttl_s=int(env.get("DYN_LEASE_TTL_S", "10")),
            start_deadline_s=float(env.get("DYN_START_DEADLINE_S", "300")),
        )


class WorkerProcess:
    """The process's one worker. It is also the component's `sdk.context.WorkerContext`."""

    def __init__(self, graph: LoadedGraph, service: DynamoService[Any], identity: Identity) -> None:
        self.graph = graph
        self.service = service
        self.identity = identity
        self.namespace = identity.namespace
        self.component = identity.component
        self.watcher_name = identity.watcher_name
        self.run_id = identity.run_id
        self.settings = load_settings(service)
        self.clock = AsyncioClock()
        self.draining = asyncio.Event()
        self.kv: Any = None
        self.nats: Any = None
        self._store = StateStore(identity.statefile, run_id=identity.run_id)
        self._plane: Any = None
        self._lease: Any = None
        self._servers: list[EndpointServer] = []
        self._keys: list[tuple[str, bytes]] = []
        self._facts: dict[str, str] = {}
        self._load: tuple[Callable[[], Load], Callable[[], Awaitable[None]]] | None = None
        self._on_drain: list[Callable[[], Awaitable[None]]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._leave: asyncio.Future[str] | None = None
        self._registered = False

    # --- the component's context (sdk.context.WorkerContext) -----------------------------------

    @property
    def lease_id(self) -> int:
        return int(self._lease.lease_id)

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_drain.append(callback)

    def set_load_source(self, source: Callable[[], Load], changed: Callable[[], Awaitable[None]]) -> None:
        self._load = (source, changed)

    async def register_key(self, prefix: str, value: bytes) -> None:
        """Before the worker is ready the key waits: a model must not be listed before it can be asked."""
        if self._registered:
            await self._register_key(prefix, value)
        else:
            self._keys.append((prefix, value))

    async def announce(self, **facts: str) -> None:
        self._facts.update(facts)
        if url := facts.get("frontend_url"):
            await self._commit(partial(_set_frontend_url, url=url))

    async def endpoint_client(self, component: str, endpoint: str) -> EndpointClient:
        client: EndpointClient = await self._plane.client(self.kv, self.namespace, component, endpoint)
        return client

    async def prefill_queue(self) -> PrefillQueue:
        queue = JetStreamPrefillQueue(self.nats, self.namespace, self.run_id)
        await queue.start()
        self._closers.append(queue.close)
        return queue

    async def prefill_replies(self) -> PrefillReplies:
        replies = PrefillReplies(self.nats, self.namespace)
        await replies.start()
        self._closers.append(replies.close)
        return replies

    # --- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Live, and return the exit code."""
        loop = asyncio.get_running_loop()
        self._leave = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_leave, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self._ask_to_leave, "SIGINT")
        try:
            async with asyncio.timeout(self.identity.start_deadline_s):
                instance = await self._start()
        except TimeoutError:
            raise StartTimedOut(f"not ready within {self.identity.start_deadline_s:g} s: {self._waiting_for}") from None
        why = await self._leave
        log.info("leaving: %s", why)
        await self._drain()
        await self._shut_down(instance)
        log.info("gone")
        return 0

    _waiting_for = "starting"

    async def _start(self) -> Any:
        identity = self.identity
        self._waiting_for = f"etcd at {identity.etcd_endpoints}"
        self.kv = await EtcdStore.connect_when_up(identity.etcd_endpoints, CONNECT_TIMEOUT_S)
        self._waiting_for = "NATS"
        self.nats = await connect_nats(
            identity.nats_server,
            identity.nats_token_file,
            name=identity.watcher_name,
            timeout_s=CONNECT_TIMEOUT_S,
            on_closed=self._nats_closed,
        )
        self._plane = RequestPlane(self.nats)
        await self._plane.start()
        self._lease = LeaseKeeper(
            self.kv, ttl_s=identity.lease_ttl_s, is_draining=self._is_draining, on_regrant=self._on_regrant
        )
        await self._lease.start()
        await self._commit(self._write_identity)
        set_current_context(self)
        dynamo_context.update(self._dynamo_context())
        clients = self._clients()
        instance = self.service.create(clients)
        self._waiting_for = f"{self.component}'s start hooks"
        for hook in self.service.on_start:
            await getattr(instance, hook)()
        for attribute, client in clients.items():
            if client is not None and not self.service.depends[attribute].optional:
                self._waiting_for = f"a worker of {client.component}"
                await client.wait_ready(identity.start_deadline_s)
        await self._serve(instance)
        await self._register()
        log.info("ready: lease %s, endpoints %s", lease_hex(self.lease_id), ", ".join(self.service.endpoints) or "none")
        return instance

    async def _nats_closed(self) -> None:
        """The client ended for good (the server threw us out): without it no request reaches us, so leave."""
        self._ask_to_leave("the connection to NATS was ended for good")

    def _ask_to_leave(self, why: str) -> None:
        assert self._leave is not None
        if not self._leave.done():
            self._leave.set_result(why)

    def _dynamo_context(self) -> dict[str, Any]:
        """What Dynamo's graphs expect to find in `dynamo_context`."""
        return {
            "runtime": self,
            "component": self.component,
            "namespace": self.namespace,
            "service_name": self.service.name,
            "endpoints": list(self.service.endpoints),
            "lease": self._lease,
        }

    def _clients(self) -> dict[str, DependencyClient | None]:
        """Clients for the component's `depends(...)`, by attribute; None for an optional one that does not run."""
        bindings = self.graph.bindings(self.service.name)
        return {attribute: None if other is None else self._client_of(other) for attribute, other in bindings.items()}

    def _client_of(self, other: DynamoService[Any]) -> DependencyClient:
        methods = {declared.method: name for name, declared in other.endpoints.items()}
        return DependencyClient(self._plane, self.kv, self.namespace, other.name, methods)

    async def _serve(self, instance: Any) -> None:
        """Take requests on NATS before registering: whoever sees the key may send at once."""
        handlers = {name: getattr(instance, declared.method) for name, declared in self.service.endpoints.items()}
        if self._load is not None and LOAD_ENDPOINT not in handlers:
            handlers[LOAD_ENDPOINT] = self._load_metrics
        for name, handler in handlers.items():
            model = self.service.request_model(name) if name in self.service.endpoints else None
            server = EndpointServer(self.nats, subject=self._subject(name), handler=_adapt(handler, model), name=name)
            await server.start()
            self._servers.append(server)
        if self._load is not None:
            publisher = LoadPublisher(
                self.nats, self.namespace, self.component, self.watcher_name, lambda: self.lease_id, *self._load
            )
            await publisher.start()
            self._closers.append(publisher.close)

    async def _load_metrics(self, _request: Any) -> dict[str, Any]:
        assert self._load is not None
        load = self._load[0]()
        return {name: getattr(load, name) for name in Load.__slots__}

    def _subject(self, endpoint: str) -> str:
        return subject_for(self.namespace, self.component, endpoint, self.lease_id)

    async def _register(self) -> None:
        """Endpoints, then the component's own keys, and last the one that tells the arbiter: ready."""
        for server in self._servers:
            await self._lease.register(
                partial(instance_key, self.namespace, self.component, server.name), partial(self._value, server.name)
            )
        for prefix, value in self._keys:
            await self._register_key(prefix, value)
        self._registered = True
        await self._commit(self._write_endpoints)
        await self._lease.register(self._ready_key, self._ready_value)
        watch = asyncio.ensure_future(self._watch_lease())
        self._closers.append(partial(_cancel, watch))

    async def _register_key(self, prefix: str, value: bytes) -> None:
        await self._lease.register(lambda lease: f"{prefix}:{lease_hex(lease)}", lambda _lease: value)

    def _value(self, endpoint: str, lease: int) -> bytes:
        return instance_to_value(make_instance(self.namespace, self.component, endpoint, lease))

    def _ready_key(self, lease: int) -> str:
        return f"{self.namespace}/workers/{self.watcher_name}:{lease_hex(lease)}"

    def _ready_value(self, lease: int) -> bytes:
        return json.dumps({"pid": os.getpid(), "endpoints": self._endpoint_keys(lease), **self._facts}).encode()

    def _endpoint_keys(self, lease: int) -> list[str]:
        return [instance_key(self.namespace, self.component, server.name, lease) for server in self._servers]

    async def _watch_lease(self) -> None:
        await self._lease.revoked.wait()
        self._ask_to_leave("the lease was revoked")

    async def _on_regrant(self, lease: int) -> None:
        """etcd lost our lease; a new one was granted. Serve its subjects before its keys say so."""
        log.warning("etcd lost the lease; registering again under %s", lease_hex(lease))
        for server in self._servers:
            await server.rebind(subject_for(self.namespace, self.component, server.name, lease))
        await self._commit(self._write_identity)
        if self._registered:
            await self._commit(self._write_endpoints)

    # --- the statefile -------------------------------------------------------------------------

    async def _commit(self, change: Callable[[State], None]) -> None:
        """Our entry is for people and for the arbiter's successor: a broken file must not end a serving worker."""
        try:
            await self._store.aupdate(change)
        except StateError as error:
            log.warning("the statefile was not updated: %s", error)

    def _write_identity(self, state: State) -> None:
        entry = state.components.get(self.watcher_name)
        if entry is not None:
            entry.endpoints = []
            entry.pid, entry.lease = os.getpid(), lease_hex(self.lease_id)

    def _write_endpoints(self, state: State) -> None:
        entry = state.components.get(self.watcher_name)
        if entry is not None:
            entry.lease, entry.endpoints = lease_hex(self.lease_id), self._endpoint_keys(self.lease_id)

    async def _is_draining(self) -> bool:
        try:
            state = await asyncio.to_thread(self._store.read)
        except StateError:
            return False
        entry = state.components.get(self.watcher_name)
        return entry is not None and entry.state is WorkerState.DRAINING

    # --- leaving -------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Out of routing first; then take nothing new; then finish everything that was taken."""
        try:
            await self._lease.revoke()
        except DynamoError as error:
            log.warning("the lease could not be revoked (%s); it expires by itself", error)
        self.draining.set()
        for server in self._servers:
            server.stop_accepting(LINGER_S)
        await asyncio.gather(
            *(callback() for callback in self._on_drain), *(_until_idle(server) for server in self._servers)
        )

    async def _shut_down(self, instance: Any) -> None:
        for hook in self.service.on_shutdown:
            result = getattr(instance, hook)()
            if asyncio.iscoroutine(result):
                await result
        for close in reversed(self._closers):
            await close()
        for server in self._servers:
            await server.close()
        await self._lease.close()
        await self._plane.close()
        await close_quietly(self.nats)
        await self.kv.close()


def _adapt(handler: Callable[..., Any], model: Any) -> Handler:
    """Endpoints take the request alone, as Dynamo's do, as the pydantic model with which they annotate it."""
    if model is None:
        return lambda payload, _context: handler(payload)

    def validated(payload: Any, _context: RequestContext) -> Any:
        try:
            request = model.model_validate(payload)
        except ValueError as error:
            raise InvalidRequest(f"the request is no {model.__name__}: {error}") from None
        return handler(request)

    return validated


async def _until_idle(server: EndpointServer) -> None:
    while not await server.wait_idle(60.0):
        log.info("%s: %d requests left", server.name, server.in_flight)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _set_frontend_url(state: State, url: str) -> None:
    state.frontend_url = url

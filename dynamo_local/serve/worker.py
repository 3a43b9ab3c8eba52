"""One worker process, from its start to its exit.

connect -> serve the control endpoint -> grant a lease -> make the component, run its start hooks
-> wait for what it depends on -> serve its endpoints on NATS -> register them in etcd -> ready
-> (SIGTERM, the lease is revoked, or a message) drain: `worker_drain`; it can be taken back -> shut down -> exit 0

Asked to leave while it starts, it leaves at once. When something vital fails, its engine first of all, it ends
at once with exit code 1: whoever supervises it decides what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from dynamo_local.core.types import Load, instance_key, lease_hex
from dynamo_local.errors import (
    EXIT_FAILED,
    EXIT_OK,
    DynamoError,
    EtcdUnavailable,
    InvalidRequest,
    LeaseNotFound,
    StartTimedOut,
)
from dynamo_local.runtime.control import ControlServer
from dynamo_local.runtime.discovery import instance_to_value, make_instance, subject_for
from dynamo_local.runtime.etcd import EtcdStore
from dynamo_local.runtime.lease import LeaseKeeper
from dynamo_local.runtime.load import LoadPublisher
from dynamo_local.runtime.nats import close_quietly, connect_nats
from dynamo_local.runtime.requests import DependencyClient, EndpointServer, Handler, RequestContext, RequestPlane
from dynamo_local.sdk import dynamo_context
from dynamo_local.sdk.context import Work, set_current_context
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import load_settings
from dynamo_local.serve.worker_context import Connections, Context, Identity, run_all
from dynamo_local.serve.worker_drain import Drain, Phase
from dynamo_local.serve.worker_entry import Entry, EntryWriter
from dynamo_local.state import StateStore

log = logging.getLogger("dynamo_local.worker")

CONNECT_TIMEOUT_S = 60.0
REVOKE_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 5.0
ENTRY_TIMEOUT_S = 2.0
HOOKS_TIMEOUT_S = 30.0
"""For the component's shutdown hooks after a drain, and for closing what we opened."""
HURRIED_TIMEOUT_S = 5.0
"""The same where the worker was asked to leave, or failed, before it was ready."""
LAST_REVOKE_S = 0.5
"""When the engine has died: out of routing if etcd answers at once, but the process goes in any case."""
LOAD_ENDPOINT = "load_metrics"
SHOWN_REQUESTS = 100


class WorkerProcess:
    """The process's one worker. `hurried`: it must end without waiting for its threads."""

    def __init__(self, graph: LoadedGraph, service: DynamoService[Any], identity: Identity) -> None:
        self.graph = graph
        self.service = service
        self.identity = identity
        self.hurried = False
        self._settings = load_settings(service)
        self._waiting_for = "starting"
        self._draining = asyncio.Event()
        self._drain: Drain = None  # type: ignore[assignment]  # made by `run`: it belongs to its loop
        self._failed: asyncio.Future[BaseException] = None  # type: ignore[assignment]
        store = StateStore(identity.statefile, run_id=identity.run_id)
        self._entry = EntryWriter(store, identity.watcher_name, self._truth)
        self._stack = contextlib.AsyncExitStack()
        self._lease: LeaseKeeper | None = None
        self._context: Context | None = None
        self._instance: Any = None
        self._servers: list[EndpointServer] = []
        self._registered = False
        self._lease_gone = False
        self._lease_watch: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Live, and return the exit code. Raises what the start failed with, after everything was closed."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        self._drain = Drain(self)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._drain.begin, signum.name)
        self.hurried = True
        try:
            if await self._come_up():
                self.hurried = False
                ends: set[asyncio.Future[Any]] = {self._drain.left, self._failed}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                await self._give_up()
                return EXIT_FAILED
        finally:
            if not self._failed.done():
                await self._shut_down()
        log.info("gone: %s", self._drain.reason)
        return EXIT_OK

    async def _come_up(self) -> bool:
        """True once ready; False if the worker is to leave, or has failed, before that."""
        deadline_s = self.identity.start_deadline_s
        starting = asyncio.create_task(self._start(), name="start")
        racing: set[asyncio.Future[Any]] = {starting, self._drain.left, self._failed}
        await asyncio.wait(racing, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        timed_out = not any(future.done() for future in racing)
        starting.cancel()
        await asyncio.wait({starting}, timeout=HURRIED_TIMEOUT_S)
        error = starting.exception() if starting.done() and not starting.cancelled() else None
        if isinstance(error, LeaseNotFound) and self._lease is not None and self._lease.revoked.is_set():
            self._drain.begin("its lease was revoked")
        if self._drain.left.done() or self._failed.done():
            log.info("leaving before it was ready: %s", self._drain.reason)
            return False
        if timed_out:
            raise StartTimedOut(f"not ready within {deadline_s:g} s: {self._waiting_for}")
        if error is not None:
            raise error
        return self._drain.started()

    def _fail(self, what: str, error: BaseException) -> None:
        if not self._failed.done():
            log.critical("%s failed, so this worker ends: %s", what, error, exc_info=error)
            self._failed.set_result(error)

    async def _give_up(self) -> None:
        """The engine is dead, so nothing can be finished: out of routing, and go. Callers see their streams break."""
        self.hurried = True
        await self._drain.close()
        if self._lease is not None:
            # Whoever finds us dead revokes it too.
            await _bounded("giving the lease back", self._give_up_lease(self._lease), LAST_REVOKE_S)

    async def _give_up_lease(self, lease: LeaseKeeper) -> None:
        """Say first that this is no drain: a lease that is given back looks like one to the arbiter, and a worker that
        leaves politely is not started again (its exit came 15 ms after its key's end)."""
        if self._registered:
            failed = json.dumps({"pid": os.getpid(), "failed": True}).encode()
            ready = partial(ready_key, self.identity.namespace, self.identity.watcher_name)
            await lease.register(ready, lambda _lease: failed, LAST_REVOKE_S)
        await self._give_lease_back(LAST_REVOKE_S)

    async def _shut_down(self) -> None:
        timeout_s = HURRIED_TIMEOUT_S if self.hurried else HOOKS_TIMEOUT_S
        await self._drain.close()
        if self._instance is not None:
            for hook in self.service.on_shutdown:
                await _bounded(f"the shutdown hook {hook}", _call_hook(self._instance, hook), timeout_s)
        if self._lease is not None and self._lease.lease_id and not self._lease_gone:
            await _bounded("giving the lease back", self._give_lease_back(LAST_REVOKE_S), 2 * LAST_REVOKE_S)
        self._entry.touch()
        await self._entry.flush(ENTRY_TIMEOUT_S)
        await self._entry.close()
        await _bounded("closing the connections", self._stack.aclose(), timeout_s)

    async def _give_lease_back(self, timeout_s: float) -> None:
        """Return once etcd has none of our keys any more. Raises `EtcdUnavailable`: it expires by itself then."""
        assert self._lease is not None
        await self._lease.revoke(timeout_s)
        self._lease_gone, self._registered = True, False
        self._entry.touch()

    # --- starting ------------------------------------------------------------------------------

    async def _start(self) -> None:
        connections = await self._connect()
        self._context = context = Context(
            self.identity,
            connections,
            self._settings,
            draining=self._draining,
            stack=self._stack,
            on_fatal=self._fail,
            on_facts=self._entry.touch,
        )
        set_current_context(context)
        dynamo_context.update(self._dynamo_context(context))
        clients = self._clients(connections)
        self._instance = self.service.create(clients)
        self._waiting_for = f"{self.service.name}'s start hooks"
        for hook in self.service.on_start:
            await getattr(self._instance, hook)()
        for attribute, client in clients.items():
            if client is not None and not self.service.depends[attribute].optional:
                self._waiting_for = f"a worker of {client.component}"
                await client.wait_ready(self.identity.start_deadline_s)
        self._waiting_for = "its registration"
        await self._serve(context)
        await self._register(context)
        endpoints = ", ".join(self.service.endpoints) or "none"
        log.info("ready: lease %s, endpoints %s", lease_hex(context.lease_id), endpoints)

    async def _connect(self) -> Connections:
        """NATS first: from then on the control endpoint answers."""
        identity, push = self.identity, self._stack.push_async_callback
        self._waiting_for = "NATS"
        nats = await connect_nats(
            identity.nats_server,
            identity.nats_token_file,
            name=identity.watcher_name,
            timeout_s=CONNECT_TIMEOUT_S,
            on_closed=self._nats_closed,
        )
        push(close_quietly, nats)
        ops = {"status": self._op_status, "drain": self._op_drain, "cancel_drain": self._op_cancel_drain}
        control = ControlServer(nats, identity.namespace, identity.watcher_name, ops)
        push(control.close)
        await control.start()
        self._waiting_for = f"etcd at {identity.etcd_endpoints}"
        kv = await EtcdStore.connect_when_up(identity.etcd_endpoints, CONNECT_TIMEOUT_S)
        push(kv.close)
        plane = RequestPlane(nats)
        push(plane.close)
        await plane.start()
        self._lease = lease = LeaseKeeper(
            kv, ttl_s=identity.lease_ttl_s, is_draining=self._is_draining, on_regrant=self._on_regrant
        )
        push(lease.close)
        await lease.start()
        self._follow_lease()
        push(self._follow_lease_no_more)
        # The first key is watched, so that a revoke is seen at once also during a long start; and whoever wants
        # to revoke it finds the lease by the worker's name.
        about = json.dumps({"pid": os.getpid(), "run_id": identity.run_id}).encode()
        await lease.register(partial(lease_key, identity.namespace, identity.watcher_name), lambda _lease: about)
        self._entry.touch()
        return Connections(kv, nats, plane, lease)

    async def _nats_closed(self) -> None:
        """The client ended for good (the server threw us out): without it no request reaches us, so leave."""
        self._drain.begin("the connection to NATS was ended for good")

    def _dynamo_context(self, context: Context) -> dict[str, Any]:
        """What Dynamo's graphs expect to find in `dynamo_context`."""
        return {
            "runtime": context,
            "component": context.component,
            "namespace": context.namespace,
            "service_name": self.service.name,
            "endpoints": list(self.service.endpoints),
            "lease": self._lease,
        }

    def _clients(self, connections: Connections) -> dict[str, DependencyClient | None]:
        """Clients for the component's `depends(...)`, by attribute; None for an optional one that does not run."""

        def client_of(other: DynamoService[Any]) -> DependencyClient:
            methods = {declared.method: name for name, declared in other.endpoints.items()}
            return DependencyClient(connections.plane, connections.kv, self.identity.namespace, other.name, methods)

        bindings = self.graph.bindings(self.service.name)
        return {attribute: None if other is None else client_of(other) for attribute, other in bindings.items()}

    async def _serve(self, context: Context) -> None:
        """Take requests on NATS before registering: whoever sees the key may send at once."""
        handlers = {name: getattr(self._instance, declared.method) for name, declared in self.service.endpoints.items()}
        if self.service.endpoints and context.load_source is not None:
            handlers.setdefault(LOAD_ENDPOINT, self._load_metrics)
        for name, handler in handlers.items():
            model = self.service.request_model(name) if name in self.service.endpoints else None
            subject = self._subject(name, context.lease_id)
            server = EndpointServer(context.nats, subject=subject, handler=_adapt(handler, model), name=name)
            self._stack.push_async_callback(server.close)
            await server.start()
            self._servers.append(server)
        publisher = LoadPublisher(
            context.nats,
            context.namespace,
            context.component,
            context.watcher_name,
            lambda: context.lease_id,
            self._load,
            context.load_changed,
        )
        self._stack.push_async_callback(publisher.close)
        await publisher.start()

    async def _register(self, context: Context) -> None:
        """Endpoints, then the component's own keys, and last the one that tells the arbiter: ready."""
        lease = self._lease
        assert lease is not None
        for server in self._servers:
            key = partial(instance_key, context.namespace, context.component, server.name)
            await lease.register(key, partial(self._value, server.name))
        await context.register_waiting_keys()
        self._registered = True
        self._entry.touch()
        await self._entry.flush(ENTRY_TIMEOUT_S)  # whoever is told "ready" finds the endpoints in the statefile
        await lease.register(partial(ready_key, context.namespace, context.watcher_name), self._ready_value)

    def _subject(self, endpoint: str, lease: int) -> str:
        return subject_for(self.identity.namespace, self.identity.component, endpoint, lease)

    def _value(self, endpoint: str, lease: int) -> bytes:
        return instance_to_value(make_instance(self.identity.namespace, self.identity.component, endpoint, lease))

    def _ready_value(self, lease: int) -> bytes:
        facts = self._context.facts if self._context is not None else {}
        return json.dumps({"pid": os.getpid(), "endpoints": self._endpoint_keys(lease), **facts}).encode()

    def _endpoint_keys(self, lease: int) -> list[str]:
        identity = self.identity
        return [instance_key(identity.namespace, identity.component, server.name, lease) for server in self._servers]

    # --- the lease -----------------------------------------------------------------------------

    def _follow_lease(self) -> None:
        if self._lease_watch is None or self._lease_watch.done():
            self._lease_watch = asyncio.create_task(self._until_revoked(), name="lease watch")

    async def _follow_lease_no_more(self) -> None:
        if self._lease_watch is not None:
            self._lease_watch.cancel()
            await asyncio.wait({self._lease_watch})

    async def _until_revoked(self) -> None:
        assert self._lease is not None
        await self._lease.revoked.wait()
        self._drain.begin("its lease was revoked")

    async def _is_draining(self) -> bool:
        return self._drain.phase in (Phase.DRAINING, Phase.LEAVING) or await self._entry.drains()

    async def _on_regrant(self, lease: int) -> None:
        """There is a new lease. Serve its subjects before its keys say so."""
        if self._drain.phase is Phase.READY:
            log.warning("etcd lost the lease; registering again under %s", lease_hex(lease))
        for server in self._servers:
            await server.rebind(self._subject(server.name, lease))
        self._entry.touch()

    # --- draining, and taking it back (worker_drain.Steps) -----------------------------------------

    async def deregister(self) -> None:
        self._registered = False
        self._entry.touch(resumed=False)
        while True:
            try:
                await self._give_lease_back(REVOKE_TIMEOUT_S)
            except EtcdUnavailable as error:
                log.warning("the lease cannot be revoked, trying again: %s", error)
            else:
                return

    def stop_accepting(self, linger_s: float) -> None:
        self._draining.set()
        for server in self._servers:
            server.stop_accepting(linger_s)

    async def finish(self) -> None:
        assert self._context is not None
        idle = [partial(_until_idle, server) for server in self._servers]
        await run_all("the drain", [*self._context.drain_callbacks(), *idle])

    async def resume(self) -> None:
        """Accept, then register under a new lease, then let the component go on."""
        assert self._lease is not None
        assert self._context is not None
        for server in self._servers:
            server.resume_accepting()
        # The drain may have been stopped halfway: old keys must not outlive it, nobody would serve their subjects.
        await self._give_lease_back(RESUME_TIMEOUT_S)
        await self._lease.reinstate(RESUME_TIMEOUT_S)
        self._lease_gone, self._registered = False, True
        self._entry.touch(resumed=True)
        self._follow_lease()
        self._draining.clear()
        await self._context.resume()

    # --- what others may ask -------------------------------------------------------------------

    def _load(self) -> Load:
        source = self._context.load_source if self._context is not None else None
        return source() if source is not None else Load(request_active_slots=self._streams())

    def _streams(self) -> int:
        return sum(server.in_flight for server in self._servers)

    async def _load_metrics(self, _request: Any) -> dict[str, Any]:
        load = self._load()
        return {name: getattr(load, name) for name in Load.__slots__}

    async def _op_status(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        return self._status()

    async def _op_drain(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._drain.begin(str(args.get("reason") or "asked to by a message"))
        return self._status()

    async def _op_cancel_drain(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.cancel()
        return self._status()

    def _status(self) -> dict[str, Any]:
        """`requests` are at most 100 of the `in_flight`; `pulled` of them came out of a queue. None is "unknown"."""
        identity, context = self.identity, self._context
        requests = [request_id for server in self._servers for request_id in server.in_flight_ids()]
        work, load = Work(), None
        if context is not None:
            work = context.work_source()
            requests += work.requests
            with contextlib.suppress(DynamoError):  # what is behind the component does not answer: nobody knows
                load = context.load_source() if context.load_source is not None else None
        return {
            "state": str(self._drain.phase),
            "reason": self._drain.reason,
            "waiting_for": self._waiting_for if self._drain.phase is Phase.STARTING else None,
            "watcher_name": identity.watcher_name,
            "component": identity.component,
            "run_id": identity.run_id,
            "pid": os.getpid(),
            "lease": self._held_lease(),
            "in_flight": len(requests) + work.unnamed,
            "requests": requests[:SHOWN_REQUESTS],
            "pulled": work.pulled,
            "remaining_tokens": None if load is None else load.remaining_tokens,
            "itl_ms": None if load is None else load.itl_ms,
        }

    def _held_lease(self) -> str | None:
        """In hex; None before it is granted, and once it was given back."""
        lease = self._lease
        return None if lease is None or not lease.lease_id or self._lease_gone else lease_hex(lease.lease_id)

    def _truth(self) -> Entry:
        lease = self._held_lease()
        context = self._context
        return Entry(
            pid=os.getpid(),
            lease=lease,
            endpoints=tuple(self._endpoint_keys(int(lease, 16))) if lease is not None and self._registered else (),
            draining=self._drain.reason if self._drain.phase is Phase.DRAINING and not self._registered else None,
            frontend_url=None if context is None else context.facts.get("frontend_url"),
        )


def lease_key(namespace: str, watcher_name: str, lease: int) -> str:
    """`dynamo/leases/dynamo_VllmWorker:694d967da694ea1a`: there from the grant of the lease to its end."""
    return f"{namespace}/leases/{watcher_name}:{lease_hex(lease)}"


def ready_key(namespace: str, watcher_name: str, lease: int) -> str:
    """`dynamo/workers/dynamo_VllmWorker:694d967da694ea1a`: the worker is ready, all its endpoints are registered."""
    return f"{namespace}/workers/{watcher_name}:{lease_hex(lease)}"


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


async def _call_hook(instance: Any, hook: str) -> None:
    result = getattr(instance, hook)()
    if asyncio.iscoroutine(result):
        await result


async def _bounded(what: str, work: Awaitable[None], timeout_s: float) -> None:
    """The process is going: what fails or takes too long is logged, and left behind."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        log.error("%s took more than %g s; left behind", what, timeout_s)
    except DynamoError as error:
        log.warning("%s: %s", what, error)
    except Exception:  # the component's code, or a connection that is gone
        log.exception("%s failed", what)

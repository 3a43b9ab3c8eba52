"""One worker process, from its start to its exit.

connect -> serve the control endpoint -> grant a lease (`registration`) -> make the component, run its start hooks
-> wait for what it depends on -> serve its endpoints on NATS (`endpoints`) -> register them in etcd -> ready
-> (SIGTERM, the lease is revoked, or a message) drain (`drain`); it can be taken back -> shut down -> exit 0

Asked to leave while it starts, it leaves at once. When something vital fails, its engine first of all, it ends
at once with exit code 1: whoever supervises it decides what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Mapping
from typing import Any

from dynamo_local.core.types import Load, lease_hex
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, DynamoError, LeaseNotFound, NotSleepable, StartTimedOut
from dynamo_local.runtime.load import LoadPublisher
from dynamo_local.runtime.requests import DependencyClient
from dynamo_local.sdk import dynamo_context
from dynamo_local.sdk.context import EngineSleeper, set_current_context
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import load_settings
from dynamo_local.state import StateStore
from dynamo_local.worker.context import Connections, Context, Identity, run_all
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.endpoints import Endpoints
from dynamo_local.worker.registration import Registration
from dynamo_local.worker.sleeping import Sleeping
from dynamo_local.worker.standby_facts import standby_facts
from dynamo_local.worker.startup import connect, dependency_clients, dynamo_context_of
from dynamo_local.worker.statefile_entry import Entry, EntryWriter
from dynamo_local.worker.status import worker_status

log = logging.getLogger("dynamo_local.worker")

ENTRY_TIMEOUT_S = 2.0
HOOKS_TIMEOUT_S = 30.0
"""Bound of the component's shutdown hooks after a drain, and of closing what we opened."""
HURRIED_TIMEOUT_S = 5.0
"""The same where the worker was asked to leave, or failed, before it was ready."""
LAST_REVOKE_S = 0.5
"""When the engine has died: deregister if etcd answers this fast; the process ends in any case."""


class WorkerProcess:
    """The one worker of this process. `hurried`: it must end without waiting for its threads."""

    def __init__(self, graph: LoadedGraph, service: DynamoService[Any], identity: Identity) -> None:
        self.graph = graph
        self.service = service
        self.identity = identity
        self.hurried = False
        self._settings = load_settings(service)
        self._waiting_for = "starting"
        self._draining = asyncio.Event()
        self._drain: Drain = None  # type: ignore[assignment]  # made by `run`: it belongs to its loop
        self._sleeping: Sleeping = None  # type: ignore[assignment]
        self._failed: asyncio.Future[BaseException] = None  # type: ignore[assignment]
        store = StateStore(identity.statefile, run_id=identity.run_id)
        self._entry = EntryWriter(store, identity.watcher_name, self._truth)
        self._stack = contextlib.AsyncExitStack()
        self._endpoints = Endpoints(identity)
        self._registration = Registration(
            identity,
            self._endpoints,
            facts=self._facts,
            on_change=self._entry.touch,
            on_revoked=lambda: self._drain.begin("its lease was revoked"),
            serves=lambda: self._drain.phase is Phase.READY,
        )
        self._context: Context | None = None
        self._component: Any = None

    # --- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Live, and return the exit code. Raises what the start failed with, after everything was closed."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        self._drain = Drain(self)
        self._sleeping = Sleeping(self._drain, self, self._fail)
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
        if isinstance(error, LeaseNotFound) and self._registration.revoked:
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
        """The engine is dead, so nothing can be finished: deregister and end. Callers see their streams break."""
        self.hurried = True
        await self._drain.close()
        await self._sleeping.close()
        why = f"{type(self._failed.result()).__name__}: {self._failed.result()}"
        if self._registration.lease is not None:
            # If this fails, the arbiter or the guardian revokes the lease.
            await _bounded(
                "giving the lease back", self._registration.give_back_failed(LAST_REVOKE_S, why), LAST_REVOKE_S
            )

    async def _shut_down(self) -> None:
        timeout_s = HURRIED_TIMEOUT_S if self.hurried else HOOKS_TIMEOUT_S
        await self._drain.close()
        await self._sleeping.close()
        if self._component is not None:
            for hook in self.service.on_shutdown:
                await _bounded(f"the shutdown hook {hook}", _call_hook(self._component, hook), timeout_s)
        if self._registration.holds_lease:
            await _bounded("giving the lease back", self._registration.give_back(LAST_REVOKE_S), 2 * LAST_REVOKE_S)
        self._entry.touch()
        await self._entry.flush(ENTRY_TIMEOUT_S)
        await self._entry.close()
        await _bounded("closing the connections", self._stack.aclose(), timeout_s)

    # --- starting ------------------------------------------------------------------------------

    async def _start(self) -> None:
        connections = await connect(
            self.identity,
            self._stack,
            self._registration,
            {
                "status": self._op_status,
                "drain": self._op_drain,
                "cancel_drain": self._op_cancel_drain,
                "sleep": self._op_sleep,
                "wake": self._op_wake,
            },
            is_draining=self._is_draining,
            on_nats_closed=self._nats_closed,
            waiting_for=self._wait_for,
        )
        self._context = context = self._make_context(connections)
        clients = dependency_clients(self.graph, self.service, self.identity, connections)
        self._component = self.service.create(clients)
        self._wait_for(f"{self.service.name}'s start hooks")
        for hook in self.service.on_start:
            await getattr(self._component, hook)()
        await self._wait_for_dependencies(clients)
        self._wait_for("its registration")
        await self._serve(context)
        await self._registration.register_endpoints()
        await context.register_waiting_keys()
        await self._registration.register_ready(lambda: self._entry.flush(ENTRY_TIMEOUT_S))
        endpoints = ", ".join(self.service.endpoints) or "none"
        log.info("ready: lease %s, endpoints %s", lease_hex(context.lease_id), endpoints)

    def _wait_for(self, what: str) -> None:
        self._waiting_for = what

    def _make_context(self, connections: Connections) -> Context:
        context = Context(
            self.identity,
            connections,
            self._settings,
            draining=self._draining,
            stack=self._stack,
            on_fatal=self._fail,
            on_facts=self._entry.touch,
            on_wait=self._wait_for,
        )
        set_current_context(context)
        dynamo_context.update(dynamo_context_of(context, self.service, connections))
        return context

    async def _wait_for_dependencies(self, clients: Mapping[str, DependencyClient | None]) -> None:
        for attribute, client in clients.items():
            if client is not None and not self.service.depends[attribute].optional:
                self._wait_for(f"a worker of {client.component}")
                await client.wait_ready(self.identity.start_deadline_s)

    async def _serve(self, context: Context) -> None:
        """Take requests on NATS before registering: whoever sees the key may send at once."""
        await self._endpoints.serve(context, self.service, self._component, self._load)
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
        await context.answer_planners()

    async def _nats_closed(self) -> None:
        """The client ended for good (the server disconnected us): no request reaches us any more, so leave."""
        self._drain.begin("the connection to NATS was ended for good")

    async def _is_draining(self) -> bool:
        return self._drain.phase in (Phase.DRAINING, Phase.LEAVING) or await self._entry.drains()

    # --- draining, and taking it back (drain.DrainSteps) -------------------------------------------

    async def deregister(self) -> None:
        await self._registration.deregister()

    def stop_accepting(self, linger_s: float) -> None:
        self._draining.set()
        self._endpoints.stop_accepting(linger_s)

    async def finish(self) -> None:
        assert self._context is not None
        await run_all("the drain", [*self._context.drain_callbacks(), *self._endpoints.until_idle()])

    async def end_standby(self) -> None:
        await self._sleeping.close()

    async def resume(self) -> None:
        """Accept, then register under a new lease, then let the component go on, if it had been told to stop."""
        assert self._context is not None
        self._endpoints.resume_accepting()
        await self._registration.restore()
        await self._go_on(self._context)

    async def _go_on(self, context: Context) -> None:
        if self._draining.is_set():  # not where the drain was taken back while it still deregistered
            self._draining.clear()
            await context.resume()

    # --- sleeping, and waking (sleeping.StandbySteps) ----------------------------------------------

    async def withdraw(self) -> None:
        await self._registration.withdraw()

    async def sleep_engine(self, level: int) -> None:
        await self._standby().sleep(level)

    async def wake_engine(self) -> None:
        await self._standby().wake()

    async def come_back(self) -> None:
        assert self._context is not None
        self._endpoints.resume_accepting()
        await self._registration.come_back()
        await self._go_on(self._context)

    async def tell(self) -> None:
        await self._registration.tell()

    def _standby(self) -> EngineSleeper:
        sleeper = None if self._context is None else self._context.sleeper
        if sleeper is None or sleeper.cannot is not None:
            why = "its component has no engine that can" if sleeper is None else sleeper.cannot
            raise NotSleepable(f"this worker cannot sleep: {why}")
        return sleeper

    def _facts(self) -> dict[str, Any]:
        context = self._context
        return {} if context is None else {**context.facts, **standby_facts(self.identity, context, self._sleeping)}

    # --- what others may ask -------------------------------------------------------------------

    def _load(self) -> Load:
        source = self._context.load_source if self._context is not None else None
        return source() if source is not None else Load(request_active_slots=self._endpoints.in_flight)

    async def _op_status(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        return self._status()

    async def _op_drain(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._drain.begin(str(args.get("reason") or "asked to by a message"))
        return self._status()

    async def _op_cancel_drain(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.cancel()
        return self._status()

    async def _op_sleep(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._standby()
        self._sleeping.sleep(int(args["order"]), int(args["level"]))
        return self._status()

    async def _op_wake(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._sleeping.wake(int(args["order"]))
        return self._status()

    def _status(self) -> dict[str, Any]:
        return worker_status(
            self.identity,
            self._drain,
            self._endpoints,
            self._context,
            lease=self._registration.held_lease(),
            waiting=self._waiting_for,
        )

    def _truth(self) -> Entry:
        """What the statefile should say of this worker now."""
        registration, context = self._registration, self._context
        return Entry(
            pid=os.getpid(),
            lease=registration.held_lease(),
            endpoints=registration.endpoint_keys(),
            draining=self._drain.reason if self._drain.phase is Phase.DRAINING and not registration.ready else None,
            frontend_url=None if context is None else context.facts.get("frontend_url"),
        )


async def _call_hook(component: Any, hook: str) -> None:
    result = getattr(component, hook)()
    if asyncio.iscoroutine(result):
        await result


async def _bounded(what: str, work: Awaitable[None], timeout_s: float) -> None:
    """Await `work`, bounded. The process is ending, so failures and timeouts are only logged."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        log.error("%s took more than %g s; left behind", what, timeout_s)
    except DynamoError as error:
        log.warning("%s: %s", what, error)
    except Exception:  # the component's code, or a connection that is gone
        log.exception("%s failed", what)

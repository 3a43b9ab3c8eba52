"""One worker process, from its start to its exit.

1. Connect, and serve the control endpoint.
2. Grant a lease (`registration`).
3. Make the component, and run its start hooks.
4. Wait for its dependencies.
5. Serve its endpoints on NATS, and register them in etcd: the worker is ready.
6. Drain on SIGTERM, a revoked lease or a message (`drain`). A drain can be cancelled.
7. Shut down, and exit with 0.

The component that it serves is its role (`served_role`). A flip changes the role of a running process (`flip`).

A worker that is told to leave during its start leaves at once. If a vital part fails, such as the engine, the worker
ends at once with exit code 1, and its supervisor decides what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import (
    EXIT_FAILED,
    EXIT_OK,
    DynamoError,
    LeaseNotFound,
    NotSleepable,
    StartTimedOut,
    StateError,
)
from dynamo_local.sdk.context import EngineSleeper
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.state.schema import State
from dynamo_local.state.store import StateStore
from dynamo_local.system import collector, start_stages, tracing
from dynamo_local.system.executors import ended
from dynamo_local.worker.context import Identity, connect, run_all
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.flip import Flipping
from dynamo_local.worker.served_role import RoleHost, ServedRole
from dynamo_local.worker.sleep import Sleeping, standby_facts

# The part of a statefile entry that the worker itself writes: pid, lease, endpoints, and whether it drains.
#
# The entry is for people, and for the arbiter's successor. Nothing waits for it: a slow or full disk must neither
# keep a worker in routing nor out of it. Each commit writes the state of its own moment, so one commit covers any
# number
# of changes, and the next one makes up for a failed one.

log = logging.getLogger("dynamo_local.worker")

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """The worker's own status. `lease`: hex, or None. `draining`: the reason of the drain."""

    pid: int
    lease: str | None
    endpoints: tuple[str, ...]
    draining: str | None
    frontend_url: str | None

    def write(self, state: State, watcher_name: str, *, resumed: bool) -> None:
        """Write it into the worker's entry, if there is one. States that only the arbiter can know are left alone.

        `resumed`: it was draining and has registered again, so `draining` is out of date. Without that it stays: the
        arbiter commits a drain before we hear of it.
        """
        if self.frontend_url is not None:
            state.frontend_url = self.frontend_url
        entry = state.components.get(watcher_name)
        if entry is None or TRAITS[entry.state].gone or entry.pid not in (None, self.pid):
            return  # the entry that its component has kept, or another worker's: its own has another name
        entry.endpoints = []  # first: endpoints under another lease would be invalid
        entry.pid, entry.lease = self.pid, self.lease
        entry.endpoints = list(self.endpoints)
        if self.draining is not None and entry.state in (WorkerState.STARTING, WorkerState.READY):
            entry.state, entry.reason = WorkerState.DRAINING, self.draining
        elif resumed and entry.state is WorkerState.DRAINING:
            entry.state, entry.reason = WorkerState.READY, None


class EntryWriter:
    """Updates the statefile in the background; `truth` gives the entry at each commit."""

    def __init__(self, store: StateStore, watcher_name: str, truth: Callable[[], Entry]) -> None:
        self._store = store
        self._watcher_name = watcher_name
        self._truth = truth
        self._dirty = asyncio.Event()
        self._clean = asyncio.Event()
        self._clean.set()
        self._resumed = False
        self._task: asyncio.Task[None] | None = None

    def touch(self, *, resumed: bool | None = None) -> None:
        """Something changed. `resumed` says (True) or takes back (False) that the worker registered again."""
        if resumed is not None:
            self._resumed = resumed
        self._dirty.set()
        self._clean.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="statefile entry")

    def renamed(self, watcher_name: str) -> None:
        """Its entry has another name from now on."""
        self._watcher_name = watcher_name
        self.touch()

    async def flush(self, timeout_s: float) -> bool:
        """Whether all changes so far were written within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._clean.wait()
        except TimeoutError:
            log.warning("the statefile was not up to date within %g s; going on", timeout_s)
            return False
        return True

    async def close(self) -> None:
        """Stop writing. A commit that is under way in its thread ends by itself."""
        await ended(self._task)

    async def drains(self) -> bool:
        """Whether the file says that this worker drains; False if it cannot be read."""
        try:
            state = await asyncio.to_thread(self._store.read)
        except StateError as error:
            log.warning("cannot tell from the statefile whether this worker drains: %s", error)
            return False
        entry = state.components.get(self._watcher_name)
        return entry is not None and entry.state is WorkerState.DRAINING

    async def _run(self) -> None:
        failing = False
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            resumed, self._resumed = self._resumed, False
            try:
                change = partial(self._truth().write, watcher_name=self._watcher_name, resumed=resumed)
                await self._store.aupdate(change)
            except StateError as error:
                if not failing:
                    log.warning("the statefile was not updated, trying again every %g s: %s", RETRY_S, error)
                failing = True
                self._resumed = self._resumed or (resumed and not self._truth().draining)
                self._dirty.set()
                await asyncio.sleep(RETRY_S)
                continue
            if failing:
                log.info("the statefile is up to date again")
            failing = False
            if not self._dirty.is_set():
                self._clean.set()


# The answer to `status` on the control endpoint

SHOWN_REQUESTS = 100


def worker_status(role: ServedRole, former: Iterable[ServedRole], drain: Drain, *, waiting: str) -> dict[str, Any]:
    """`requests` are at most 100 of the `in_flight`; `pulled` of them came out of a queue. None is "unknown".

    Those of its `former` roles, which are still finished, are among them. `waiting` says what a worker that still
    starts waits for.
    """
    work = [each.work() for each in (role, *former)]
    requests = [request for each in work for request in each.requests]
    load, identity = role.load_or_none(), role.identity
    return {
        "state": str(drain.phase),
        "reason": drain.reason,
        "waiting_for": waiting if drain.phase is Phase.STARTING else None,
        "watcher_name": identity.watcher_name,
        "component": identity.component,
        "run_id": identity.run_id,
        "pid": os.getpid(),
        "lease": role.registration.held_lease(),
        "in_flight": len(requests) + sum(each.unnamed for each in work),
        "requests": requests[:SHOWN_REQUESTS],
        "pulled": sum(each.pulled for each in work),
        "remaining_tokens": None if load is None else load.remaining_tokens,
        "itl_ms": None if load is None else load.itl_ms,
    }


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
        self._waiting_for = "starting"
        self._drain: Drain = None  # type: ignore[assignment]  # made by `run`: it belongs to its loop
        self._sleeping: Sleeping = None  # type: ignore[assignment]
        self._failed: asyncio.Future[BaseException] = None  # type: ignore[assignment]
        store = StateStore(identity.statefile, run_id=identity.run_id)
        self._entry = EntryWriter(store, identity.watcher_name, self._truth)
        self._stack = contextlib.AsyncExitStack()
        self._kept = contextlib.AsyncExitStack()
        self._operations = {
            "status": self._op_status,
            "drain": self._op_drain,
            "cancel_drain": self._op_cancel_drain,
            "flip": self._op_flip,
            "cancel_flip": self._op_cancel_flip,
            "sleep": self._op_sleep,
            "wake": self._op_wake,
        }
        host = RoleHost(
            graph,
            self._operations,
            self._kept,
            facts=self._facts,
            on_fatal=self._fail,
            on_wait=self._wait_for,
            on_change=self._entry.touch,
            on_revoked=self._revoked,
            serves=lambda role: role is self._role and self._drain.phase is Phase.READY,
            is_draining=self._is_draining,
        )
        self._roles = Flipping(
            host,
            ServedRole(host, service, identity, {}),
            on_switched=self._switched,
            flush=self._entry.flush,
            refusal=self._no_flip_now,
            bounded=_bounded,
        )

    @property
    def _role(self) -> ServedRole:
        """The current role. A flip changes it."""
        return self._roles.role

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
                with collector.serving():
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
        if isinstance(error, LeaseNotFound) and self._role.registration.revoked:
            self._drain.found = False  # nobody finds it any more
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
            told = isinstance(error, DynamoError) and error.__cause__ is None  # its text says all
            log.critical("%s failed, so this worker ends: %s", what, error, exc_info=None if told else error)
            self._failed.set_result(error)

    async def _give_up(self) -> None:
        """The engine is dead, so nothing can be finished: deregister and end. Callers see their streams break."""
        self.hurried = True
        await self._drain.close()
        await self._sleeping.close()
        why = f"{type(self._failed.result()).__name__}: {self._failed.result()}"
        if self._role.registration.lease is not None:
            # If this fails, the arbiter or the guardian revokes the lease.
            await _bounded(
                "giving the lease back", self._role.registration.give_back_failed(LAST_REVOKE_S, why), LAST_REVOKE_S
            )

    async def _shut_down(self) -> None:
        timeout_s = HURRIED_TIMEOUT_S if self.hurried else HOOKS_TIMEOUT_S
        await self._drain.close()
        await self._sleeping.close()
        await _bounded("ending former roles", self._roles.close(), timeout_s)
        for role in (self._role, *self._roles.former):
            await role.run_hooks(lambda what, work: _bounded(what, work, timeout_s))
        await _bounded("closing what the components kept", self._kept.aclose(), timeout_s)
        if self._role.registration.holds_lease:
            await _bounded("giving the lease back", self._role.registration.give_back(LAST_REVOKE_S), 2 * LAST_REVOKE_S)
        self._entry.touch()
        await self._entry.flush(ENTRY_TIMEOUT_S)
        await self._entry.close()
        for role in (*self._roles.former, self._role):
            await _bounded("closing the component", role.close(), timeout_s)
        await _bounded("closing the connections", self._stack.aclose(), timeout_s)

    # --- starting ------------------------------------------------------------------------------

    async def _start(self) -> None:
        role = self._role
        connections = await connect(
            self.identity,
            self._stack,
            role.answer,
            on_nats_closed=self._nats_closed,
            waiting_for=self._wait_for,
        )
        start_stages.passed("connections")
        self._roles.connected(connections)
        await role.take_lease(connections)
        waited = await role.begin(connections)
        start_stages.passed("start hooks")
        for client in waited:
            self._wait_for(f"a worker of {client.component}")
            await client.wait_ready(self.identity.start_deadline_s)
        start_stages.passed("dependencies")
        self._wait_for("its registration")
        await role.serve()
        self._drain.found = True
        await role.register()
        await role.register_ready(lambda: self._entry.flush(ENTRY_TIMEOUT_S))
        start_stages.passed("registration")
        log.info("the start took %s", start_stages.describe())

    def _wait_for(self, what: str) -> None:
        self._waiting_for = what

    async def _nats_closed(self) -> None:
        """The client ended for good (the server disconnected us): no request reaches us any more, so leave."""
        self._drain.begin("the connection to NATS was ended for good")

    async def _is_draining(self) -> bool:
        return self._drain.phase in (Phase.DRAINING, Phase.LEAVING) or await self._entry.drains()

    # --- draining, and taking it back (drain.DrainSteps) -------------------------------------------

    def unfollow_lease(self) -> None:
        self._role.registration.unfollow()

    async def deregister(self) -> None:
        await self._roles.abort()
        await self._role.registration.deregister()

    def stop_accepting(self, linger_s: float) -> None:
        self._role.draining.set()
        self._role.endpoints.stop_accepting(linger_s)

    async def finish(self) -> None:
        await run_all("the drain", [*self._role.until_finished(), self._roles.finish])
        await self._role.until_reported()

    async def end_standby(self) -> None:
        await self._sleeping.close()

    async def resume(self) -> None:
        """Accept, then register under a new lease, then let the component go on, if it had been told to stop."""
        role = self._role
        role.endpoints.resume_accepting()
        await role.registration.restore()
        await role.go_on()

    # --- sleeping, and waking (sleep.StandbySteps) -------------------------------------------------

    async def withdraw(self) -> None:
        await self._role.registration.withdraw()

    async def sleep_engine(self, level: int) -> None:
        await self._standby().sleep(level)

    async def wake_engine(self) -> None:
        await self._standby().wake()

    async def come_back(self) -> None:
        role = self._role
        role.endpoints.resume_accepting()
        await role.registration.come_back()
        await role.go_on()

    async def tell(self) -> None:
        await self._role.registration.tell()

    def _standby(self) -> EngineSleeper:
        context = self._role.context
        sleeper = None if context is None else context.sleeper
        if sleeper is None or sleeper.cannot is not None:
            why = "its component has no engine that can" if sleeper is None else sleeper.cannot
            raise NotSleepable(f"this worker cannot sleep: {why}")
        return sleeper

    def _facts(self, role: ServedRole) -> dict[str, Any]:
        context = role.context
        return {} if context is None else {**context.facts, **standby_facts(role.identity, context, self._sleeping)}

    # --- changing its role -----------------------------------------------------------------------

    def _no_flip_now(self) -> str | None:
        return None if self._drain.phase is Phase.READY else f"it is {self._drain.phase}: {self._drain.reason}"

    def _revoked(self, role: ServedRole) -> None:
        if role is self._role:  # a former one's is given back by us, one that comes up fails
            self._drain.begin("its lease was revoked")

    def _switched(self, role: ServedRole) -> None:
        self.identity, self.service = role.identity, role.service
        tracing.renamed(role.identity.component, role.identity.watcher_name)
        self._entry.renamed(role.identity.watcher_name)

    async def _op_flip(self, args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.start_ended()  # the arbiter may have seen its ready key before that
        return await self._roles.flip(args)

    async def _op_cancel_flip(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self._roles.cancel()
        return self._status()

    # --- what others may ask -------------------------------------------------------------------

    async def _op_status(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        return self._status()

    async def _op_drain(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._drain.begin(str(args.get("reason") or "asked to by a message"))
        return self._status()

    async def _op_cancel_drain(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.cancel()
        return self._status()

    async def _op_sleep(self, args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.start_ended()
        self._standby()
        if self._roles.under_way:
            raise NotSleepable("it changes its role at this moment")
        self._sleeping.sleep(int(args["order"]), int(args["level"]))
        return self._status()

    async def _op_wake(self, args: Mapping[str, Any]) -> dict[str, Any]:
        await self._drain.start_ended()
        self._sleeping.wake(int(args["order"]))
        return self._status()

    def _status(self) -> dict[str, Any]:
        return worker_status(self._role, self._roles.former, self._drain, waiting=self._waiting_for)

    def _truth(self) -> Entry:
        """The worker's own part of its statefile entry, as it is now."""
        registration, context = self._role.registration, self._role.context
        return Entry(
            pid=os.getpid(),
            lease=registration.held_lease(),
            endpoints=registration.endpoint_keys(),
            draining=self._drain.reason if self._drain.phase is Phase.DRAINING and not registration.ready else None,
            frontend_url=None if context is None else context.facts.get("frontend_url"),
        )


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

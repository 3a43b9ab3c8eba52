"""A worker process changes its role: out of decode routing and into the prefill queue, or the other way round.

    begin the new role beside the old one (its own lease, name and endpoints; the engine is the same)
    -> try it out -> register it: the point of no return -> the old role is given up: deregistered, its stragglers
    served for a moment, later ones refused (they go to another worker), what it had taken finished.

Before the point of no return, any failure undoes everything, and the old role goes on. After it, the flip has happened.

An engine that can change only while idle (`sdk.context.FlipsIdle`) serves no request meanwhile. Its old role leaves
routing and finishes before the new one begins. If the flip is undone, the old role returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.errors import (
    DynamoError,
    EtcdUnavailable,
    FlipFailed,
    FlipNotCancellable,
    FlipUnderWay,
    InvalidRequest,
    LeaseNotFound,
    NotFlippable,
)
from dynamo_local.sdk.context import FORMER_INSTANCE, Flippable, FlipsIdle
from dynamo_local.system.executors import together
from dynamo_local.system.start_stages import Stages
from dynamo_local.worker.context import Connections, run_all
from dynamo_local.worker.drain import DEREGISTER_PATIENCE_S, LINGER_S
from dynamo_local.worker.served_role import RoleHost, ServedRole

log = logging.getLogger("dynamo_local.worker")

FLIP_DEADLINE_S = 10.0
"""A flip takes some 100 ms. A canary that waits for a prefill makes it longer, or a slow etcd."""
REFUSED_S = 1.0
"""So long the old role's endpoints refuse what still comes, after the last straggler; then nobody is there any more."""
UNDO_TIMEOUT_S = 5.0
RETRY_S = 0.2
ENTRY_TIMEOUT_S = 0.5

Bounded = Callable[[str, Awaitable[None], float], Awaitable[None]]


class Flipping:
    """The roles of one process: `role` is the one of now, `former` are those that still finish something.

    `on_switched` is called when the role has changed. `flush` returns when the statefile's entry is up to date, or a
    bound has passed. `refusal` says why nothing can be changed now (the worker drains); `bounded` awaits what may fail
    while it is given up.
    """

    def __init__(
        self,
        host: RoleHost,
        role: ServedRole,
        *,
        on_switched: Callable[[ServedRole], None],
        flush: Callable[[float], Awaitable[object]],
        refusal: Callable[[], str | None],
        bounded: Bounded,
    ) -> None:
        self.role = role
        self.former: list[ServedRole] = []
        self._host = host
        self._on_switched = on_switched
        self._flush = flush
        self._refusal = refusal
        self._bounded = bounded
        self._connections: Connections | None = None
        self._task: asyncio.Task[None] | None = None
        self._to = ""
        self._past = False
        self._why = ""
        self._retiring: dict[asyncio.Task[None], ServedRole] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def connected(self, connections: Connections) -> None:
        """With what later roles are made."""
        self._connections = connections

    @property
    def under_way(self) -> bool:
        """It changes its role at this moment."""
        return self._task is not None and not self._task.done()

    # --- what the arbiter asks -----------------------------------------------------------------------

    async def flip(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """`{"pid", "watcher_name", "lease", "endpoints"}` once it is `to`, in `component`; also if it has been.

        Raises `FlipFailed`, `NotFlippable`, `FlipUnderWay` (to something else) or `InvalidRequest`.
        """
        to, component, section = args.get("to"), args.get("component"), args.get("section")
        if args.get("pid") != os.getpid() or not isinstance(to, str) or not isinstance(component, str):
            raise InvalidRequest("a flip names the pid, the component, and the new name", param="args")
        while self.under_way and self._to != to:
            if not self._past or self._task is None:
                raise FlipUnderWay(f"it becomes {self._to} at this moment")
            # Its new ready key may have been seen, by which it is what it was to become: in a moment it knows itself.
            await asyncio.wait({self._task})
        if not self.under_way and self.role.identity.watcher_name != to:
            self._to, self._past, self._why = to, False, ""
            self._task = asyncio.create_task(self._flip(to, component, section), name=f"flip to {to}")
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self._task is not None and self._to == to:
            await self._outcome(self._task)
        registration = self.role.registration
        return {
            "pid": os.getpid(),
            "watcher_name": self.role.identity.watcher_name,
            "lease": registration.held_lease(),
            "endpoints": list(registration.endpoint_keys()),
        }

    async def _outcome(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait({task})  # a caller that gives up must not leave the worker between two roles
        if task.cancelled():
            raise FlipFailed(self._why or "it was taken back")
        if (error := task.exception()) is not None:
            raise error

    async def cancel(self, why: str = "it was taken back") -> None:
        """Have it stay what it is; returns when it is. Nothing where it does not flip. Raises `FlipNotCancellable`."""
        task = self._task
        if task is None or task.done():
            return
        if not self._past:
            self._why = self._why or why
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            raise FlipNotCancellable(f"it is {self.role.identity.watcher_name} already")

    # --- the flip --------------------------------------------------------------------------------

    async def _flip(self, to: str, component: str, section: Mapping[str, Any] | None) -> None:
        if (why := self._refusal()) is not None:
            raise FlipFailed(why)
        old, connections = self.role, self._connections
        service = self._host.graph.services.get(component)
        if service is None or old.identity.flips_to != component or connections is None:
            raise NotFlippable(f"this process was not made to become one of {component}")
        if not isinstance(old.component, Flippable) or old.context is None:
            raise NotFlippable(f"{old.service.name}: its class cannot hand its engine over (`sdk.context.Flippable`)")
        log.info("becomes %s", to)
        identity = replace(old.identity, component=component, watcher_name=to, flips_to=old.service.name)
        inherited = {
            FORMER_INSTANCE: old.context.lease_id,
            **old.context.handed_on(),
            **old.component.hand_over(),
        }
        new = ServedRole(self._host, service, identity, inherited, section)
        old.draining.set()  # it pulls nothing more
        idle_first = isinstance(old.component, FlipsIdle)
        stages = Stages()
        try:
            # One that waits for its streams, and then builds its engine anew in parts, has as long as a start.
            async with asyncio.timeout(identity.start_deadline_s if idle_first else FLIP_DEADLINE_S):
                if isinstance(old.component, FlipsIdle):
                    await self._fall_idle(old, old.component)
                    stages.passed("idle")
                await self._come_up(new, connections, stages)
                await new.register()
                stages.passed("keys")
            self._past = True
            await self._say_so(new)
            stages.passed("ready key")
        except BaseException as error:
            self._past = False
            await _to_its_end(self._undo(old, new))
            if isinstance(error, asyncio.CancelledError):
                raise
            foreseen = isinstance(error, DynamoError | TimeoutError)
            log.warning("stays %s: %s", old.identity.watcher_name, error, exc_info=not foreseen)
            raise FlipFailed(f"{type(error).__name__}: {error}") from error
        self._switch(old, new)
        log.info("became %s in %s", to, stages.describe(3))

    async def _fall_idle(self, old: ServedRole, component: FlipsIdle) -> None:
        """Out of routing, its lease kept; what it has taken is finished. Raises as `Registration.withdraw`."""
        await old.registration.withdraw()
        old.endpoints.stop_accepting(LINGER_S)
        await asyncio.sleep(LINGER_S)  # who has not heard of it yet is served
        await run_all("the flip", old.endpoints.until_idle())
        await component.until_idle()

    async def _come_up(self, new: ServedRole, connections: Connections, stages: Stages) -> None:
        await together(new.answer(connections.nats), new.take_lease(connections))
        stages.passed("lease")
        await new.begin(connections)
        stages.passed("start hooks")
        await together(new.serve(), new.component.try_out())  # nobody knows the endpoints before they are registered
        stages.passed("endpoints and try-out")

    async def _say_so(self, new: ServedRole) -> None:
        """Put the key by which the arbiter sees it. With etcd away it may have been put, and seen: there is no way back
        any more, and it is tried until it is there. Raises `LeaseNotFound`: somebody has revoked the new lease, and
        the key is gone with it. An arbiter that has seen it revokes the old lease, too: the worker leaves then."""
        while True:
            try:
                return await new.register_ready(lambda: self._flush(ENTRY_TIMEOUT_S))
            except EtcdUnavailable as error:
                log.warning("cannot say yet that it is %s, trying again: %s", new.identity.watcher_name, error)

    def _switch(self, old: ServedRole, new: ServedRole) -> None:
        assert new.context is not None
        new.context.take_over()
        self.role = new
        self.former.append(old)
        self._on_switched(new)
        old.hush()
        task = asyncio.create_task(self._give_up(old), name=f"end of the role {old.service.name}")
        self._retiring[task] = old
        task.add_done_callback(self._given_up)

    async def _undo(self, old: ServedRole, new: ServedRole) -> None:
        """The old role goes on; of the new one nothing is left, and what it has pulled goes back to the queue."""
        old.be_current()
        if new.registration.holds_lease:
            await self._bounded("giving the lease back", new.registration.give_back(UNDO_TIMEOUT_S), UNDO_TIMEOUT_S)
        await new.run_hooks(lambda what, work: self._bounded(what, work, UNDO_TIMEOUT_S))
        await self._bounded("closing the new role", new.close(), UNDO_TIMEOUT_S)
        if self._refusal() is None:
            if isinstance(old.component, FlipsIdle):
                await self._route_again(old, old.component)
            old.draining.clear()
            if old.context is not None:
                await old.context.resume()

    async def _route_again(self, old: ServedRole, component: FlipsIdle) -> None:
        """Tried for as long as etcd is away: the worker must not be half out of routing."""
        await component.go_back()
        old.endpoints.resume_accepting()
        while self._refusal() is None:
            try:
                return await old.registration.come_back()
            except EtcdUnavailable as error:
                log.warning("cannot be found yet in its old role, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
            except LeaseNotFound as error:  # it was revoked: what follows is the drain's
                log.info("is not found any more in its old role: %s", error)
                return

    # --- the old role's end ------------------------------------------------------------------------

    async def _give_up(self, old: ServedRole) -> None:
        deregistering = asyncio.create_task(old.registration.deregister(), name="deregister the old role")
        await asyncio.wait({deregistering}, timeout=DEREGISTER_PATIENCE_S)
        old.endpoints.stop_accepting(LINGER_S if deregistering.done() else 0.0)
        await old.fall_silent()
        await asyncio.gather(asyncio.sleep(LINGER_S), old.component.settle())
        await run_all("the end of the old role", old.endpoints.until_idle())
        await deregistering
        await asyncio.sleep(REFUSED_S)

    def _given_up(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
        closing = asyncio.create_task(self._close(self._retiring.pop(task)), name="closing an old role")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, old: ServedRole) -> None:
        await old.run_hooks(lambda what, work: self._bounded(what, work, UNDO_TIMEOUT_S))
        await self._bounded("closing an old role", old.close(), UNDO_TIMEOUT_S)
        with contextlib.suppress(ValueError):
            self.former.remove(old)
        log.info("%s is over", old.identity.watcher_name)

    # --- the process's end -------------------------------------------------------------------------

    async def finish(self) -> None:
        """Return when all that former roles had taken is finished. May be cancelled."""
        while self._retiring:
            await asyncio.wait(tuple(self._retiring))

    async def abort(self) -> None:
        """The worker is to drain: no flip goes on, it is over or undone when this returns."""
        with contextlib.suppress(DynamoError):
            await self.cancel("the worker was asked to leave")

    async def close(self) -> None:
        """The process ends: nothing of this goes on, and of former roles nothing is left."""
        tasks = [task for task in (self._task, *self._retiring, *self._closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._closing:
            await asyncio.wait(tuple(self._closing))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await it, also where this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if (error := task.exception()) is not None:
        log.error("going back to the old role failed", exc_info=error)

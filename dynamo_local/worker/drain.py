"""A worker's drain, as a task that can be taken back.

    STARTING --started--> READY --begin--> DRAINING --all finished--> LEAVING
        \\--begin--> LEAVING          \\<--cancel--/

A worker that starts leaves at once, unless others may find it already: then it drains as soon as its start is over.
From standby (`sleeping`) it leaves in the same way, but cannot be taken back.

A drain begins in the same way whoever asks (SIGTERM, a revoked lease, a message). The worker
deregisters, then takes nothing new, then finishes everything that it took. After that it cannot be taken back: `left`
is done, and the phase never changes again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import Protocol

from dynamo_local.errors import DrainNotCancellable, DynamoError
from dynamo_local.system.executors import ended

log = logging.getLogger("dynamo_local.worker")

LINGER_S = 0.25
"""After deregistering, requests that were already on their way are served this long; later ones are refused and go
to another worker. Clients see a deregistration within 50 ms."""
DEREGISTER_PATIENCE_S = 0.5
"""A revoke takes some 10 ms. After this etcd counts as away: the keys stay, so new requests are refused instead."""
STARTED_WITHIN_S = 5.0
"""A worker that others may find is started some 10 ms later. After this etcd counts as away, and it leaves."""


class Phase(enum.StrEnum):
    """A worker's phase, as its `status` shows it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LEAVING = "leaving"
    FALLING_ASLEEP = "falling_asleep"
    SLEEPING = "sleeping"
    WAKING = "waking"


STANDBY = (Phase.FALLING_ASLEEP, Phase.SLEEPING, Phase.WAKING)


class DrainSteps(Protocol):
    """The actions of a drain and of its cancellation. The worker process implements them."""

    def unfollow_lease(self) -> None:
        """Until `resume` it is no order to leave that the lease is revoked: it goes with the drain."""
        ...

    async def end_standby(self) -> None:
        """Give up an order to sleep or to wake that is under way: the worker leaves."""
        ...

    async def deregister(self) -> None:
        """Return when no key of ours is in etcd any more; tried for ever. May be cancelled."""
        ...

    def stop_accepting(self, linger_s: float) -> None:
        """Take what comes within `linger_s`, refuse what comes later."""
        ...

    async def finish(self) -> None:
        """Return when all that was taken is finished. May be cancelled: then nothing was given up."""
        ...

    async def resume(self) -> None:
        """Accept again and register again. Raises a `DynamoError` where that cannot be done now."""
        ...


class Drain:
    """One worker's phase. All calls come from one event loop."""

    def __init__(self, steps: DrainSteps) -> None:
        self.phase = Phase.STARTING
        self.reason: str | None = None
        self.left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the worker must shut down."""
        self.found = False
        """Others may find the worker, and send it requests."""
        self._start_ended = asyncio.Event()
        self._steps = steps
        self._running: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._again: str | None = None
        """Why it drains as soon as it is ready."""
        self._from_standby = False

    def started(self) -> bool:
        """The start is complete; False if the worker was asked to leave before others could find it."""
        if self.phase is Phase.STARTING:
            self._is_ready()
        self._start_ended.set()
        return self.phase in (Phase.READY, Phase.DRAINING)

    async def start_ended(self) -> None:
        """Return when the start of a worker that others may find is over; at once for any other."""
        if self.found:
            await self._start_ended.wait()

    def begin(self, why: str) -> None:
        """Drain; while starting, leave at once. A second call changes nothing, except while a drain is taken back.

        Then the worker drains after all, because the later order wins.
        """
        if self.phase is Phase.STARTING and self.found:
            if self._again is None:
                asyncio.get_running_loop().call_later(STARTED_WITHIN_S, self._not_started, why)
            self._again = why
        elif self.phase is Phase.STARTING:
            self._leave(why)
        elif self.phase is Phase.READY or self.phase in STANDBY:
            self._from_standby = self.phase in STANDBY
            self.phase, self.reason = Phase.DRAINING, why
            log.info("draining: %s", why)
            self._steps.unfollow_lease()  # heard of only while this is taken back, it would be taken for a later order
            self._running = asyncio.create_task(self._run(), name="drain")
        elif self._resuming is not None:
            self._again = why

    async def cancel(self) -> None:
        """Take the drain back; returns when the worker is registered again. No error where nothing drains.

        Raises `DrainNotCancellable` past the point of no return, or what the resuming failed with; the drain goes
        on then.
        """
        if self.phase is Phase.LEAVING:
            raise DrainNotCancellable("the worker has finished its work and is shutting down; add another one instead")
        if self.phase is not Phase.DRAINING:
            self._again = None
            return
        if self._from_standby:
            raise DrainNotCancellable("the worker was on standby, and ends; add another one instead")
        if self._resuming is None:
            self._resuming = asyncio.create_task(self._resume(), name="take the drain back")
            self._resuming.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._again = None  # an order to drain that came while it was taken back before: this one is later
        # Shielded: a caller that gives up must not leave the worker half resumed.
        await asyncio.shield(self._resuming)

    async def close(self) -> None:
        """End what is under way; the process is going whatever the phase."""
        self.phase = Phase.LEAVING
        self._start_ended.set()
        for task in (self._resuming, self._running):
            await _cancelled(task)

    def _is_ready(self) -> None:
        self.phase, self.reason = Phase.READY, None
        again, self._again = self._again, None
        if again is not None:
            self.begin(again)

    def _not_started(self, why: str) -> None:
        if self.phase is Phase.STARTING and self._again is not None:
            self._leave(why)

    def _leave(self, why: str) -> None:
        self.phase, self.reason = Phase.LEAVING, why
        self._start_ended.set()
        if not self.left.done():
            self.left.set_result(why)

    async def _run(self) -> None:
        if self._from_standby:
            await self._steps.end_standby()
        deregistering = asyncio.create_task(self._steps.deregister(), name="deregister")
        try:
            await asyncio.wait({deregistering}, timeout=DEREGISTER_PATIENCE_S)
            if not deregistering.done():
                log.warning("etcd does not answer: the keys stay until it does; new requests are refused from now on")
            self._steps.stop_accepting(LINGER_S if deregistering.done() else 0.0)
            await self._steps.finish()
        except Exception:  # a defect must not leave a worker that neither serves nor goes
            log.exception("the drain failed; leaving all the same")
        finally:
            # If it is cancelled for a resume it may be half done: `resume` first removes the old keys.
            await _cancelled(deregistering)
        await asyncio.sleep(0)  # an order of this very turn to take it back wins
        self._leave(self.reason or "drained")

    async def _resume(self) -> None:
        try:
            await _cancelled(self._running)
            await self._steps.resume()
        except Exception as error:
            foreseen = isinstance(error, DynamoError)
            log.warning("the drain cannot be taken back and goes on: %s", error, exc_info=not foreseen)
            self._resuming = self._again = None
            self._running = asyncio.create_task(self._run(), name="drain")
            raise
        log.info("the drain was taken back (it had begun because of: %s)", self.reason)
        self._resuming = None
        self._is_ready()


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel it and await its end; what it failed with is logged."""
    if task is None:
        return
    await ended(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)

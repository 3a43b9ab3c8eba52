"""A worker on standby: out of routing and asleep, or on its way there or back. The last order decides.

    READY --sleep--> FALLING_ASLEEP --streams ended, engine asleep--> SLEEPING --wake--> WAKING --> READY
                       \\--wake-------------------------------------------------------->/

Orders are numbered. An order that was received before changes nothing, so the arbiter may send it again. The ready key
names the last order that was carried out. The worker keeps its lease.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from dynamo_local.core.types import Missing
from dynamo_local.errors import EtcdUnavailable, LeaseNotFound, NotSleepable
from dynamo_local.system.executors import ended
from dynamo_local.system.processes import session_members
from dynamo_local.system.start_stages import Stages
from dynamo_local.worker.context import Context, Identity
from dynamo_local.worker.drain import LINGER_S, Drain, Phase

log = logging.getLogger("dynamo_local.worker")

RETRY_S = 0.2
"""Pause between attempts to tell etcd, while it is away."""


class StandbySteps(Protocol):
    """The actions of an order. The worker process implements them."""

    async def withdraw(self) -> None:
        """Return when nobody finds the worker any more. Raises `EtcdUnavailable`, `LeaseNotFound`."""
        ...

    def stop_accepting(self, linger_s: float) -> None:
        """Take what comes within `linger_s`, refuse what comes later."""
        ...

    async def finish(self) -> None:
        """Return when all that was taken is finished. May be cancelled: then nothing was given up."""
        ...

    async def sleep_engine(self, level: int) -> None:
        """Let go of the GPU. Raises what the engine failed with."""
        ...

    async def wake_engine(self) -> None:
        """Have the GPU again, and answer as before. Raises what the engine failed with."""
        ...

    async def come_back(self) -> None:
        """Accept again, and put the keys again. Raises `EtcdUnavailable`, `LeaseNotFound`."""
        ...

    async def tell(self) -> None:
        """Say in the ready key what is so now. Raises `EtcdUnavailable`, `LeaseNotFound`."""
        ...


class Sleeping:
    """Carries out the last order. All calls come from one event loop; `failed` is told of an engine that failed."""

    def __init__(self, drain: Drain, steps: StandbySteps, failed: Callable[[str, BaseException], None]) -> None:
        self.asleep = False
        """The engine sleeps."""
        self.done = 0
        """The number of the last order that was carried out."""
        self.level = 1
        self._drain = drain
        self._steps = steps
        self._failed = failed
        self._order = 0
        self._to_sleep = False
        self._goal_changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def sleep(self, order: int, level: int) -> None:
        """Take an order to sleep. Raises `NotSleepable` where the worker starts or leaves."""
        self._take(order, to_sleep=True)
        if order == self._order and not self.asleep:
            self.level = level

    def wake(self, order: int) -> None:
        """Take an order to wake; one that never slept has nothing to do but to say so. Raises as `sleep`."""
        self._take(order, to_sleep=False)

    def _take(self, order: int, *, to_sleep: bool) -> None:
        if order <= self._order:
            return
        if self._drain.phase in (Phase.STARTING, Phase.DRAINING, Phase.LEAVING):
            raise NotSleepable(f"the worker is {self._drain.phase}")
        self._order, self._to_sleep = order, to_sleep
        self._goal_changed.set()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="standby")

    async def close(self) -> None:
        """End what is under way: the worker leaves, whatever state the engine is in."""
        await ended(self._running)

    # --- carrying out ----------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.done != self._order:
                self._goal_changed.clear()
                if self._to_sleep:
                    await self._fall_asleep(self._order)
                else:
                    await self._wake_up(self._order)
        except LeaseNotFound as error:  # it was revoked: the drain that follows from that is the watch's to begin
            log.info("the order is not carried out: %s", error)
        except Exception as error:
            self._failed("its standby", error)

    async def _fall_asleep(self, order: int) -> None:
        if not self.asleep:
            self._drain.phase = Phase.FALLING_ASLEEP
            await self._until_stored(self._steps.withdraw)
            self._steps.stop_accepting(LINGER_S)
            if not await self._finished():
                return  # ordered to wake meanwhile
            await self._steps.sleep_engine(self.level)
            self.asleep = True
        self._drain.phase = Phase.SLEEPING
        await self._carried_out(order)
        log.info("asleep at level %d", self.level)

    async def _finished(self) -> bool:
        """Wait for the streams to end; False if another order came first."""
        finishing = asyncio.create_task(self._steps.finish(), name="finish before sleeping")
        changed = asyncio.create_task(self._goal_changed.wait(), name="another order")
        try:
            await asyncio.wait({finishing, changed}, return_when=asyncio.FIRST_COMPLETED)
            if self._goal_changed.is_set():
                return False
            await finishing
            return True
        finally:
            for task in (finishing, changed):
                task.cancel()
            await asyncio.wait({finishing, changed})

    async def _wake_up(self, order: int) -> None:
        stages = Stages()
        if self._drain.phase is not Phase.READY:
            self._drain.phase = Phase.WAKING
            if self.asleep:
                await self._steps.wake_engine()
                self.asleep = False
                stages.passed("engine and probe")
            await self._until_stored(self._steps.come_back)
            self._drain.phase = Phase.READY
            stages.passed("keys")
        await self._carried_out(order)
        stages.passed("ready key")
        log.info("awake after %s", stages.describe(3))

    async def _carried_out(self, order: int) -> None:
        self.done = order
        await self._until_stored(self._steps.tell)

    async def _until_stored(self, step: Callable[[], Awaitable[None]]) -> None:
        """Try for as long as etcd is away: the worker must not be half out of routing."""
        while True:
            try:
                return await step()
            except EtcdUnavailable as error:
                log.warning("etcd does not answer, trying again: %s", error)
                await asyncio.sleep(RETRY_S)


# The standby facts in the ready key: `core.fleet.fleet.StandbyFacts` as JSON


def standby_facts(identity: Identity, context: Context, sleeping: Sleeping) -> dict[str, Any]:
    """`{"standby": {…}}`; empty for a worker that is not made to sleep. None is "unknown"."""
    if not identity.standby:
        return {}
    sleeper = context.sleeper
    facts: dict[str, Any] = {"order": sleeping.done, "asleep": sleeping.asleep, "level": sleeping.level}
    if sleeper is None:
        facts["cannot"] = "its component has no engine that can"
    else:
        facts["cannot"], facts["recycle"] = sleeper.cannot, sleeper.recycle
        facts["rehearsed_bytes"] = _known(sleeper.rehearsed_bytes)
        if sleeping.asleep and sleeper.asleep is not None:
            facts["vram_bytes"] = _known(sleeper.asleep.vram_bytes)
            facts["host_bytes"] = _known(sleeper.asleep.host_bytes)
            facts["pids"] = sorted(session_members(os.getsid(0)))
    return {"standby": facts}


def _known(value: int | Missing) -> int | None:
    return None if isinstance(value, Missing) else value

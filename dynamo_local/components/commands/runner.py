"""The component of a service that is a command: a worker like any other, whose engine is another program.

It watches the command, asks it for its load, and does what a drain asks for through the runtime's driver. Everything
else (lease, control endpoint, statefile, adoption, deadlines, GPUs) is the worker's, as for any component.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from dynamo_local.components.commands.child import Child, current_child
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.sleep import HookCommands, SleepHooks, take_on_standby
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError, InfraUnavailable
from dynamo_local.sdk.context import FORMER_INSTANCE, Work, WorkerContext, current_context
from dynamo_local.sdk.service import async_on_start, on_shutdown

# --- The driver of a runtime implements this for the runner.


class ChildEnded(DynamoError):
    """The command has ended although nobody asked it to."""

    code = "command_ended"


class ChildSilent(DynamoError):
    """The command does not answer, or its answer is unusable: its state is unknown."""

    code = "command_silent"


class Sample(NamedTuple):
    """A command's report. `in_flight` counts the requests that it holds: a drain waits for 0."""

    load: Load | Missing
    in_flight: int


class Driver(Protocol):
    """Handles one command of a runtime. Made once etcd and NATS are connected; used from one event loop."""

    async def wait_ready(self) -> None:
        """Return when the command answers, and its own registration (if it has one) is seen.

        Bounded from outside by the start deadline, and cancelled when the command ends. Raises a `DynamoError` if
        it can never become ready.
        """
        ...

    def facts(self) -> Mapping[str, str]:
        """After `wait_ready`, for the ready key: `frontend_url`, and `leases` (hex, joined by commas) that the arbiter
        revokes when this worker's process is gone, as it does with the worker's own."""
        ...

    async def sample(self) -> Sample:
        """Ask the command now. Raises `ChildSilent`: unknown is not 0."""
        ...

    async def take_out(self) -> None:
        """From now on nothing new is routed to the command. Called again during a drain, so doing it twice changes
        nothing; may be cancelled halfway. Raises `InfraUnavailable` where that cannot be done now."""
        ...

    async def put_back(self) -> None:
        """The drain was taken back: route to it as before, also after a `take_out` that was cut short.

        Raises `InfraUnavailable` where that cannot be done now, another `DynamoError` where it never can.
        """
        ...

    async def lost(self) -> None:
        """The command is gone: remove what others would still route by. Doing it twice changes nothing."""
        ...


class UnroutedDriver:
    """Part of a driver whose command is routed to only by the worker's own registration: there is nothing else to take
    out or put back."""

    async def take_out(self) -> None:
        return None

    async def put_back(self) -> None:
        return None

    async def lost(self) -> None:
        return None


log = logging.getLogger("dynamo_local.worker")

SAMPLE_EVERY_S = 1.0
STALE_S = 3 * SAMPLE_EVERY_S
"""A sample older than three intervals counts as missing."""
DRAIN_EVERY_S = 0.1
DRAINED_SAMPLES = 3
"""A drain ends after this many samples in a row with nothing in flight: by then a request on its way has arrived."""
RETRY_S = 0.2
LOST_TIMEOUT_S = 1.0


class CommandWorker:
    """Base of every runtime's component. `sampled` is what the command last said, `Missing` where that is too old;
    `ending`: it was told to end, so that its end is no failure."""

    runtime: str

    def __init__(self) -> None:
        self.child: Child = current_child()
        self.context: WorkerContext = current_context()
        self.config: CommandConfig = self.context.settings
        self.driver = self.make_driver(self.context, self.child)
        self.sampled: Sample | Missing = Missing("the command was not asked yet")
        self.ending = False
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    def make_driver(self, context: WorkerContext, child: Child) -> Driver:
        """The driver for this command."""
        raise NotImplementedError

    def make_hooks(self) -> SleepHooks:
        """Puts the command to sleep, if `ServiceArgs.standby` asks for it."""
        return HookCommands(self.context, self.child)

    @async_on_start
    async def start(self) -> None:
        """Wait until the command can be routed to, then say what is known of it."""
        context = self.context
        first = FORMER_INSTANCE not in context.inherited  # the command stays when the worker's role changes
        if first:
            context.keep(self.stop)
        self._watching.append(context.vital(self._until_child_ends(), "the command"))
        await self.driver.wait_ready()
        if context.standby and first:
            await take_on_standby(context, self.make_hooks(), self.config.standby_growth_max_bytes)
        await context.announce(**self.driver.facts())
        await self._sample()
        context.set_load_source(self._load, self._load_changed)
        context.set_work_source(self.work)
        context.on_drain(self.drain)
        context.on_resume(self.resume)
        self._watching.append(context.vital(self._follow(), "the command"))

    @on_shutdown
    async def look_away(self) -> None:
        """This role is over: whoever comes after it, or ends the command, looks after that."""
        for task in self._watching:
            task.cancel()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace: nothing is in flight any more, or the worker must end in any case."""
        self.ending = True
        code = await self.child.end(self.config.stop_timeout_s)
        if code is None:
            log.error("the command (pid %d) is still there after SIGKILL (stuck driver?)", self.child.pid)
        else:
            log.info("the command has ended with exit code %d", code)
        await self._lost()

    # --- the command itself ----------------------------------------------------------------------

    async def _until_child_ends(self) -> None:
        from dynamo_local.core.types import how_it_ended

        code = await self.child.wait()
        if self.ending:
            return
        await self._lost()
        # The exit code does not matter: Dynamo's processes exit with 0 also when their lease is lost.
        raise ChildEnded(f"the command {self.child.launch.argv[0]} (pid {self.child.pid}) {how_it_ended(code)}")

    async def _lost(self) -> None:
        try:
            async with asyncio.timeout(LOST_TIMEOUT_S):
                await self.driver.lost()
        except (TimeoutError, DynamoError) as error:
            log.warning("what the command had registered could not be removed (%s), and expires by itself", error)

    # --- what it says ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Sample for ever. Raises `ChildSilent` once it has not answered for `health_bound_s`."""
        heard_s = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            why = await self._sample()
            now_s = time.monotonic()
            if why is None or self.ending:  # an ending command need not answer; its end has its own deadline
                heard_s = now_s
            elif now_s - heard_s > self.config.health_bound_s:
                await self._lost()
                raise ChildSilent(
                    f"the command has not answered for {now_s - heard_s:.0f} s ({why}) and counts as hung"
                )
            elif now_s - heard_s > STALE_S:
                self.sampled = Missing(why)

    async def _sample(self) -> str | None:
        """Sample once; returns why there was no answer, None if there was."""
        try:
            sample = await self.driver.sample()
        except ChildSilent as error:
            return str(error)
        if sample != self.sampled:
            self.sampled = sample
            self._changed.set()
        return None

    def _load(self) -> Load:
        """Raises `ChildSilent` where it is not known: nothing is published then."""
        load = self.sampled if isinstance(self.sampled, Missing) else self.sampled.load
        if isinstance(load, Missing):
            raise ChildSilent(load.reason)
        return load

    async def _load_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def work(self) -> Work:
        """The command's requests as `status` counts them, beside the streams of the worker's own endpoints."""
        return Work(unnamed=0 if isinstance(self.sampled, Missing) else self.sampled.in_flight)

    # --- leaving, and coming back --------------------------------------------------------------------

    async def drain(self) -> None:
        """Take it out of routing, and wait until nothing is in flight. The command lives on, so this can be undone."""
        await self._persist(self.driver.take_out)
        log.info("the command is out of routing")
        quiet, next_look_s = 0, time.monotonic() + SAMPLE_EVERY_S
        while quiet < DRAINED_SAMPLES:
            await asyncio.sleep(DRAIN_EVERY_S)
            if time.monotonic() >= next_look_s:  # a restart (of etcd, or of the command's runtime) may undo it
                await self._persist(self.driver.take_out)
                next_look_s = time.monotonic() + SAMPLE_EVERY_S
            silent = await self._sample()
            idle = silent is None and isinstance(self.sampled, Sample) and self.sampled.in_flight == 0
            quiet = quiet + 1 if idle else 0

    async def resume(self) -> None:
        """Return when it is routed to again. If that is impossible, the worker is useless and ends."""
        back = self.context.vital(self._persist(self.driver.put_back), "putting the command back into routing")
        await asyncio.wait({back})
        if not back.cancelled() and back.exception() is None:
            log.info("the command is routed to again")

    async def _persist(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do the step; repeat it while etcd is away."""
        while True:
            try:
                await step()
            except InfraUnavailable as error:
                log.warning("%s; trying again", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

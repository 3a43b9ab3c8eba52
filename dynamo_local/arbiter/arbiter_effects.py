"""The arbiter's `EffectRunner`: real processes, locks, leases, the statefile and the event log.

Each act is a task with its own deadline. Its result is fed back into the controller. A thread writes the statefile.
Commits that arrive during a write are written together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

from dynamo_local.arbiter.deployment import Launcher
from dynamo_local.arbiter.effects import Act, Done
from dynamo_local.arbiter.host_system import System
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.statefile import Statefile
from dynamo_local.arbiter.worker_requests import FlipAsks, WorkerAsks
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.effects import (
    CallBack,
    CallOffFlip,
    Commit,
    CountRequests,
    Effect,
    EndSession,
    FlipRole,
    Forget,
    LookAtGpus,
    LookUpKey,
    Order,
    Rename,
    Revoke,
    Signal,
    Spawn,
    Sweep,
)
from dynamo_local.core.fleet.events import (
    CalledBack,
    Event,
    FlipAnswered,
    GpusSeen,
    KeyLookedUp,
    OrderAnswered,
    ProcessGone,
    ProcessMade,
    ProcessRefused,
    RequestsCounted,
    RevokeFailed,
    Swept,
)
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.notes import Tell
from dynamo_local.core.types import Missing, ready_key
from dynamo_local.errors import DynamoError, EtcdUnavailable, InfraUnavailable
from dynamo_local.system.executors import ended
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.process_host import LaunchSpec, ProcessHost
from dynamo_local.transport.lease import KEEPALIVES_PER_TTL

# --- starts
# Processes are made within a deadline. One that appears after it is ended: somebody else may be started meanwhile.

log = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
"""To make a process takes milliseconds, on a busy host a second. When it is ready is another matter."""


class Starts:
    """`end_session` ends what appeared too late, `run` keeps a task until it has ended, `tell` tells a person."""

    def __init__(
        self,
        end_session: Callable[[int], Awaitable[None]],
        run: Callable[[Coroutine[Any, Any, None], str], object],
        tell: Callable[[str], None],
    ) -> None:
        self._end_session = end_session
        self._run = run
        self._tell = tell
        self._late: dict[str, asyncio.Future[int]] = {}

    async def within_deadline(self, name: str, making: Coroutine[Any, Any, int]) -> int:
        """The pid of the process that `making` makes for that worker. Raises what that raises, and OSError at the
        deadline. None is made while an earlier one may still appear, nor right after that: its GPUs are looked at
        first."""
        if (late := self._late.get(name)) is not None:
            making.close()
            await asyncio.wait({late}, timeout=START_DEADLINE_S)
            raise OSError(f"an earlier start of it had not come back within {START_DEADLINE_S:g} s")
        process = asyncio.ensure_future(making)
        try:
            await asyncio.wait({process}, timeout=START_DEADLINE_S)
        except asyncio.CancelledError:
            process.cancel()
            raise
        if process.done():
            return process.result()
        self._late[name] = process
        self._run(self._end_late(name, process), f"end of a late start of {name}")
        raise OSError(f"its process was not there within {START_DEADLINE_S:g} s; should it appear now, it is ended")

    async def _end_late(self, name: str, process: asyncio.Future[int]) -> None:
        try:
            pid = await process
        except Exception as error:
            log.warning("%s: its late start has failed: %s", name, error)
        else:
            self._tell(f"{name}: its process {pid} appeared more than {START_DEADLINE_S:g} s late; it is ended")
            await self._end_session(pid)
        finally:
            del self._late[name]


KEY_ASKED_S, KEY_ASKED_EVERY_S = 5.0, 0.1
LEFT_AT_LEAST = 1.0 - 1.0 / KEEPALIVES_PER_TTL
"""The share of its time to live that a lease has left when etcd goes away, at least."""


class EventWriter(Protocol):
    """Where events are logged."""

    async def append(self, commit: Commit, effects: Sequence[Effect]) -> None:
        """The commit's transitions and notes, each with what is ordered about its worker. Never raises."""
        ...


@dataclass(slots=True)
class _Write:
    commit: Commit
    effects: Sequence[Effect]
    then: Callable[[], None]


class ArbiterEffects:
    """See `EffectRunner`. `env` (etcd, NATS) is added to every worker's environment.

    `feed`, `tick` and `fleet` are of the controller whose effects these are: its methods, and its fleet of now.
    `report` is called with a worker that failed.
    """

    def __init__(
        self,
        *,
        host: ProcessHost,
        system: System,
        pool: GpuPool,
        launcher: Launcher,
        links: Links,
        statefile: Statefile,
        events: EventWriter,
        clock: Clock,
        tell: Tell,
        report: Callable[[Worker, str], None],
        feed: Callable[[Event], Any],
        tick: Callable[[], None],
        fleet: Callable[[], Fleet],
        rng: random.Random | None = None,
    ) -> None:
        self.env: dict[str, str] = {}
        self._host = host
        self._system = system
        self._pool = pool
        self._launcher = launcher
        self._links = links
        self.asks = WorkerAsks(links, launcher.factory.graph.namespace, clock)
        self.flips = FlipAsks(self.asks, lambda component: launcher.factory.service(component).config)
        self._statefile = statefile
        self._events = events
        self._clock = clock
        self.tell = tell
        self.report = report
        self._rng = rng or random.Random()
        self._feed, self._tick, self._fleet = feed, tick, fleet
        self._starts = Starts(system.end_session, self._task, tell)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writes: list[_Write] = []
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    async def close(self) -> None:
        """Give up what is under way, and return when it has ended."""
        tasks = list(self._tasks)
        self.abandon()
        await ended(*tasks)

    def abandon(self) -> None:
        """Give up what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    @property
    def idle(self) -> bool:
        """Everything that was to be written is."""
        return self._writer is None or self._writer.done()

    # --- EffectRunner -------------------------------------------------------------------------------

    def lock(self, name: str, uuids: Sequence[str]) -> tuple[str, ...]:
        return self._pool.lock(name, uuids)

    def unlock(self, uuids: Sequence[str]) -> None:
        self._pool.unlock(uuids)

    def commit(self, commit: Commit, fleet: Fleet, effects: Sequence[Effect], then: Callable[[], None]) -> None:
        self._writes.append(_Write(commit, effects, then))
        if self._writer is None or self._writer.done():
            self._writer = self._task(self._write(), "the writer of the statefile")

    def begin(self, act: Act, worker: Worker | None, done: Done) -> None:
        if isinstance(act, Signal):
            self._system.send_signal(act.pid, signal.SIGTERM)
            asyncio.get_running_loop().call_soon(done, None)
            return
        self._task(self._carried_out(act, worker, done), type(act).__name__)

    def wake_at(self, at_s: float) -> None:
        if self._timer is not None and not self._timer.cancelled() and self._timer_s <= at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._tick()

    # --- exits -----------------------------------------------------------------------------------

    def exited(self, name: str, pid: int, code: int | None) -> None:
        """From the host, within milliseconds of an exit."""
        # Processes that an engine left behind in its session keep GPU memory: whatever follows, they are ended first.
        self._task(self._system.end_session(pid), "end_session")
        self._feed(ProcessGone(stimulus_id=f"exit:{pid}", name=name, pid=pid, code=code, unit=self._rng.random()))

    # --- the registry ----------------------------------------------------------------------------

    async def _look_up(self, act: LookUpKey) -> Event:
        """Ask etcd whether the key has ended, for a bounded time: an arbiter that was suspended has not heard of that.

        If etcd has been away for longer than a lease may have had left, a missing key says nothing: the lease has
        expired. Its last keepalive may be a whole interval older than the loss.
        """
        factory = self._launcher.factory
        key = ready_key(factory.graph.namespace, act.name, int(act.lease, 16))
        revision = self._links.ready_keys.get(key)
        lost_s, now_s = self._links.etcd_lost_s, self._clock.now_s()
        left_s = LEFT_AT_LEAST * factory.settings.lease_ttl_s - 1.0
        deadline_s = now_s + KEY_ASKED_S if lost_s is None else lost_s + left_s
        removed = False
        while revision is not None and self._clock.now_s() < min(deadline_s, now_s + KEY_ASKED_S):
            try:
                removed = await self._key_was_removed(key, revision)
                break
            except EtcdUnavailable:
                await self._clock.sleep_until(self._clock.now_s() + KEY_ASKED_EVERY_S)
        return self._looked_up(act, removed)

    def _looked_up(self, act: LookUpKey, removed: bool) -> Event:
        return KeyLookedUp(
            stimulus_id=f"etcd:{act.lease}", name=act.name, pid=act.pid, lease=act.lease, removed=removed
        )

    async def _key_was_removed(self, key: str, revision: int) -> bool:
        """It is not in etcd, and etcd has not lost its data: it remembers that the key was written."""
        return await self._links.kv.get(key) is None and await self._links.kv.remembers(key, revision)

    # --- writing ---------------------------------------------------------------------------------

    async def _write(self) -> None:
        while self._writes:
            writes, self._writes = self._writes, []
            names = dict.fromkeys(name for write in writes for name in write.commit.names)
            head = any(write.commit.head for write in writes)
            if names or head:
                await self._statefile.write(names, self._fleet, head=head)
            for write in writes:
                await self._events.append(write.commit, write.effects)
            for write in writes:
                write.then()

    async def written(self) -> None:
        """Return when everything that was to be written until now is."""
        if self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})

    # --- acts ------------------------------------------------------------------------------------

    async def _carried_out(self, act: Act, worker: Worker | None, done: Done) -> None:
        seen: Event | None = None
        try:
            seen = await self._act(act, worker)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug: the worker's line of acts goes on, and it is told
            log.exception("%s failed", act)
            why = f"{type(error).__name__}: {error}"
            self.tell(f"arbiter: {type(act).__name__} failed: {why}")
            seen = self._came_to_nothing(act, why)
        done(seen)

    def _came_to_nothing(self, act: Act, why: str) -> Event | None:
        """The event that `step` waits for, of an act that failed unexpectedly: otherwise it would wait for ever."""
        match act:
            case Spawn(name=name, stimulus_id=cause):
                return ProcessRefused(stimulus_id=cause, name=name, why=why, unit=self._rng.random())
            case Revoke(name=name, lease=lease, tells=True):
                return RevokeFailed(stimulus_id=f"etcd:{lease}", name=name, lease=lease, why=why)
            case CallBack(name=name, pid=pid, requested_by=requested_by):
                return CalledBack(
                    stimulus_id=f"control:{name}", name=name, pid=pid, error=why, requested_by=requested_by
                )
            case CountRequests(name=name, pid=pid):
                return RequestsCounted(stimulus_id="drain-deadline", name=name, pid=pid, in_flight=Missing(why))
            case FlipRole(name=name, pid=pid, to=to):
                return FlipAnswered(stimulus_id=f"control:{name}", name=name, pid=pid, to=to, error=why, unknown=True)
            case Order(name=name, pid=pid, order=order):
                return OrderAnswered(stimulus_id=f"control:{name}", name=name, pid=pid, order=order, error=why)
            case LookUpKey():
                return self._looked_up(act, removed=False)
            case Sweep(name=name):
                return Swept(stimulus_id=f"sweep:{name}", name=name)
            case LookAtGpus():
                return GpusSeen(stimulus_id="gpus", stale=why)
        return None

    async def _act(self, act: Act, worker: Worker | None) -> Event | None:
        match act:
            case Spawn():
                return None if worker is None else await self._spawn(act, worker)
            case Revoke():
                return await self._revoke(act)
            case EndSession(pid=pid):
                await self._system.end_session(pid)
            case CallBack():
                return await self.asks.call_back(act, worker)
            case CountRequests():
                return await self.asks.count_requests(act)
            case FlipRole():
                return await self.flips.ask(act)
            case CallOffFlip():
                await self.flips.call_off(act)
            case Rename(name=name, was=was, pid=pid):
                self._host.rename(was, name, pid)
            case Order():
                return await self.asks.order(act)
            case LookUpKey():
                return await self._look_up(act)
            case Sweep(name=name, spawned_as=spawned_as):
                return await self._sweep(name, spawned_as or name)
            case LookAtGpus():
                return (await self._pool.look()).seen("gpus")
            case Forget(name=name):
                await self._host.forget(name)
            case Signal():
                pass  # `begin` does it at once
            case _:
                assert_never(act)
        return None

    async def _spawn(self, act: Spawn, worker: Worker) -> Event:
        cause, spec = act.stimulus_id, self.spec(worker)
        try:
            pid = await self._starts.within_deadline(act.name, self._make(act, spec))
        except OSError as error:
            return ProcessRefused(stimulus_id=cause, name=act.name, why=str(error), unit=self._rng.random())
        started_s, started_at = self._system.start_time_s(pid), self._clock.wall_s()
        return ProcessMade(stimulus_id=cause, name=act.name, pid=pid, start_time=started_s, started_at=started_at)

    async def _make(self, act: Spawn, spec: LaunchSpec) -> int:
        if act.first:
            await asyncio.to_thread(self._system.put_log_aside, spec.log_file)
        return await self._host.start_process(spec)

    async def _revoke(self, act: Revoke) -> Event | None:
        try:
            await self._links.revoke(act.lease)
        except (InfraUnavailable, ValueError) as error:
            if act.tells:
                log.warning("%s: its lease cannot be revoked (%s); asking it by SIGTERM", act.name, error)
                return RevokeFailed(stimulus_id=f"etcd:{act.lease}", name=act.name, lease=act.lease, why=str(error))
            log.warning("%s: its lease %s could not be revoked (%s), and will expire", act.name, act.lease, error)
        return None

    async def _sweep(self, name: str, spawn_name: str) -> Event:
        try:
            for what in await self._system.end_children(spawn_name):
                log.warning("left behind by a worker that is gone, ended: %s", what)
        except DynamoError as error:
            self.tell(f"something of a worker that is gone stays behind: {error}")
        return Swept(stimulus_id=f"sweep:{name}", name=name)

    # --- how a worker is run -----------------------------------------------------------------------

    def spec(self, worker: Worker) -> LaunchSpec:
        """How it is started, on the devices that it holds."""
        fleet = self._fleet()
        plan = self._launcher.plan(worker, tuple(fleet.gpus.by_uuid[uuid] for uuid in worker.gpus))
        inherited_fds = tuple(self._pool.inherited_fds(worker.gpus))
        return replace(plan, env={**plan.env, **self.env}, inherited_fds=inherited_fds)

    def _task(self, work: Coroutine[Any, Any, Any] | Awaitable[Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("the arbiter's %s failed: %s", what, error, exc_info=error)
                self.tell(f"arbiter: {what} failed: {type(error).__name__}: {error}")

        task.add_done_callback(ended)
        return task  # type: ignore[return-value]

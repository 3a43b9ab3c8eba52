"""The shell of the arbiter, composed as `Supervisor` does it, on a simulated host; what must always be true of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping
from typing import Any

from dynamo_local.core.fleet_view import Course
from dynamo_local.core.gpus import plan_on
from dynamo_local.core.lifecycle import DrainRequested, Event, Faulted, ProcessExited, RestartRequested
from dynamo_local.core.types import GraphSpec, WorkerState
from dynamo_local.errors import DynamoError, StateError
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.leaving import Leaving
from dynamo_local.serve.links import Links
from dynamo_local.serve.operations import Operations
from dynamo_local.serve.plan import gpu_asks
from dynamo_local.serve.registrations import Registrations
from dynamo_local.serve.sampling import Sampling
from dynamo_local.serve.scaling import Scaler
from dynamo_local.state import State
from tests.fakes.memory_store import MemoryStore
from tests.simulation.world import (
    NAMESPACE,
    Broken,
    Crash,
    MemoryEvents,
    NoLocks,
    SimHost,
    WatchedFleet,
    World,
    planner_for,
)

HEALTH_EVERY_S = 2.0
LIVES = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT)
LEAVES = (WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT, WorkerState.EXITED)


class Quiet:
    """A view that shows nothing."""

    def event(self, message: str) -> None: ...


class Shell:
    """One arbiter's life. `crash_at` is the write, counted from 1, before or after which it dies."""

    def __init__(
        self, world: World, spec: GraphSpec, run_id: str, *, crash_at: int | None = None, crash_when: str = "before"
    ) -> None:
        self.world = world
        self.graph = spec
        self.planner = planner_for(spec, run_id)
        self.dead = False
        self.writes = 0
        self.crash_at, self.crash_when = crash_at, crash_when
        self.wanted: set[str] = set()
        self.unforced: set[str] = set()
        self.restarts: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.host = SimHost(world)
        world.host, world.loop.on_crash = self.host, self.died
        clock = world.clock
        head = State(namespace=NAMESPACE, run_id=run_id, circus_endpoint="ipc:///simulated/ctl.sock")
        store = MemoryStore(world.file, on_write=self._on_write)
        self.fleet = WatchedFleet(head, store, MemoryEvents(), clock)  # type: ignore[arg-type]
        self.fleet.before_apply = self._before_apply  # type: ignore[method-assign]
        self.fleet.on_trouble = self._tell
        self.pool = GpuPool(NAMESPACE, world.gpus, NoLocks())  # type: ignore[arg-type]
        self.links = Links(NAMESPACE, run_id)
        self.links._kv, self.links.nats = world.etcd, world.nats.client()  # type: ignore[assignment]
        self.links.etcd_answers = True
        self.registrations = Registrations(NAMESPACE, self.fleet, self.links)
        self.sampling = Sampling(NAMESPACE, self.fleet, self.links, clock)
        background, tell = self._background, self._tell
        self.operations = Operations(
            self.fleet, self.host, self.pool, self.planner, self.links, clock, background=background, tell=tell
        )
        self.operations.end_children = lambda name: []  # type: ignore[assignment]
        self.scaler = Scaler(
            self.fleet, self.pool, self.planner, self.operations, clock, background=background, tell=tell
        )
        self.host.on_exit = self.operations.exited
        self.registrations.on_stray = self.operations.ask_again

    # --- its life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """As `dynamo serve`: everything is spawned; nobody waits for it."""
        self.pool.sample()
        await self.fleet.create()
        given = plan_on(self.pool.ledger, gpu_asks(self.graph))
        for plan in self.planner.plan_all(given):
            self.pool.take(plan.name, plan.gpus)
            self.fleet.add(plan)
        self.wanted = set(self.fleet.workers)
        self._background(self.operations.start(list(self.fleet.workers), "serve"))
        self._background(self.registrations.follow())
        self._background(self.sampling.run())
        self._background(self._health())

    async def _health(self) -> None:
        while True:
            await self.world.clock.sleep_until(self.world.clock.now_s() + HEALTH_EVERY_S)
            await self.operations.check_health()
            await self.fleet.heal()
            if not self.fleet.unwritten:
                self.world.file.edited = False

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """A command, beside whatever else runs."""
        self._background(work)

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        if self.dead:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.dead:
            self.world.note(f"BROKEN: {task.get_coro()} raised {type(error).__name__}: {error}")
            self.failure = self.failure or error

    failure: BaseException | None = None

    def _tell(self, message: str) -> None:
        self.world.note(f"told: {message.splitlines()[0]}")

    def _on_write(self, when: str) -> None:
        if self.dead:
            raise Crash
        if when == "before":
            self.writes += 1
        if self.writes == self.crash_at and when == self.crash_when:
            raise Crash

    def died(self) -> None:
        """`kill -9` of the arbiter: nothing of it runs any more; its workers and the statefile are still there."""
        if self.dead:
            return
        self.world.note(f"the arbiter dies {self.crash_when} write {self.writes}")
        self.dead = self.host.dead = True
        self.links.nats.close_now()
        for task in list(self._tasks):
            task.cancel()

    async def leave(self) -> None:
        """As `dynamo down`."""
        self.operations.leaving = True
        await Leaving(self.fleet, self.world.clock, asyncio.Event(), Quiet()).end_workers()  # type: ignore[arg-type]
        self.dead = self.host.dead = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failure is not None:
            raise Broken("something was raised out of the shell while it left") from self.failure

    # --- commands ----------------------------------------------------------------------------------

    async def scale(self, component: str, target: str, *, force: bool, policy: str | None, stimulus_id: str) -> None:
        """`dynamo scale`; refusals are answers."""
        if not force:
            self.unforced.add(stimulus_id)
        await self._command(
            f"scale {component} {target}{' --force' * force}",
            self.scaler.scale(component, target, force=force, victim_policy=policy, stimulus_id=stimulus_id),
        )

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> None:
        """`dynamo drain`."""
        if not force:
            self.unforced.add(stimulus_id)
        words = f"drain {name}{' --cancel' * cancel}{' --force' * force}"
        answered = await self._command(
            words, self.scaler.drain(name, cancel=cancel, force=force, stimulus_id=stimulus_id)
        )
        worker = self.fleet.workers.get(name)
        # The person was told that it goes, unless it was gone before the answer: then it has been started anew.
        goes = worker is None or (worker.state in LEAVES and worker.course is Course.STEADY)
        if cancel and not answered and stimulus_id in self._cancelling and goes:
            self.wanted.discard(name)

    async def restart(self, target: str, *, force: bool, stimulus_id: str) -> None:
        """`dynamo restart`."""
        self.restarts.add(stimulus_id)
        await self._command(
            f"restart {target}", self.scaler.restart(target, rolling_=True, force=force, stimulus_id=stimulus_id)
        )

    async def _command(self, words: str, work: Coroutine[Any, Any, dict[str, Any]]) -> bool:
        self.world.note(f"$ dynamo {words}")
        try:
            answer = await work
        except DynamoError as error:
            self.world.note(f"  {words}: {type(error).__name__}: {str(error)[:100]}")
            return False
        done = [f"{each['kind']} {each['watcher_name']}" for each in answer.get("instructions", ())]
        self.world.note(f"  {words}: {done}")
        return True

    # --- what must be true ---------------------------------------------------------------------------

    def follow_decisions(self) -> None:
        """Note which workers every committed decision wants, and does not want any more."""
        commit = self.scaler._commit
        self._cancelling: set[str] = set()

        async def noted(instructions: Any, stimulus_id: str) -> None:
            chosen = list(instructions)
            await commit(chosen, stimulus_id)
            for each in chosen:
                kind = type(each).__name__
                if kind in ("SpawnWorker", "Revive", "CancelDrain") or (kind == "BeginDrain" and each.restart):
                    self.wanted.add(each.name)
                    if kind == "CancelDrain":
                        self._cancelling.add(stimulus_id)
                else:
                    self.wanted.discard(each.name)

        self.scaler._commit = noted  # type: ignore[method-assign]

    def _before_apply(self, events: Mapping[str, Event]) -> None:
        workers = self.fleet.workers
        going = {name for name, event in events.items() if isinstance(event, DrainRequested)}
        for name, event in events.items():
            worker = workers[name]
            self.world.note(f"    {name}: {worker.state}/{worker.course}, {type(event).__name__} ({event.stimulus_id})")
            if isinstance(event, Faulted):
                self.wanted.discard(name)
            elif isinstance(event, RestartRequested) and event.stimulus_id in self.restarts:
                self.wanted.add(name)
            elif isinstance(event, ProcessExited) and worker.state in (
                WorkerState.DRAINING,
                WorkerState.DRAIN_TIMED_OUT,
            ):
                self._left(worker.name, event)
            if name in going and event.stimulus_id in self.unforced and worker.state is WorkerState.READY:
                siblings = [w for w in workers.values() if w.plan.component == worker.plan.component]
                if not any(w.state is WorkerState.READY and w.name not in going for w in siblings):
                    raise Broken(f"{name}, the last ready {worker.plan.component}, was taken without --force")

    def _left(self, name: str, event: ProcessExited) -> None:
        """A lease revoked from outside is an order to leave: however it ends then, it is not started again."""
        pid = int(event.stimulus_id.partition(":")[2])
        if pid in self.world.revoked_outside and self.fleet.workers[name].course is Course.STEADY:
            self.wanted.discard(name)

    def check(self) -> None:
        """What holds at every moment."""
        if self.failure is not None:
            raise Broken("something was raised out of the shell") from self.failure
        if self.dead:
            return
        self._check_ledger()
        self._check_processes()
        if not self.world.loop.blocking and not self.fleet.unwritten:
            self._check_file()

    def _check_ledger(self) -> None:
        ledger = self.pool.ledger
        every = [device.uuid for device in ledger.devices()]
        held = [device.uuid for devices in ledger.holders().values() for device in devices]
        parts = [*held, *ledger.quarantined(), *ledger.taken(), *(device.uuid for device in ledger.free())]
        if sorted(parts) != sorted(every):
            raise Broken(f"GPUs counted {parts}, there are {every}")
        for name, devices in ledger.holders().items():
            worker = self.fleet.workers.get(name)
            if worker is None:
                raise Broken(f"{name} holds {[d.index for d in devices]} and has no entry")
        for worker in self.fleet.workers.values():
            mine = [device.uuid for device in worker.gpus]
            quarantined = ledger.quarantined()
            booked = [device.uuid for device in ledger.holders().get(worker.name, ())]
            if [uuid for uuid in mine if uuid not in quarantined] != booked:
                raise Broken(f"{worker.name} has {mine}, the ledger says {booked}")

    def _check_processes(self) -> None:
        for process in self.world.living():
            worker = self.fleet.workers.get(process.name)
            if worker is None:
                raise Broken(f"{process.name} ({process.pid}) has no entry")
            if worker.pid is not None and worker.pid != process.pid:
                raise Broken(f"{process.name} is {process.pid}, its entry says {worker.pid}")
            if worker.pid is None and worker.state not in LIVES:
                raise Broken(f"{process.name} ({process.pid}) lives, its entry is {worker.state} without a pid")
            if missing := set(process.gpus) - {device.uuid for device in worker.gpus}:
                raise Broken(f"{process.name} is on {missing}, which are not booked on it")

    def _check_file(self) -> None:
        file = self.world.file
        if file.edited:
            return  # `heal` looks at it soon
        state = self.fleet.store.read()
        if set(state.components) != set(self.fleet.workers):
            raise Broken(f"the statefile has {set(state.components)}, the fleet {set(self.fleet.workers)}")


def check_sufficient(world: World) -> State:
    """After a crash the statefile alone says what is there: each process has its entry, with its pid and its GPUs.

    Between the start of a process and the commit of its pid the entry is `starting` without one.
    """
    try:
        state = MemoryStore(world.file).read()
    except StateError as error:
        raise Broken(f"the statefile that a crash left is not valid: {error}") from error
    holders: dict[str, str] = {}
    for name, entry in state.components.items():
        for uuid in entry.resources.gpu_uuids or ():
            if uuid in holders:
                raise Broken(f"the statefile gives {uuid} to {holders[uuid]} and to {name}")
            holders[uuid] = name
    for process in world.living():
        entry = state.components.get(process.name)  # type: ignore[assignment]
        if entry is None:
            raise Broken(f"{process.name} ({process.pid}) lives and is not in the statefile")
        if entry.pid not in (None, process.pid):
            raise Broken(f"{process.name} is {process.pid}, the statefile says {entry.pid}")
        if entry.pid is None and entry.state not in LIVES:
            raise Broken(f"{process.name} ({process.pid}) lives, the statefile says {entry.state}")
        if missing := set(process.gpus) - set(entry.resources.gpu_uuids or ()):
            raise Broken(f"{process.name} is on {missing}, which the statefile does not give to it")
    return state


def suffix(name: str) -> int:
    """0 for a bare name."""
    found = re.search(r"_(\d+)$", name)
    return int(found[1]) if found else 0

"""The controller of the arbiter, composed as `arbiter.composition` does it, on a simulated host; which workers are

wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from dynamo_local.arbiter.arbiter_effects import ArbiterEffects
from dynamo_local.arbiter.commands import Commands as ArbiterCommands
from dynamo_local.arbiter.controller import PULSE_EVERY_S, Waiting
from dynamo_local.arbiter.deployment import Launcher, gpu_asks
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.registrations import Registrations
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.statefile import Statefile
from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.events import Event, InfraSeen, Leave, StartAll
from dynamo_local.core.fleet.fleet import Fleet, Intent, RestartPlan, StartPace, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import Move, MoveKind
from dynamo_local.core.gpus import GpuLedger, plan_on
from dynamo_local.core.notes import About
from dynamo_local.core.types import GraphSpec, WorkerState, suffix_of
from dynamo_local.state.schema import State
from dynamo_local.system.gpu_locks import GpuLocks
from dynamo_local.system.gpu_pool import GpuPool
from tests.fakes.arbiter.memory_store import MemoryStore
from tests.simulation.spares import SimSpares
from tests.simulation.successor import Successor
from tests.simulation.watched_controller import WatchedController
from tests.simulation.world import (
    NAMESPACE,
    Broken,
    Crash,
    MemoryEvents,
    NoLocks,
    SimHost,
    SimSystem,
    World,
    factory_for,
)

HEALTH_EVERY_S = 2.0


class Arbiter(Successor):
    """One arbiter's life. `crash_at` is the write, counted from 1, before or after which it dies."""

    failure: BaseException | None = None
    left = False

    def __init__(
        self,
        world: World,
        spec: GraphSpec,
        run_id: str,
        *,
        crash_at: int | None = None,
        crash_when: str = "before",
        locks: GpuLocks | None = None,
    ) -> None:
        self.world = world
        self.graph = spec
        self.factory = factory_for(spec, run_id)
        self.dead = False
        self.writes = 0
        self.crash_at, self.crash_when = crash_at, crash_when
        self.wanted: set[str] = set()
        self.unforced: set[str] = set()
        self.restarts: set[str] = set()
        self._wanted_before: set[str] = set()
        self._plans: tuple[RestartPlan, ...] = ()
        self._cancelling: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.host = SimHost(world)
        clock, tell = world.clock, self._tell
        self.spares = self._spares()
        world.host, world.loop.on_crash = self.host, self.died
        head = State(namespace=NAMESPACE, run_id=run_id, circus_endpoint="ipc:///simulated/ctl.sock")
        store = MemoryStore(world.file, on_write=self._on_write)
        self.statefile = Statefile(head, store, self.factory.launch_of, tell)  # type: ignore[arg-type]
        self.pool = GpuPool(NAMESPACE, world.gpus, locks or NoLocks(), now_s=clock.now_s)  # type: ignore[arg-type]
        self.links = Links(NAMESPACE, run_id, lambda answer: self._feed(InfraSeen(stimulus_id="links", ok=answer)))
        self.links.attach(world.etcd, world.nats.client())  # type: ignore[arg-type]
        self.effects = ArbiterEffects(
            host=self.spares.host,
            system=SimSystem(world),
            pool=self.pool,
            launcher=Launcher(self.factory),
            links=self.links,
            statefile=self.statefile,
            events=MemoryEvents(),
            clock=clock,
            tell=tell,
            report=lambda worker, reason: tell(f"{worker.name} {reason}"),
            feed=self._feed,
            tick=self._ticked,
            fleet=lambda: self.controller.fleet,
            rng=world.rng,
        )
        self.controller = WatchedController(self._nobody(), self.effects, clock, validates=True)
        self.controller.subscribe(on_transition=self._on_transition, on_fleet=self._on_fleet)
        self.controller.on_moves = self._on_moves  # type: ignore[method-assign]
        self.controller.on_apply = self._on_apply  # type: ignore[method-assign]
        self.registrations = Registrations(NAMESPACE, self._feed, self.links)
        self.sampling = Sampling(NAMESPACE, self.controller, self.links, clock)
        self.waiting = Waiting(self.controller, clock.now_s)
        self.commands = ArbiterCommands(self.controller, self.pool.look, self.waiting)
        self.host.on_exit = self._guarded(self._exited)

    def _spares(self) -> SimSpares:
        return SimSpares(
            self.world,
            self.host,
            self.factory.paths,
            run=self._background,
            tell=self._tell,
            fleet=lambda: self.controller.fleet,
            record=self._record_spares,
        )

    def _nobody(self) -> Fleet:
        """The fleet before its first worker."""
        return Fleet(
            NAMESPACE,
            self.factory.templates(),
            policy=self.factory.settings.restart,
            restart_revoked=self.world.restart_revoked,
            pace=StartPace(at_once=3, every_s=0.5),
            infra_ok=True,
        )

    # --- its life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """As `dynamo serve`: everything is spawned; nobody waits for it."""
        sample = await self.pool.look()
        await self.statefile.create()
        ledger = plan_on(GpuLedger.of(sample.devices, elsewhere=sample.elsewhere), gpu_asks(self.graph))
        workers = {
            plan.name: Worker(
                plan.name,
                plan.component,
                self.graph.service(plan.component).role,
                suffix_of(plan.name, NAMESPACE, plan.component),
                gpus=ledger.held_uuids.get(plan.name, ()),
            )
            for plan in self.factory.plan_all(ledger.held)
        }
        self.controller.fleet = replace(self.controller.fleet, workers=workers, gpus=ledger)
        self.wanted = set(workers)
        self._feed(StartAll(stimulus_id="serve"))
        self._background(self.registrations.follow())
        self._watch()

    def _exited(self, name: str, pid: int, code: int | None) -> None:
        if not self.spares.pool.exited(name, pid, code):
            self.effects.exited(name, pid, code)

    async def _record_spares(self) -> None:
        self.statefile.head.spares = self.spares.pool.records() or None
        await self.statefile.write_head(lambda: self.controller.fleet)

    async def _heal(self) -> None:
        while True:
            await self.world.clock.sleep_until(self.world.clock.now_s() + HEALTH_EVERY_S)
            await self.statefile.heal(lambda: self.controller.fleet)
            if not self.statefile.unwritten:
                self.world.file.edited = False

    async def _beat(self) -> None:
        while True:
            await self.world.clock.sleep_until(self.world.clock.now_s() + PULSE_EVERY_S)
            self._guarded(self.controller.pulse)()

    def _feed(self, seen: Event) -> None:
        self._guarded(self.controller.feed)(seen)

    def _ticked(self) -> None:
        self._guarded(self.controller.tick)()

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., None]:
        """What is raised out of the controller breaks the run; a dead arbiter does nothing."""

        def guarded(*args: Any) -> None:
            if self.dead:
                return
            try:
                call(*args)
            except Exception as error:
                self.broke(error)

        return guarded

    async def foreground(self, work: Coroutine[Any, Any, None]) -> None:
        """Await what the arbiter does; returns when it is done, or the arbiter is dead."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        await asyncio.wait({task})
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

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
            self.broke(error)

    def broke(self, error: BaseException) -> None:
        """An invariant does not hold: the next look at the run fails."""
        self.world.note(f"BROKEN: {type(error).__name__}: {error}")
        self.failure = self.failure or error

    def _tell(self, message: str, about: About = None) -> None:
        self.world.note(f"told: {message.splitlines()[0]}")
        if message.startswith("arbiter: "):
            self.broke(Broken(message))

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
        self.dead = self.host.dead = self.controller.stopped = True
        self.links.nats.close_now()
        self.effects.abandon()
        for task in list(self._tasks):
            task.cancel()
        for spare in list(self.world.spares.values()):  # their sockets are closed
            self.world.spare_exits(spare, 0)
        asyncio.ensure_future(self.spares.pool.close())  # noqa: RUF006 - the kernel closes the other ends

    async def leave(self) -> None:
        """As `dynamo down`."""
        await self.spares.pool.close()
        self._feed(Leave(stimulus_id="down"))
        await self.waiting.until(lambda: leaving.has_left(self.controller.fleet))
        await self.effects.written()
        self.dead = self.host.dead = self.left = self.controller.stopped = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.effects.close()
        if self.failure is not None:
            raise Broken("something was raised out of the controller while it left") from self.failure

    # --- who is wanted -------------------------------------------------------------------------------

    def _on_moves(self, order: Event, before: Fleet, moves: tuple[Move, ...]) -> None:
        """Note which workers every decision wants, and does not want any more; unforced it takes no last ready one."""
        going = {each.name for each in moves if each.kind in (MoveKind.DRAIN, MoveKind.FLIP, MoveKind.SLEEP)}
        for component in {before.workers[name].component for name in going if before.workers[name].ready}:
            left = [worker for worker in before.ready(component) if worker.name not in going]
            if order.stimulus_id in self.unforced and not left:
                raise Broken(f"the last ready {component} was taken without --force")
        for each in moves:
            if each.kind in (MoveKind.SPAWN, MoveKind.CANCEL_DRAIN, MoveKind.WAKE):
                self.wanted.add(each.name)
                if each.kind is MoveKind.CANCEL_DRAIN:
                    self._cancelling.add(order.stimulus_id)
            elif each.kind not in (MoveKind.FLIP, MoveKind.CANCEL_FLIP):  # it is wanted under either name
                self.wanted.discard(each.name)

    def _on_apply(self, before: Fleet) -> None:
        """Who counts now and did not, is wanted; who did and does not, is not."""
        for name, worker in self.controller.fleet.workers.items():
            was = name in before.workers and before.workers[name].counts
            if worker.counts and not was:
                self.wanted.add(name)
        for name, worker in before.workers.items():
            after = self.controller.fleet.workers.get(name)
            if worker.counts and (after is None or not after.counts):
                self.wanted.discard(name)

    def _on_fleet(self, fleet: Fleet) -> None:
        """A worker whose substitute serves is not wanted any more."""
        for plan in self._plans:
            for name in plan.substitutes:
                worker = fleet.workers.get(name)
                if plan not in fleet.restarts and (worker is None or not worker.counts):
                    self.wanted.discard(name)
        self._plans = fleet.restarts
        self.wanted -= {worker.name for worker in fleet.workers.values() if worker.stands_by}

    def _on_transition(self, worker: Worker, transition: Transition) -> None:
        """Keep the books of what is wanted."""
        kind, name, before = transition.kind, transition.name, transition.before
        cause = transition.stimulus_id
        self.world.note(f"    {name}: {before} -> {transition.after}/{worker.intent}, {kind} ({cause})")
        again = worker.intent is Intent.RESTARTING or worker.state is WorkerState.BACKING_OFF  # its start fell through
        of_restart = cause in self.restarts or cause.startswith("recycle:")
        # Also by itself: it could not be put to sleep, or was stopped, and has heard late that it need not leave.
        if kind in (K.WAKE_REQUESTED, K.SLEEP_CANCELLED, K.DRAIN_CANCELLED):
            self.wanted.add(name)
        elif kind is K.FLIPPED and transition.details["was"] in self.wanted:
            self.wanted.discard(transition.details["was"])
            self.wanted.add(name)
        elif kind in (K.FAULTED, K.REMOVED):
            self.wanted.discard(name)
        elif kind in (K.DRAIN_REQUESTED, K.RESTART_REQUESTED, K.SPAWN_REQUESTED) and of_restart:
            (self.wanted.add if again or kind is not K.DRAIN_REQUESTED else self.wanted.discard)(name)
        elif kind is K.PROCESS_EXITED and before in (WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT):
            self._left(worker, cause)

    def _left(self, worker: Worker, cause: str) -> None:
        """A lease revoked from outside is an order to leave, however it ends then, unless its intent says otherwise."""
        pid = cause.removeprefix("exit:")
        if pid in map(str, self.world.revoked_outside) and worker.intent is Intent.STEADY:
            self.wanted.discard(worker.name)

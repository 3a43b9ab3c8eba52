"""The arbiter's part of the simulator: the same `step` and controller as in the arbiter, over virtual processes.

There are no crashes, failed starts or hung processes. A spawned process is ready after its start-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import assert_never

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.effects import Act, Done
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
    Transition,
)
from dynamo_local.core.fleet.events import (
    CalledBack,
    Change,
    FlipAnswered,
    GpusSeen,
    KeyLookedUp,
    KeyPut,
    OrderAnswered,
    ProcessGone,
    ProcessMade,
    RequestsCounted,
    Scale,
    ScaleAll,
    Swept,
)
from dynamo_local.core.fleet.fleet import (
    Fleet,
    Health,
    Process,
    Registration,
    Standby,
    StandbyFacts,
    Start,
    Template,
    Worker,
)
from dynamo_local.core.fleet.lifecycle import TransitionKind
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuDevice, GpuLedger, Sleeper
from dynamo_local.core.notes import About
from dynamo_local.core.types import Actuator, Role, WorkerState, lease_hex, watcher_name
from dynamo_local.core.types import WorkerState as S
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import DynamoError
from dynamo_local.simulator.options import DECODE, GPU_MEMORY_BYTES, LONG_AGO_S, NAMESPACE, PREFILL, SimulationOptions
from dynamo_local.simulator.process import Agenda, SimulatedProcess, What

# --- beginning
# Templates, devices, and the workers that there are when a run begins.


def templates_of(options: SimulationOptions) -> tuple[Template, ...]:
    """Prefill, where there is any, and decode."""
    flips, standby = options.flips and bool(options.shape.prefill), options.standby
    decode = Template(
        DECODE,
        options.decode_role,
        options.decode_gpus,
        start_deadline_s=2 * options.lead.cold_s + 60.0,
        drain_deadline_s=options.drain_deadline_s,
        flips_to=PREFILL if flips else None,
        standby=None if standby is None else standby.decode,
    )
    if not options.shape.prefill:
        return (decode,)
    prefill = replace(
        decode,
        component=PREFILL,
        role=Role.PREFILL,
        gpus_per_worker=options.prefill_gpus,
        flips_to=DECODE if flips else None,
        standby=None if standby is None else standby.prefill,
    )
    return (prefill, decode)


def devices_of(options: SimulationOptions) -> tuple[GpuDevice, ...]:
    """Those of the host, on which nobody else is."""
    return tuple(
        GpuDevice(
            index, f"GPU-twin-{index}", "twin", memory_total_bytes=GPU_MEMORY_BYTES, memory_used_bytes=0, processes=()
        )
        for index in range(options.gpus)
    )


def with_ready(fleet: Fleet, template: Template, n: int, number: int) -> Fleet:
    """One more that serves, as process `number`."""
    name = watcher_name(NAMESPACE, template.component, n)
    ledger = fleet.gpus.allocate(name, template.gpus_per_worker)
    worker = Worker(
        name,
        template.component,
        template.role,
        n,
        WorkerState.READY,
        since_s=LONG_AGO_S,
        gpus=ledger.held_uuids.get(name, ()),
        process=Process(number, None, LONG_AGO_S, None),
        registration=Registration(lease_hex(number)),
        health=Health(served=True),
        start=Start(1),
    )
    return replace(fleet, workers={**fleet.workers, name: worker}, gpus=ledger)


def with_sleeping(fleet: Fleet, template: Template, n: int, number: int, sim: SimOptions) -> Fleet:
    """One more that sleeps, and keeps what the engine's options say."""
    name = watcher_name(NAMESPACE, template.component, n)
    fleet = with_ready(fleet, template, n, number)
    worker = fleet.workers[name]
    sleeper = Sleeper(worker.gpus, sim.sleep_residue_bytes, sim.sleep_host_bytes)
    asleep = replace(worker, state=WorkerState.SLEEPING, gpus=(), standby=Standby(wanted=True))
    return replace(fleet, workers={**fleet.workers, name: asleep}, gpus=fleet.gpus.fall_asleep(name, sleeper))


# --- done_by
# The actuator that brought a worker where it was wanted.

_ENDS = {
    (S.FLIPPING, S.READY): "flips",
    (S.WAKING, S.READY): "wakes",
    (S.STARTING, S.READY): "starts",
    (S.FALLING_ASLEEP, S.SLEEPING): "sleeps",
}


def done_by(transition: Transition) -> str | None:
    """None where the transition is not the end of such a way."""
    return None if transition.kind is TransitionKind.FLIP_FAILED else _ENDS.get((transition.before, transition.after))


# --- flips
# Role flips of simulated workers, as those of real ones: the process and its streams go on.
#
# decode -> prefill: it pulls at once, beside its streams, and is out of decode routing with its new name. prefill ->
# decode: it pulls nothing more, and is in decode routing with its new name.


class Flips:
    """Those that are under way, by instance id."""

    def __init__(self, agenda: Agenda, flip_s: float) -> None:
        self._agenda = agenda
        self._flip_s = flip_s
        self._under_way: dict[int, tuple[str, str, Done]] = {}

    def begin(self, process: SimulatedProcess, to: str, now_s: float, done: Done) -> None:
        """It was told to become `to`; `done` hears of it when it has."""
        process.pulls = process.role is not Role.PREFILL
        self._under_way[process.instance_id] = (process.name, to, done)
        self._agenda.add(now_s + self._flip_s, What.FLIPPED, process.instance_id)

    def over(self, instance_id: int) -> None:
        """It is registered in its new role. Nothing for one that has ended meanwhile."""
        if (found := self._under_way.pop(instance_id, None)) is not None:
            name, to, done = found
            lease = lease_hex(instance_id)
            done(FlipAnswered(stimulus_id="flip", name=name, pid=instance_id, to=to, lease=lease))


# --- sleeps
# Standby in the simulator: a worker finishes its streams, sleeps, and wakes when it is told to, its prefix cache empty.


@dataclass(slots=True)
class _Order:
    """The last one of a process. `due_s` is when it is carried out (None: its streams have not ended)."""

    number: int
    level: int
    asleep: bool
    due_s: float | None = None


class Sleeps:
    """The commands that processes were given, by instance id."""

    def __init__(self, options: SimulationOptions, agenda: Agenda) -> None:
        self._agenda = agenda
        self._lead = options.lead
        self._residue_bytes = options.sim.sleep_residue_bytes
        self._host_bytes = options.sim.sleep_host_bytes
        self._commands: dict[int, _Order] = {}
        self._sleeping: set[int] = set()

    def begins_asleep(self, process: SimulatedProcess) -> None:
        """One that was put to sleep before the run began."""
        process.deregistered_s, process.resting = 0.0, True
        self._sleeping.add(process.instance_id)

    def sleep(self, process: SimulatedProcess, order: int, level: int, now_s: float) -> None:
        """It takes nothing new. A worker that was still being woken just goes on sleeping."""
        process.resting = True
        process.deregistered_s = now_s if process.deregistered_s is None else process.deregistered_s
        self._commands[process.instance_id] = _Order(order, level, asleep=True)
        if process.instance_id in self._sleeping:
            self.rests(process, now_s)

    def rests(self, process: SimulatedProcess, now_s: float) -> None:
        """Its streams have ended, and nothing comes any more."""
        order = self._commands.get(process.instance_id)
        if order is not None and order.asleep and order.due_s is None:
            self._due(process, order, now_s + self._lead.sleep_s)

    def wake(self, process: SimulatedProcess, order: int, now_s: float) -> None:
        """It serves when its engine is awake; at once where that never slept."""
        given = self._commands[process.instance_id] = _Order(order, 1, asleep=False)
        self._due(process, given, now_s + (self._lead.wake_s if process.instance_id in self._sleeping else 0.0))

    def _due(self, process: SimulatedProcess, order: _Order, at_s: float) -> None:
        order.due_s = at_s
        self._agenda.add(at_s, What.ORDERED, process.instance_id)

    def carried_out(self, process: SimulatedProcess, now_s: float) -> KeyPut | None:
        """Its ready key then; None if another order has come since, or if this one is not due yet."""
        number = process.instance_id
        order = self._commands.get(number)
        if order is None or order.due_s != now_s or process.leave_requested:
            return None
        if order.asleep:
            self._sleeping.add(number)
            process.scheduler.reset_prefix_cache(now_s)
            facts = StandbyFacts(
                order.number,
                asleep=True,
                level=order.level,
                vram_bytes=self._residue_bytes,
                host_bytes=self._host_bytes,
            )
        else:
            self._sleeping.discard(number)
            process.deregistered_s, process.resting = None, False
            facts = StandbyFacts(order.number)
        del self._commands[number]
        return KeyPut(stimulus_id="standby", name=process.name, pid=number, lease=lease_hex(number), standby=facts)


# --- spares
# How long a start takes, with the spares that there are.


class Spares:
    """Processes of which a worker is made sooner. The next one is started when that worker is ready."""

    def __init__(self, options: SimulationOptions) -> None:
        self._lead = options.lead
        self._warm_s = [LONG_AGO_S] * options.spares

    def start_s(self, now_s: float) -> float:
        """How long a start takes now: from a prewarmed process, if one is warm."""
        lead = self._lead
        for n, warm_at_s in enumerate(self._warm_s):
            if warm_at_s <= now_s:
                self._warm_s[n] = now_s + lead.spare_s + lead.cold_s
                return lead.spare_s
        return lead.cold_s


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Workers of a role by what they are at. `starting` have GPUs, `waiting` do not yet."""

    ready: int = 0
    starting: int = 0
    waiting: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """From `at_s` on, until the next point."""

    at_s: float
    prefill: RoleCount
    decode: RoleCount
    gpus_held: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """The outcome of a command: the moves that were made, or why none was."""

    moves: tuple[Move, ...] = ()
    refused: DynamoError | None = None


class VirtualClock:
    """The time of the event that happens now."""

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s

    def now_s(self) -> float:
        return self.at_s


class VirtualFleet:
    """The workers. `make_process(instance_id, name, role)` gives one that is ready; `joined` tells the flow of requests
    about it, `cut` whose requests must be given up with it."""

    def __init__(
        self,
        options: SimulationOptions,
        agenda: Agenda,
        make_process: Callable[[int, str, Role], SimulatedProcess],
        now_s: float,
    ) -> None:
        self._options = options
        self._agenda = agenda
        self._make_process = make_process
        self._numbers = count(1)
        self._clock = VirtualClock(now_s)
        self._names: dict[int, str] = {}
        self._spares = Spares(options)
        self._flips = Flips(agenda, options.lead.flip_s)
        self._sleeps = Sleeps(options, agenda)
        self.done_by: Counter[str] = Counter()
        """How often each actuator brought a worker where it was wanted."""
        self.processes: dict[str, SimulatedProcess] = {}
        """Those that have been ready, by watcher name."""
        self.points: list[FleetPoint] = []
        self.joined: Callable[[SimulatedProcess, float], None] = lambda process, now_s: None
        self.cut: Callable[[SimulatedProcess, float], None] = lambda process, now_s: None
        devices = devices_of(options)
        self._seen = GpusSeen(stimulus_id="gpus", devices=devices)
        fleet = Fleet(NAMESPACE, templates_of(options), gpus=GpuLedger.of(devices))
        for template in fleet.templates:
            workers = options.shape.prefill if template.role is Role.PREFILL else options.shape.decode
            for _ in range(workers):
                fleet = self._begun(fleet, template, asleep=False)
        for template in fleet.templates:
            for _ in range(template.standby or 0):
                fleet = self._begun(fleet, template, asleep=True)
        self.controller = FleetController(fleet, self, self._clock)
        self.controller.subscribe(on_transition=self._on_transition, on_fleet=self._on_fleet)
        self._on_fleet(fleet)

    def _begun(self, fleet: Fleet, template: Template, *, asleep: bool) -> Fleet:
        """One more that has been there before: it serves, or sleeps; none where no device is free for one to sleep."""
        if asleep and len(fleet.gpus.free) < template.gpus_per_worker:
            return fleet
        n = len(fleet.of(template.component))
        name = watcher_name(NAMESPACE, template.component, n)
        number = self._number(name)
        process = self.processes[name] = self._make_process(number, name, template.role)
        if not asleep:
            return with_ready(fleet, template, n, number)
        self._sleeps.begins_asleep(process)
        return with_sleeping(fleet, template, n, number, self._options.sim)

    def _number(self, name: str) -> int:
        """A new process's number, which is its pid, too."""
        number = next(self._numbers)
        self._names[number] = name
        return number

    # --- what can be seen ----------------------------------------------------------------------

    def now_s(self) -> float:
        """The time of what happened to it last."""
        return self._clock.at_s

    def view(self) -> Fleet:
        """The fleet at this moment, as decisions are made from it."""
        return self.controller.fleet

    def serving(self, *roles: Role) -> list[SimulatedProcess]:
        """The registered processes of these roles, in the order of their entries."""
        workers = [worker for worker in self.controller.fleet.workers.values() if worker.role in roles]
        found = [self.processes.get(worker.name) for worker in workers]
        return [process for process in found if process is not None and process.serves]

    # --- decisions -----------------------------------------------------------------------------

    def scale(self, component: str, step: int, now_s: float, stimulus_id: str) -> Scaled:
        """One more or one less, as the planner's connector asks for it. A refusal is an answer."""
        self._clock.at_s = now_s
        standby = Actuator.WAKE in self._options.actuators
        order = Scale(
            stimulus_id=stimulus_id,
            component=component,
            target=Change(step, relative=True),
            by_person=False,
            wait_for_gpus=True,
            wake=standby,
            sleep=standby,
        )
        try:
            return Scaled(self.controller.feed(order).moves)
        except DynamoError as refusal:
            return Scaled(refused=refusal)

    def scale_all(self, targets: Mapping[str, int], now_s: float, stimulus_id: str) -> dict[str, Scaled]:
        """So many workers of each component, or a refusal of all."""
        self._clock.at_s = now_s
        order = ScaleAll(stimulus_id=stimulus_id, targets=targets, actuators=self._options.actuators)
        try:
            made = self.controller.feed(order).by_component
        except DynamoError as refusal:
            return dict.fromkeys(targets, Scaled(refused=refusal))
        return {component: Scaled(moves) for component, moves in made.items()}

    # --- what happens --------------------------------------------------------------------------

    def started(self, instance_id: int, now_s: float) -> None:
        """Its start-up is over: it registers, unless it was taken back."""
        self._clock.at_s = now_s
        name = self._names[instance_id]
        worker = self.controller.fleet.workers.get(name)
        if worker is None or worker.pid != instance_id or worker.state is not WorkerState.STARTING:
            return
        process = self.processes[name] = self._make_process(instance_id, name, worker.role)
        key = KeyPut(stimulus_id="registered", name=name, pid=instance_id, lease=lease_hex(instance_id))
        self.controller.feed(key)
        if process.serves:  # else it was started to sleep
            self.joined(process, now_s)

    def flipped(self, instance_id: int, now_s: float) -> None:
        """It has registered in its new role."""
        self._clock.at_s = now_s
        self._flips.over(instance_id)

    def ordered(self, instance_id: int, now_s: float) -> None:
        """It has carried out an order to sleep or to wake, if that was its last."""
        self._clock.at_s = now_s
        process = self.processes.get(self._names[instance_id])
        if process is None or process.instance_id != instance_id:
            return
        key = self._sleeps.carried_out(process, now_s)
        if key is not None:
            self.controller.feed(key)
            if process.serves:
                self.joined(process, now_s)

    def check_exit(self, process: SimulatedProcess, now_s: float) -> None:
        """Look at a leaving process again when it may be done; nothing for one that does not leave."""
        wait_s = process.exit_in_s(now_s)
        if wait_s is not None:
            self._agenda.add(now_s + wait_s, What.EXIT, process.instance_id)

    def exit_due(self, instance_id: int, now_s: float) -> None:
        """It goes, if it has nothing left to do."""
        self._clock.at_s = now_s
        process = self.processes.get(self._names[instance_id])
        if process is None or process.instance_id != instance_id:
            return
        wait_s = process.exit_in_s(now_s)
        if wait_s == 0.0 and process.resting:
            self._sleeps.rests(process, now_s)
        elif wait_s == 0.0:
            self._exited(instance_id, 0)
        elif wait_s is not None:
            self._agenda.add(now_s + wait_s, What.EXIT, instance_id)

    def due(self, now_s: float) -> None:
        """Something that the controller waits for is due: a drain's deadline, or a look at the GPUs."""
        self._clock.at_s = now_s
        self.controller.tick()

    def _exited(self, instance_id: int, code: int) -> None:
        name = self._names[instance_id]
        self.processes.pop(name, None)
        self.controller.feed(ProcessGone(stimulus_id=f"exit:{instance_id}", name=name, pid=instance_id, code=code))

    # --- control.effects.EffectRunner ---------------------------------------------------------------

    def lock(self, name: str, uuids: Sequence[str]) -> tuple[str, ...]:
        """Nobody else is on this host."""
        return ()

    def unlock(self, uuids: Sequence[str]) -> None:
        """Nobody else is on this host."""

    def commit(self, commit: Commit, fleet: Fleet, effects: Sequence[Effect], then: Callable[[], None]) -> None:
        """There is no file: it is written at once."""
        then()

    def begin(self, act: Act, worker: Worker | None, done: Done) -> None:
        """See `EffectRunner`. Everything but a start takes no time."""
        now_s = self._clock.at_s
        match act:
            case Spawn(name=name, stimulus_id=cause):
                number = self._number(name)
                self._agenda.add(now_s + self._spares.start_s(now_s), What.STARTED, number)
                done(ProcessMade(stimulus_id=cause, name=name, pid=number, start_time=None, started_at=now_s))
            case Revoke(name=name, tells=True) | Signal(name=name):
                self._leave_requested(name, now_s)
                done(None)
            case CallBack(name=name, pid=pid, requested_by=requested_by):
                process = self.processes[name]
                process.deregistered_s, process.leave_requested = None, False
                done(CalledBack(stimulus_id="call-back", name=name, pid=pid, requested_by=requested_by))
                self.joined(process, now_s)
            case CountRequests(name=name, pid=pid):
                in_flight = self.processes[name].in_flight
                done(RequestsCounted(stimulus_id="drain-deadline", name=name, pid=pid, in_flight=in_flight))
            case Order(name=name, pid=pid, order=order, level=level):
                if level is None:
                    self._sleeps.wake(self.processes[name], order, now_s)
                else:
                    self._sleeps.sleep(self.processes[name], order, level, now_s)
                done(OrderAnswered(stimulus_id="order", name=name, pid=pid, order=order))
                self.check_exit(self.processes[name], now_s)
            case EndSession(name=name, pid=pid):
                done(None)
                ended = self.processes.get(name)
                self._exited(pid, -9)
                if ended is not None:
                    self.cut(ended, now_s)
            case LookUpKey(name=name, pid=pid, lease=lease):
                known = self.processes.get(name)
                removed = known is None or known.deregistered_s is not None
                done(KeyLookedUp(stimulus_id="registered", name=name, pid=pid, lease=lease, removed=removed))
            case Sweep(name=name):
                done(Swept(stimulus_id="sweep", name=name))
            case LookAtGpus():
                done(self._seen)
            case FlipRole(name=name, to=to):
                self._flips.begin(self.processes[name], to, now_s, done)
                self.joined(self.processes[name], now_s)
            case Rename(name=name, was=was):
                self._renamed(was, name, now_s)
                done(None)
            case Forget() | Revoke() | CallOffFlip():
                done(None)
            case _:
                assert_never(act)

    def _renamed(self, was: str, name: str, now_s: float) -> None:
        """The same process in its new role."""
        process = self.processes[name] = self.processes.pop(was)
        process.name, process.role = name, self.controller.fleet.workers[name].role
        self._names[process.instance_id] = name
        self.joined(process, now_s)

    def _leave_requested(self, name: str, now_s: float) -> None:
        worker = self.controller.fleet.workers[name]
        process = self.processes.get(name)
        if process is None:  # it was never ready: it has nothing to finish
            self._exited(worker.pid or 0, 0)
            return
        process.resting, process.leave_requested = False, True
        if process.deregistered_s is None:
            process.deregistered_s = now_s
        self.check_exit(process, now_s)

    def wake_at(self, at_s: float) -> None:
        self._agenda.add(max(at_s, self._clock.at_s), What.DEADLINE)

    def tell(self, text: str, about: About = None) -> None:
        """Nobody listens."""

    def report(self, worker: Worker, reason: str) -> None:
        """Nothing fails here."""

    # --- the controller's subscriber ----------------------------------------------------------------

    def _on_transition(self, worker: Worker, transition: Transition) -> None:
        if (how := done_by(transition)) is not None:
            self.done_by[how] += 1

    def _on_fleet(self, fleet: Fleet) -> None:
        """Note how many there are of each kind, where that has changed."""
        counts = {component: _count(fleet.of(component)) for component in (PREFILL, DECODE)}
        held = sum(len(worker.gpus) for worker in fleet.workers.values())
        point = FleetPoint(self._clock.at_s, counts[PREFILL], counts[DECODE], held)
        if self.points and self.points[-1].at_s == point.at_s:
            self.points.pop()
        self.points.append(point)


def _count(workers: Sequence[Worker]) -> RoleCount:
    coming = [worker for worker in workers if TRAITS[worker.state].comes_up]
    starting = sum(bool(worker.gpus) for worker in coming)
    return RoleCount(
        ready=sum(worker.ready for worker in workers),
        starting=starting,
        waiting=len(coming) - starting,
        draining=sum(TRAITS[worker.state].drains for worker in workers),
    )

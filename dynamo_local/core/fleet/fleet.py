"""The fleet as a value: every worker, the components that they may belong to, and the GPUs.

All decisions are made from it, and `step.step` makes the next one from it. A fleet never changes.

Four kinds of worker matter to a count:

* *ready*: it serves.
* *on its way*: it will serve without a further command. It is pending, starting, crashed or backing off, drained only
  to be restarted, or called back from a drain. It counts as capacity. Otherwise a slow start would be answered by more
  and more workers.
* *on standby*: it sleeps, or is on its way to that. It is no capacity until it is woken. Asleep it holds no GPU, only
  the memory that its process keeps there (`gpus.Sleeper`).
* *leaving* or *faulted*: it is no capacity. A leaving worker still holds its GPUs: a GPU goes with the process.

Workers are counted by component. Requests are addressed to a component's endpoints, so another component of the same
role cannot stand in for it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any

from dynamo_local.core.fleet.backoff import DEFAULT_POLICY, RestartHistory, RestartPolicy
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import DEFAULT_VRAM_SHARE, GpuLedger
from dynamo_local.core.types import Load, Missing, Role, WorkerState, watcher_name
from dynamo_local.errors import UnknownWorker

# --- moving
# Under way beside the states: one worker's change of role, and the whole run's leaving.


@dataclass(frozen=True, slots=True)
class FlipTarget:
    """A change of role that is under way: the worker's next name, component and suffix."""

    name: str
    component: str
    n: int
    #: It is being asked now.
    asking: bool = False
    #: A person has taken the flip back, which may come too late.
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The whole run is leaving. `stage` is an index into `roles.STAGES`, beyond the last when all are gone.

    `now`: nothing is waited for any more.
    """

    stage: int = 0
    now: bool = False


# --- standby
# Standby, as a worker's record has it, and as the worker itself says in its ready key.


@dataclass(frozen=True, slots=True)
class Standby:
    """Part of a worker's record."""

    #: It is to sleep, now or as soon as it can. Then it is no capacity.
    wanted: bool = False
    #: Counts the orders to sleep or to wake that its process was given. An answer to an earlier one is out of date.
    order: int = 0
    #: The level of the last order to sleep.
    level: int = 1
    #: When the order is given again, because nobody knows whether it arrived.
    ask_s: float | None = None
    #: Why its engine cannot sleep. None: it can, or nobody knows yet.
    cannot: str | None = None
    #: It was asked to leave while it was on standby: there is no way back into routing.
    drained: bool = False
    #: Main memory that level 1 took when it was rehearsed.
    host_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class StandbyFacts:
    """The part of a worker's ready key that is about standby."""

    #: The last order that it has carried out.
    order: int = 0
    asleep: bool = False
    level: int = 1
    cannot: str | None = None
    #: While it is asleep: the bytes that it keeps on each of its devices, and in main memory.
    vram_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    host_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    rehearsed_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen
    #: While it is asleep: its processes.
    pids: frozenset[int] = frozenset()
    #: Why its process should be replaced: its memory has grown.
    recycle: str | None = None
    #: Why an order came to nothing.
    note: str | None = None


# --- restart_plan
# The rest of a rolling restart: the fleet carries it, and the statefile keeps it for a successor.


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """Workers that are still to be restarted, in order."""

    stimulus_id: str
    #: `(watcher name, its starts when the plan was made)`.
    todo: tuple[tuple[str, int], ...]
    #: Asked to leave or to start. One that serves again with its old process was called back, and is skipped.
    begun: frozenset[str] = frozenset()
    #: Templates that a person named: they are started although they have exited.
    bring_back: frozenset[str] = frozenset()
    #: These leave before anything takes their place, even as the last ready ones.
    in_place: frozenset[str] = frozenset()
    #: Workers that were started first, by the name of the worker that leaves for good when they are ready.
    substitutes: Mapping[str, str] = field(default_factory=dict)
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    #: In an `apply`: new workers that must be ready before the `removed` ones leave.
    awaited: tuple[str, ...] = ()
    #: In an `apply`: workers of components that are wanted no more.
    removed: tuple[str, ...] = ()
    #: Those of them that leave last: they serve a model that shares the GPUs, and no Frontend may offer it any more.
    late: frozenset[str] = frozenset()
    #: The worker at which the sequence came to its end, and why.
    stopped: tuple[str, str] | None = None


# --- guests
# Components that run in the processes of another one's workers.


def runs_within(guest: str, host: str) -> str:
    """Why nothing can be asked of the guest's workers, and what to do instead."""
    return (
        f"{guest} runs in {host}'s processes and has no workers of its own: say {host}; or give it some by "
        f"{host}.ServiceArgs.colocate: [] in the configuration, which is chosen when the graph is started"
    )


class Intent(enum.StrEnum):
    """A decision about a worker that its state alone does not say."""

    STEADY = "steady"
    RESTARTING = "restarting"
    """It drains, or is gone, only to be started again under the same name."""
    RETURNING = "returning"
    """Its drain is being taken back, and it has not registered again yet. If it exits first, it is started again."""
    LEAVING = "leaving"
    """It crashed or timed out and is not started again: only the end of its process is waited for."""


@dataclass(frozen=True, slots=True)
class Template:
    """How one more worker of a component is made."""

    component: str
    role: Role
    gpus_per_worker: int = 0
    #: None: the class sets no bound.
    max_workers: int | None = None
    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    #: Stands for everything that a worker reads when it starts. A worker with another one is outdated.
    fingerprint: str = ""
    #: The component is wanted no more. Its template goes with its last worker.
    retired: bool = False
    #: The component whose role its workers can take over. None: `cannot_flip` says why.
    flips_to: str | None = None
    cannot_flip: str = "no other component has an engine like its own"
    #: How many workers are kept asleep beside those that serve. None: its engines are not made to sleep.
    standby: int | None = None
    #: The part of a device's memory that an awake worker takes.
    vram_share: float = DEFAULT_VRAM_SHARE
    #: Components that are colocated: they run in its workers' processes.
    guests: tuple[str, ...] = ()
    #: A model that shares the GPUs with others keeps at least so many workers. None: it shares nothing.
    shared_floor: int | None = None

    @property
    def may_be_none(self) -> bool:
        """It may have no worker: requests for it are held, and start one."""
        return self.shared_floor == 0


@dataclass(frozen=True, slots=True)
class Process:
    """A worker's process."""

    pid: int
    #: Seconds since boot. With the pid it identifies the process. None: it could not be read.
    start_time: float | None
    #: Seconds of the arbiter's monotonic clock.
    started_s: float
    #: Seconds since 1970.
    started_at: float | None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process has ended: when, with which code, by which observation; `unit` is for a `Failure`."""

    at_s: float
    code: int | None
    unit: float
    cause: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure: when (`at_s`), after how long as a ready worker, and the random number (0..1) that places the
    back-off within its jitter."""

    at_s: float
    ran_s: float
    unit: float


@dataclass(frozen=True, slots=True)
class GpusPendingRelease:
    """A process is gone, and its GPUs' memory is waited for since then. `keep`: for its next process."""

    since_s: float
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Registration:
    """The keys of a worker's process in etcd. Reset when a process begins or ends."""

    #: The lease (hex) under which its keys are.
    lease: str | None = None
    endpoints: tuple[str, ...] = ()
    #: Leases of what runs behind it: the program of a command registers itself.
    other_leases: tuple[str, ...] = ()
    #: Since when its key has been missing from a list of all keys.
    absent_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The answers of a worker's process. Reset when a process begins or ends (`served`: only when one begins)."""

    load: Load | Missing = Missing("not sampled")  # noqa: RUF009 - frozen
    #: This process has been ready once, since `ready_s`.
    served: bool = False
    ready_s: float | None = None
    #: When it first answered, or became ready.
    heard_s: float | None = None
    #: For how long it has not answered since, counting only time in which the arbiter asked.
    unheard_s: float = 0.0
    #: The same, without the time in which it could not be asked (NATS was away).
    silent_s: float = 0.0
    #: It said that it ends because its engine has died, and why.
    engine_failed: bool = False
    engine_said: str | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """How the present or last process was started."""

    #: Processes committed under this name, failed ones included. A restart is done when this has grown.
    starts: int = 0
    #: The template's fingerprint at the last start. Empty: not known.
    launched: str = ""
    #: The name under which the process was made, if it differs from the name of now: its role has changed since. The
    #: process's environment and its log file have that name. The statefile calls this `born`.
    spawned_as: str | None = None
    #: The process is to be made.
    spawning: bool = False
    #: The process is being made: that cannot be called off any more.
    spawn_begun: bool = False
    #: Its next start waits until then, because many start at once (`StartPace`).
    turn_s: float | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """How the present process leaves, or the last one left. Reset when a process begins."""

    #: When we asked it to. None: nobody did, or its lease went away by itself (`lease_gone`).
    requested_at_s: float | None = None
    #: It was given the signal: its lease was revoked, or SIGTERM was sent.
    signalled: bool = False
    lease_gone: bool = False
    #: The lease ended while the worker was silent. The worker may only have been suspended.
    silent_at_expiry: bool = False
    #: How many calls back are under way.
    calls: int = 0
    #: It is past its drain deadline, and being asked what ending it will cut.
    counting: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process: work that follows it, and facts that are remembered."""

    #: The process has ended, and the registry is asked whether it left in order.
    exit: Exit | None = None
    exit_code: int | None = None
    failure: Failure | None = None
    #: Processes that the last one left behind are being ended.
    sweeping: bool = False
    gpus_pending_release: GpusPendingRelease | None = None
    #: It starts when etcd and NATS answer again.
    waiting_for_infra: bool = False


@dataclass(frozen=True, slots=True)
class Worker:
    """One entry, grouped by lifetime: a reset is one assignment. Times (`_s`) are of the arbiter's monotonic clock."""

    name: str
    component: str
    role: Role
    #: The name's suffix, 0 for the bare name.
    n: int
    state: WorkerState = WorkerState.PENDING
    #: When it entered its state.
    since_s: float = 0.0
    #: UUIDs of the devices that the ledger says it holds.
    gpus: tuple[str, ...] = ()
    #: Decides about the end of its process.
    intent: Intent = Intent.STEADY
    #: Why it is in its state, in words.
    reason: str | None = None
    #: The `stimulus_id` of the last command that was carried out on it. A start that waits is still that command's.
    cause: str | None = None
    #: The deadline of its state: a start, a drain, a back-off.
    due_s: float | None = None
    history: RestartHistory = RestartHistory()  # noqa: RUF009 - frozen
    process: Process | None = None
    registration: Registration = Registration()
    health: Health = Health()
    start: Start = Start()
    leave: Leave = Leave()
    ended: Ended = Ended()
    #: Its next name and component, while its change of role is under way.
    flip: FlipTarget | None = None
    standby: Standby = Standby()

    def changed(self, **values: Any) -> Worker:
        """The worker with other values. A field of a group is named without its group: `changed(signalled=True)`."""
        whole: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group = GROUP_OF.get(name)
            if group is None:
                whole[name] = value
            else:
                parts.setdefault(group, {})[name] = value
        for group, part in parts.items():
            whole[group] = replace(whole.get(group, getattr(self, group)), **part)
        return replace(self, **whole)

    @property
    def persisted(self) -> tuple[object, ...]:
        """The part of it that the statefile keeps (`arbiter.statefile`). A step that changes this writes the entry."""
        start, leave, standby = self.start, self.leave, self.standby
        flips_to = None if self.flip is None else (self.flip.name, self.flip.component)
        leaves = (leave.requested_at_s, leave.lease_gone, self.intent)
        sleeps = (standby.wanted, standby.order, standby.level, standby.drained)
        started = (start.starts, start.launched, start.spawned_as, self.process, self.registration.other_leases)
        return (self.state, self.reason, self.role, self.gpus, self.history, flips_to, *leaves, *sleeps, *started)

    @property
    def lease(self) -> str | None:
        """The lease (hex) of its keys."""
        return self.registration.lease

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The keys of its endpoints."""
        return self.registration.endpoints

    @property
    def other_leases(self) -> tuple[str, ...]:
        """Leases of what runs behind it."""
        return self.registration.other_leases

    @property
    def load(self) -> Load | Missing:
        """The load that it told last."""
        return self.health.load

    @property
    def pid(self) -> int | None:
        """Its process's, None without one."""
        return None if self.process is None else self.process.pid

    @property
    def runs(self) -> bool:
        """It has a process."""
        return self.process is not None

    @property
    def spawn_name(self) -> str:
        """The name under which its process was made."""
        return self.start.spawned_as or self.name

    @property
    def target_component(self) -> str:
        """The component for which it counts: the one that it goes to, while it changes its role."""
        return self.component if self.flip is None else self.flip.component

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.start.starts - 1)

    @property
    def ready(self) -> bool:
        """It serves."""
        return TRAITS[self.state].serves

    @property
    def on_its_way(self) -> bool:
        """It will serve without anybody asking again."""
        traits = TRAITS[self.state]
        if self.standby.wanted:
            return False
        if traits.asleep:  # it waits for its GPUs
            return True
        if traits.comes_up:
            return self.intent is not Intent.LEAVING
        return traits.leaves and self.intent in (Intent.RESTARTING, Intent.RETURNING)

    @property
    def counts(self) -> bool:
        """It is capacity, now or soon."""
        return self.ready or self.on_its_way

    @property
    def stands_by(self) -> bool:
        """It sleeps, or will as soon as it can."""
        traits = TRAITS[self.state]
        comes_up = traits.comes_up and self.intent is not Intent.LEAVING
        again = traits.leaves and self.intent is Intent.RESTARTING
        return self.standby.wanted and (traits.standby or comes_up or again)

    @property
    def settled(self) -> bool:
        """It is what it is meant to be: it serves, or sleeps."""
        return self.ready or (TRAITS[self.state].asleep and self.standby.wanted)

    @property
    def cancellable(self) -> bool:
        """It is in a drain that can be taken back: it has served, its process lives, and it leaves for good."""
        return self.drains_from_service and self.intent is Intent.STEADY

    @property
    def drains_from_service(self) -> bool:
        """It drains, and served until then: the same process could be put back."""
        return self.state is WorkerState.DRAINING and self.health.served and not self.standby.drained

    @property
    def stays_as_template(self) -> bool:
        """The bare entry outlives its worker, so that the component can come back; a suffixed one goes with it."""
        return self.n == 0

    @property
    def wants_start(self) -> bool:
        """It starts as soon as it has its GPUs, and nothing of its last process is left."""
        due = self.state is WorkerState.PENDING or (self.due_s is None and not self.ended.waiting_for_infra)
        ended = self.ended
        clear = not (self.start.spawning or ended.sweeping or self.runs) and ended.gpus_pending_release is None
        return TRAITS[self.state].waits and due and clear


GROUP_OF: Mapping[str, str] = {
    each.name: group
    for group, record in {
        "registration": Registration,
        "health": Health,
        "start": Start,
        "leave": Leave,
        "ended": Ended,
    }.items()
    for each in fields(record)
}
"""The group of a worker's record in which a field is."""


@dataclass(frozen=True, slots=True)
class StartPace:
    """How fast processes are started: `at_once` without a pause, then one every `every_s`; `every_s` 0 is no bound.

    A start is some seconds of work for one core. On two cores, 64 at once take the time from etcd and from the arbiter;
    leases expire.
    """

    at_once: int = 1
    every_s: float = 0.0
    #: Until when the starts so far occupy the cores.
    busy_until_s: float = -math.inf

    def take(self, now_s: float) -> tuple[float, StartPace]:
        """When one more may start, and the pace after it (the generic cell rate algorithm, ITU-T I.371)."""
        if not self.every_s:
            return now_s, self
        busy_until_s = max(self.busy_until_s, now_s)
        turn_s = busy_until_s - (self.at_once - 1) * self.every_s
        return max(now_s, turn_s), replace(self, busy_until_s=busy_until_s + self.every_s)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A namespace: its templates, workers and GPUs."""

    namespace: str
    templates: tuple[Template, ...]
    #: Watcher name -> worker, in the order of the plan.
    workers: Mapping[str, Worker] = field(default_factory=dict)
    gpus: GpuLedger = GpuLedger()  # noqa: RUF009 - frozen
    #: The restarts under way.
    restarts: tuple[RestartPlan, ...] = ()
    policy: RestartPolicy = DEFAULT_POLICY
    #: A worker that answers nothing for so long is hung.
    health_bound_s: float = 30.0
    #: A worker whose lease somebody else has revoked is started again once it has left.
    restart_revoked: bool = False
    pace: StartPace = StartPace()
    #: Workers that left like that and were not started again, with their component, until a command decides about it.
    revoked: Mapping[str, str] = field(default_factory=dict)
    #: etcd and NATS answered when last seen.
    infra_ok: bool = True
    #: When the workers were last asked for their loads.
    sampled_s: float | None = None
    #: When the GPUs are sampled next, because a worker waits for some.
    look_s: float | None = None
    #: A sample is under way.
    looking: bool = False
    leaving: Leaving | None = None
    #: Components of which no more workers are started to sleep, and why.
    no_standby: Mapping[str, str] = field(default_factory=dict)
    #: Main memory that was free when last seen.
    host_free_bytes: int | Missing = Missing("not sampled")  # noqa: RUF009 - frozen

    def template(self, component: str) -> Template:
        """Raises `UnknownWorker` that lists the components there are."""
        for template in self.templates:
            if template.component == component:
                return template
        known = ", ".join(sorted(template.component for template in self.templates)) or "none"
        none = f"there is no component {component!r} in namespace {self.namespace}; there are: {known}"
        raise UnknownWorker(self._guest(component) or none)

    def template_of(self, worker: Worker) -> Template:
        """How one more like it is made."""
        return self.template(worker.component)

    def outdated(self, worker: Worker) -> bool:
        """It was started with another configuration than that of now."""
        return worker.start.launched not in ("", self.template_of(worker).fingerprint)

    def find(self, name: str) -> Worker | None:
        """The entry of that watcher name, if there is one; without the namespace (`VllmWorker_1`) will do.

        `VllmWorker` is the bare worker here. A caller that may also mean the component looks for that first.
        """
        return self.workers.get(name) or self.workers.get(f"{self.namespace}_{name}")

    def worker(self, name: str) -> Worker:
        """As `find`. Raises `UnknownWorker` that lists those there are."""
        worker = self.find(name)
        if worker is None:
            known = ", ".join(self.workers) or "none"
            none = f"there is no worker {name!r} in namespace {self.namespace}; there are: {known}"
            raise UnknownWorker(self._guest(name) or none)
        return worker

    def _guest(self, name: str) -> str | None:
        """Why there is no worker of a component that runs in another's processes; None for any other name."""
        guest = name.removeprefix(f"{self.namespace}_")
        return next((runs_within(guest, each.component) for each in self.templates if guest in each.guests), None)

    def of(self, component: str) -> tuple[Worker, ...]:
        """A component's entries, the bare one first."""
        return tuple(sorted((w for w in self.workers.values() if w.component == component), key=lambda w: w.n))

    def ready(self, component: str) -> tuple[Worker, ...]:
        """Those that serve."""
        return tuple(worker for worker in self.of(component) if worker.ready)

    def on_their_way(self, component: str) -> tuple[Worker, ...]:
        """Those that will serve."""
        coming = (
            worker for worker in self.workers.values() if worker.on_its_way and worker.target_component == component
        )
        return tuple(sorted(coming, key=lambda worker: (worker.flip is not None, worker.n)))

    def running(self) -> tuple[Worker, ...]:
        """Those that have a process."""
        return tuple(worker for worker in self.workers.values() if worker.runs)

    def capacity(self, component: str) -> int:
        """How many serve, or will."""
        return sum(worker.counts for worker in self.workers.values() if worker.target_component == component)

    def reserved(self) -> frozenset[str]:
        """Names that nobody new may have: of a flip under way, and of processes that were made under them and flipped.

        A process is known by the name in its environment: two of the same would be taken for each other.
        """
        workers = self.workers.values()
        made = (worker for worker in workers if worker.runs or worker.ended.sweeping)
        spawn_names = {worker.start.spawned_as for worker in made if worker.start.spawned_as is not None}
        return frozenset(spawn_names | {worker.flip.name for worker in workers if worker.flip is not None})

    def names_from_lowest(self, component: str) -> Iterator[tuple[str, int, Worker | None]]:
        """`(watcher name, suffix, entry or None)` from the bare name up, without end."""
        for n in count():
            name = watcher_name(self.namespace, component, n)
            yield name, n, self.workers.get(name)

    def promised(self) -> dict[str, int]:
        """Free devices that are kept for workers on their way that hold too few, by watcher name.

        A worker that backs off has given its GPUs back and will need them again.
        """
        needs = {template.component: template.gpus_per_worker for template in self.templates}
        coming = [w for w in self.workers.values() if w.on_its_way or (w.stands_by and not TRAITS[w.state].asleep)]
        lacking = {worker.name: needs.get(worker.component, 0) - len(worker.gpus) for worker in coming}
        return {name: lack for name, lack in lacking.items() if lack > 0}

    def gpus_coming_back(self) -> int:
        """Devices held by workers that leave for good, or fall asleep."""
        falls = WorkerState.FALLING_ASLEEP
        return sum(
            len(worker.gpus)
            for worker in self.workers.values()
            if not (worker.counts or worker.stands_by) or (worker.state is falls and worker.stands_by)
        )

    def with_workers(self, workers: Mapping[str, Worker]) -> Fleet:
        """The same fleet with these workers instead."""
        return replace(self, workers=workers)

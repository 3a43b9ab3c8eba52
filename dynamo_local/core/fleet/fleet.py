"""The fleet as a value: every worker, the components that they may belong to, and the GPUs.

All decisions are made from it, and `machine.step` makes the next one from it; nothing here ever changes.

Four kinds of worker matter to a count:

* *ready*: it serves;
* *on its way*: it does not serve now but will without anybody asking again: pending, starting, crashed or backing off
  (it is restarted), drained only to be restarted, or called back from a drain. Capacity on its way counts,
  or a slow load is answered by more and more workers (lesson 16);
* *on standby*: it sleeps, or is on its way to that; no capacity until it is woken. Asleep it holds no GPU, only what
  its process keeps there (`gpu_residue`);
* *leaving* or *faulted*: no capacity. What leaves still holds its GPUs (a GPU goes with the process).

Everything is counted by component. A component has one role, and requests are addressed to a component's endpoints:
another component of the same role cannot stand in for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from dynamo_local.core.fleet.backoff import DEFAULT_POLICY, RestartHistory, RestartPolicy
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import DEFAULT_VRAM_SHARE, GpuLedger
from dynamo_local.core.types import Load, Missing, Role, WorkerState, watcher_name
from dynamo_local.errors import UnknownWorker

# --- moving
# What is under way beside the states: one worker's change of role, and the whole run's leaving.


@dataclass(frozen=True, slots=True)
class FlipTarget:
    """A change of role that is under way: what the worker is to be called, in which component, with which suffix.

    `asking`: it is being asked now. `cancelled`: a person has taken it back, which may come too late.
    """

    name: str
    component: str
    n: int
    asking: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The whole run is leaving. `stage` is an index into `roles.STAGES`, beyond the last when all are gone.

    `now`: nothing is waited for any more.
    """

    stage: int = 0
    now: bool = False


# --- standby
# What a worker's record says about standby, and what a worker itself says about it in its ready key.


@dataclass(frozen=True, slots=True)
class Standby:
    """Part of a worker's record.

    `wanted`: it is to sleep, now or as soon as it can; it is no capacity then. `order` counts the orders to sleep or to
    wake that its process was given: what it says about an earlier one is out of date. `level` is that of the last order
    to sleep. `ask_s`: when the order is given again, because nobody knows whether it arrived. `cannot`: why its engine
    cannot sleep (None: it can, or nobody knows yet). `drained`: it was told to leave while it was on standby, so that
    there is no way back into routing. `host_bytes` is how much main memory level 1 took when it was rehearsed.
    """

    wanted: bool = False
    order: int = 0
    level: int = 1
    ask_s: float | None = None
    cannot: str | None = None
    drained: bool = False
    host_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class StandbyFacts:
    """What a worker says of itself. `order` is that of the last order that it has carried out.

    While it is `asleep`: the `level`; what it keeps on each of its devices and in main memory, in bytes, and the pids
    of its processes. `recycle` says why its process should be replaced (its memory has grown). `note` says why an order
    came to nothing. `rehearsed_bytes` is the main memory that level 1 took when it was rehearsed.
    """

    order: int = 0
    asleep: bool = False
    level: int = 1
    cannot: str | None = None
    vram_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    host_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    rehearsed_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen
    pids: frozenset[int] = frozenset()
    recycle: str | None = None
    note: str | None = None


# --- restart_plan
# What is left of a rolling restart: a value that the fleet carries, and the statefile keeps for a successor.


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What is left to restart, in order: `(watcher name, its Worker.starts when the plan was made)`.

    `begun` are those told to go or to start: one that serves again with its old process was called back by a person,
    and is skipped. `bring_back` are templates, named by a person: their having exited is no reason to leave them alone.
    `in_place` are those that go before anything takes their place, even as the last that serve. `substitutes` are
    workers that were started first, by the name of the one that leaves for good when they are ready. `stopped` says at
    which worker the sequence came to its end, and why.

    Of an `apply`, before all that: `removed` are workers that leave for good, of components that are wanted no more,
    once those that come instead (`awaited`) are ready.
    """

    stimulus_id: str
    todo: tuple[tuple[str, int], ...]
    begun: frozenset[str] = frozenset()
    bring_back: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()
    substitutes: Mapping[str, str] = field(default_factory=dict)
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
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
    """What was decided about a worker that its state alone does not say."""

    STEADY = "steady"
    RESTARTING = "restarting"
    """It drains, or is gone, only to be started again under the same name."""
    RETURNING = "returning"
    """Its drain is being taken back; it has not registered again yet. If it exits first, it is started again."""
    LEAVING = "leaving"
    """It crashed or timed out and is not started again: only the end of its process is waited for."""


@dataclass(frozen=True, slots=True)
class Template:
    """How one more worker of a component is made. `max_workers` is None where the class sets no bound.

    `fingerprint` stands for everything that a worker reads when it starts: with another one it would be started
    differently. `retired`: the component is wanted no more, and its template goes with its last worker. `flips_to` is
    the component whose role its workers can take over; where that is None, `cannot_flip` says why.
    `standby`: how many workers are kept asleep beside those that serve (None: its workers are not made to sleep).
    `vram_share` is the part of a device's memory that an awake worker takes. `guests` are the components that run in
    its workers' processes.
    """

    component: str
    role: Role
    gpus_per_worker: int = 0
    max_workers: int | None = None
    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    fingerprint: str = ""
    retired: bool = False
    flips_to: str | None = None
    cannot_flip: str = "no other component has an engine like its own"
    standby: int | None = None
    vram_share: float = DEFAULT_VRAM_SHARE
    guests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """A worker's process. `start_time` is seconds since boot (with the pid it identifies the process), None where it
    could not be read; `started_s` is of the arbiter's monotonic clock, `started_at` seconds since 1970."""

    pid: int
    start_time: float | None
    started_s: float
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
class Worker:
    """One entry. `n` is its suffix, 0 for the bare name; `gpus` are the UUIDs that the ledger says it holds.

    Times (`_s`) are of the arbiter's monotonic clock.

    `since_s` is when it entered its state; `reason` says why, in words; `cause` is the event of the last command
    that was carried out on it: a start that has to wait is still that command's. `starts` counts the processes that
    were committed under this name, failed ones included: a restart is done when it has grown; `launched` is its
    template's fingerprint when the last of them was (empty: not known). `served` says that its
    present process has been ready once, since `ready_s`. `lease` (hex) is the one that its keys are under,
    `other_leases` are those of what runs behind it (a command registers itself).

    Leaving: `drain_requested_at_s` is when we asked it to (None: its lease went away by itself, as `lease_gone` says).
    `silent_at_expiry`: the lease ended while the worker was silent. The worker may only have been suspended.
    `signalled`, that it was given the sign; `engine_failed`, that it has said that its engine has died, and
    `engine_said` why.

    What is waited for: `due_s` is the state's own deadline (a start, a drain, a back-off). `spawning`: its process is
    to be made; `spawn_begun`: it is being made, which cannot be called off any more. `exit`: its process has ended, and
    the registry is asked whether it left in order. `sweeping`: what its last process left behind is being ended.
    `gpus_pending_release`: its GPUs' memory comes back. `waiting_for_infra`: it starts when etcd and NATS answer again.
    `absent_s`: since when its key has been missing from a registry that lists all keys. `counting`: it is past its
    drain deadline and being asked what that will cut.

    Changing its role: `flip` is what it is about to become (None: nothing). `spawned_as` is the name under which its
    process was made, if that differs from its name of now. The process's environment and its log file have that name.

    Health: `heard_s` is when it first answered, or became ready (None: neither yet); `unheard_s` for how long it has
    not answered since, counting only time in which the arbiter asked; `silent_s` the same without the time in which it
    could not be asked (NATS was away).

    `standby` is what concerns sleeping.
    """

    name: str
    component: str
    role: Role
    n: int
    state: WorkerState = WorkerState.PENDING
    since_s: float = 0.0
    gpus: tuple[str, ...] = ()
    load: Load | Missing = Missing("not sampled")  # noqa: RUF009 - frozen
    intent: Intent = Intent.STEADY
    served: bool = False
    starts: int = 0
    launched: str = ""
    reason: str | None = None
    cause: str | None = None
    process: Process | None = None
    lease: str | None = None
    endpoints: tuple[str, ...] = ()
    other_leases: tuple[str, ...] = ()
    ready_s: float | None = None
    exit_code: int | None = None
    drain_requested_at_s: float | None = None
    lease_gone: bool = False
    silent_at_expiry: bool = False
    signalled: bool = False
    engine_failed: bool = False
    engine_said: str | None = None
    history: RestartHistory = RestartHistory()  # noqa: RUF009 - frozen
    failure: Failure | None = None
    due_s: float | None = None
    spawning: bool = False
    spawn_begun: bool = False
    exit: Exit | None = None
    sweeping: bool = False
    gpus_pending_release: GpusPendingRelease | None = None
    waiting_for_infra: bool = False
    absent_s: float | None = None
    counting: bool = False
    calls: int = 0
    heard_s: float | None = None
    unheard_s: float = 0.0
    silent_s: float = 0.0
    flip: FlipTarget | None = None
    spawned_as: str | None = None
    standby: Standby = Standby()

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
        return self.spawned_as or self.name

    @property
    def target_component(self) -> str:
        """The component for which it counts: the one that it goes to, while it changes its role."""
        return self.component if self.flip is None else self.flip.component

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.starts - 1)

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
        return self.state is WorkerState.DRAINING and self.served and not self.standby.drained

    @property
    def stays_as_template(self) -> bool:
        """The bare entry outlives its worker, so that the component can come back; a suffixed one goes with it."""
        return self.n == 0

    @property
    def wants_start(self) -> bool:
        """It starts as soon as it has its GPUs, and nothing of its last process is left."""
        due = self.state is WorkerState.PENDING or (self.due_s is None and not self.waiting_for_infra)
        clear = not (self.spawning or self.sweeping or self.runs) and self.gpus_pending_release is None
        return TRAITS[self.state].waits and due and clear


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers of a namespace by watcher name, in the order of the plan.

    `restarts` are the sequences under way. `infra_ok`: etcd and NATS answered when last seen. `sampled_s`: when the
    workers were last asked for their loads. `look_s`: when the GPUs are looked at next, because somebody waits for
    some; `looking`: that is under way. `health_bound_s`: who answers nothing for so long is hung. `restart_revoked`: a
    worker whose lease somebody else has revoked is started again once it has left; `revoked` are those that were not,
    by name with their component, until a command decides anew about that component. `no_standby` are components of
    which no more workers are started to sleep, and why. `host_free_bytes` is the main memory that was free when last
    seen.
    """

    namespace: str
    templates: tuple[Template, ...]
    workers: Mapping[str, Worker] = field(default_factory=dict)
    gpus: GpuLedger = GpuLedger()  # noqa: RUF009 - frozen
    restarts: tuple[RestartPlan, ...] = ()
    policy: RestartPolicy = DEFAULT_POLICY
    health_bound_s: float = 30.0
    restart_revoked: bool = False
    revoked: Mapping[str, str] = field(default_factory=dict)
    infra_ok: bool = True
    sampled_s: float | None = None
    look_s: float | None = None
    looking: bool = False
    leaving: Leaving | None = None
    no_standby: Mapping[str, str] = field(default_factory=dict)
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
        return worker.launched not in ("", self.template_of(worker).fingerprint)

    def find(self, name: str) -> Worker | None:
        """The entry of that watcher name, if there is one; without the namespace (`VllmWorker_1`) will do.

        `VllmWorker` is the bare worker here. Who may also mean the component looks for that first.
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
        made = (worker for worker in workers if worker.runs or worker.sweeping)
        born = {worker.spawned_as for worker in made if worker.spawned_as is not None}
        return frozenset(born | {worker.flip.name for worker in workers if worker.flip is not None})

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
        """Devices held by workers that leave for good."""
        return sum(len(worker.gpus) for worker in self.workers.values() if not (worker.counts or worker.stands_by))

    def with_workers(self, workers: Mapping[str, Worker]) -> Fleet:
        """The same fleet with these workers instead."""
        return replace(self, workers=workers)

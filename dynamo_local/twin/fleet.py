"""The arbiter's part of the twin: lifecycle table, GPU ledger and scaling decisions of `core`, and virtual processes.

What is not here: crashes, failed starts, processes that hang. Whatever is spawned is ready after the start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from dynamo_local.core import drains, scaling
from dynamo_local.core.fleet_view import Course, FleetView, Template, WorkerView
from dynamo_local.core.gpus import GpuDevice, GpuLedger
from dynamo_local.core.instructions import (
    BeginDrain,
    CancelDrain,
    Decision,
    Instruction,
    Revive,
    SpawnWorker,
    TakeBack,
    course_after,
    intent,
    stays_as_template,
)
from dynamo_local.core.lifecycle import (
    DrainCancelled,
    DrainDeadlinePassed,
    Event,
    ProcessExited,
    Registered,
    Spawned,
    SpawnRequested,
    apply,
)
from dynamo_local.core.types import Role, WorkerState, lease_hex, watcher_name
from dynamo_local.twin.agenda import Agenda, What
from dynamo_local.twin.options import DECODE, NAMESPACE, PREFILL, TwinOptions
from dynamo_local.twin.process import Process

LONG_AGO_S = -1e9
"""Since when the workers of the beginning have been ready: no grace period protects them."""


@dataclass(slots=True)
class Entry:
    """A worker as the statefile would have it. `instance_id` numbers its process, if it has one."""

    name: str
    component: str
    role: Role
    n: int
    state: WorkerState
    since_s: float
    course: Course = Course.STEADY
    starts: int = 0
    reason: str | None = None
    instance_id: int | None = None
    process: Process | None = None

    @property
    def served(self) -> bool:
        return self.process is not None


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


class VirtualFleet:
    """The workers. `make_process(instance_id, name, role)` gives one that is ready; `joined` and `leaving` tell the
    flow of requests about it, `gone` whose requests must be given up with it."""

    def __init__(
        self, options: TwinOptions, agenda: Agenda, make_process: Callable[[int, str, Role], Process], now_s: float
    ) -> None:
        self._options = options
        self._agenda = agenda
        self._make_process = make_process
        self._numbers = count(1)
        self._templates = _templates(options)
        self._ledger = GpuLedger([_device(index) for index in range(options.gpus)])
        self.entries: dict[str, Entry] = {}
        self.points: list[FleetPoint] = []
        self.joined: Callable[[Process, float], None] = lambda process, now_s: None
        self.cut: Callable[[Process, float], None] = lambda process, now_s: None
        for template in self._templates:
            workers = options.shape.prefill if template.role is Role.PREFILL else options.shape.decode
            for n in range(workers):
                self._begin_ready(template, n)
        self._note(now_s)

    def _begin_ready(self, template: Template, n: int) -> None:
        name = watcher_name(NAMESPACE, template.component, n)
        entry = Entry(name, template.component, template.role, n, WorkerState.READY, LONG_AGO_S, starts=1)
        entry.instance_id = next(self._numbers)
        entry.process = self._make_process(entry.instance_id, name, template.role)
        self._ledger.allocate(name, template.gpus_per_worker)
        self.entries[name] = entry

    # --- what can be seen ----------------------------------------------------------------------

    def view(self) -> FleetView:
        """The fleet at this moment, as decisions are made from it."""
        gpus = self._ledger.snapshot()
        workers = tuple(
            WorkerView(
                name=entry.name,
                component=entry.component,
                role=entry.role,
                n=entry.n,
                state=entry.state,
                since_s=entry.since_s,
                gpus=tuple(device.uuid for device in gpus.held.get(entry.name, ())),
                course=entry.course,
                served=entry.served,
                starts=entry.starts,
                reason=entry.reason,
            )
            for entry in self.entries.values()
        )
        return FleetView(NAMESPACE, self._templates, workers, gpus)

    def serving(self, *roles: Role) -> list[Process]:
        """The registered processes of these roles, in the order of their entries."""
        return [
            entry.process
            for entry in self.entries.values()
            if entry.process is not None and entry.role in roles and entry.process.serves
        ]

    # --- decisions -----------------------------------------------------------------------------

    def scale(self, component: str, step: int, now_s: float, stimulus_id: str) -> Decision:
        """One more or one less, as the planner's connector asks for it. A refusal is in the decision."""
        decision = scaling.decide(
            self.view(),
            component,
            scaling.Change(step, relative=True),
            stimulus_id=stimulus_id,
            by_person=False,
            wait_for_gpus=True,
        )
        for instruction in decision.instructions:
            self._commit(instruction, now_s, stimulus_id)
        for instruction in decision.instructions:
            self._act(instruction, now_s, stimulus_id)
        self._note(now_s)
        return decision

    def _commit(self, instruction: Instruction, now_s: float, stimulus_id: str) -> None:
        if isinstance(instruction, SpawnWorker):
            if not instruction.waits:
                self._ledger.allocate(instruction.name, instruction.gpus)
            role = next(t.role for t in self._templates if t.component == instruction.component)
            self.entries[instruction.name] = Entry(
                instruction.name, instruction.component, role, instruction.n, WorkerState.PENDING, now_s
            )
        entry = self.entries[instruction.name]
        view = next(worker for worker in self.view().workers if worker.name == entry.name)
        entry.course = course_after(view, instruction)
        if isinstance(instruction, BeginDrain | TakeBack):
            entry.reason = instruction.reason
        event = intent(instruction, entry.state, stimulus_id)
        if event is not None:
            self._apply(entry, event, now_s)

    def _act(self, instruction: Instruction, now_s: float, stimulus_id: str) -> None:
        entry = self.entries[instruction.name]
        if isinstance(instruction, SpawnWorker | Revive):
            self._start_pending(now_s, stimulus_id)
        elif isinstance(instruction, CancelDrain):
            self._call_back(entry, now_s, stimulus_id)
        elif entry.state is WorkerState.DRAINING:
            self._ask_to_leave(entry, now_s)
        elif entry.state is WorkerState.EXITED:
            self._remove(entry, now_s)

    def _apply(self, entry: Entry, event: Event, now_s: float) -> None:
        state = apply(entry.state, event)
        if state is not entry.state:
            entry.state, entry.since_s = state, now_s

    # --- starting ------------------------------------------------------------------------------

    def _start_pending(self, now_s: float, stimulus_id: str) -> None:
        """Spawn those that have, or now get, their GPUs; the one that has waited longest first."""
        pending = [entry for entry in self.entries.values() if entry.state is WorkerState.PENDING]
        for entry in sorted(pending, key=lambda entry: entry.since_s):
            needed = self._gpus_per_worker(entry.component)
            if entry.name not in self._ledger.holders():
                if len(self._ledger.free()) < needed:
                    continue
                self._ledger.allocate(entry.name, needed)
            entry.starts += 1
            entry.instance_id = next(self._numbers)
            self._apply(entry, SpawnRequested(stimulus_id=stimulus_id), now_s)
            self._apply(entry, Spawned(stimulus_id=stimulus_id, pid=entry.instance_id), now_s)
            self._agenda.add(now_s + self._options.start_up_s, What.STARTED, entry.instance_id)

    def started(self, instance_id: int, now_s: float) -> None:
        """Its start-up is over: it registers, unless it was taken back."""
        entry = self._of(instance_id)
        if entry is None or entry.state is not WorkerState.STARTING:
            return
        entry.process = self._make_process(instance_id, entry.name, entry.role)
        self._apply(entry, Registered(stimulus_id="registered", lease=lease_hex(instance_id)), now_s)
        self._note(now_s)
        self.joined(entry.process, now_s)

    # --- leaving -------------------------------------------------------------------------------

    def _ask_to_leave(self, entry: Entry, now_s: float) -> None:
        process = entry.process
        if process is None or entry.instance_id is None:
            self._exited(entry, now_s)
            return
        if process.deregistered_s is None:
            process.deregistered_s = now_s
            deadline_s = drains.leave_deadline_s(self._options.drain_deadline_s, served=True)
            self._agenda.add(now_s + deadline_s, What.DRAIN_DEADLINE, process.instance_id)
        self.check_exit(process, now_s)

    def _call_back(self, entry: Entry, now_s: float, stimulus_id: str) -> None:
        """The same process registers again, at once."""
        assert entry.process is not None
        entry.process.deregistered_s = None
        entry.course = Course.STEADY
        entry.reason = None
        self._apply(entry, DrainCancelled(stimulus_id=stimulus_id), now_s)
        self.joined(entry.process, now_s)

    def check_exit(self, process: Process, now_s: float) -> None:
        """Look at a leaving process again when it may be done; nothing for one that does not leave."""
        wait_s = process.exit_in_s(now_s)
        if wait_s is not None:
            self._agenda.add(now_s + wait_s, What.EXIT, process.instance_id)

    def exit_due(self, instance_id: int, now_s: float) -> None:
        """It goes, if it has nothing left to do."""
        entry = self._of(instance_id)
        if entry is None or entry.process is None:
            return
        wait_s = entry.process.exit_in_s(now_s)
        if wait_s == 0.0:
            self._exited(entry, now_s)
            self._note(now_s)
        elif wait_s is not None:
            self._agenda.add(now_s + wait_s, What.EXIT, instance_id)

    def drain_deadline(self, instance_id: int, now_s: float) -> None:
        """It is ended, with whatever it still has."""
        entry = self._of(instance_id)
        process = entry.process if entry is not None else None
        if entry is None or process is None or process.deregistered_s is None:
            return
        deadline_s = drains.leave_deadline_s(self._options.drain_deadline_s, served=True)
        if not drains.overdue(now_s=now_s, asked_s=process.deregistered_s, deadline_s=deadline_s):
            return  # called back meanwhile, and asked again
        passed = DrainDeadlinePassed(
            stimulus_id="drain-deadline", deadline_s=deadline_s, requests_cut=process.in_flight
        )
        self._apply(entry, passed, now_s)
        self._exited(entry, now_s)
        self.cut(process, now_s)
        self._note(now_s)

    def _exited(self, entry: Entry, now_s: float) -> None:
        gone = ProcessExited(stimulus_id=f"exit:{entry.instance_id}", exit_code=0)
        self._apply(entry, gone, now_s)
        entry.process = entry.instance_id = None
        self._remove(entry, now_s)

    def _remove(self, entry: Entry, now_s: float) -> None:
        """Its GPUs are free for whoever waits; a suffixed entry goes, the bare one stays as a template."""
        self._ledger.release(entry.name)
        entry.course = Course.STEADY
        view = next(worker for worker in self.view().workers if worker.name == entry.name)
        if not stays_as_template(view):
            del self.entries[entry.name]
        self._start_pending(now_s, "gpus-free")

    # --- helpers -------------------------------------------------------------------------------

    def _of(self, instance_id: int) -> Entry | None:
        return next((entry for entry in self.entries.values() if entry.instance_id == instance_id), None)

    def _gpus_per_worker(self, component: str) -> int:
        return next(t.gpus_per_worker for t in self._templates if t.component == component)

    def _note(self, now_s: float) -> None:
        held = self._ledger.holders()
        counts = {
            component: _count([e for e in self.entries.values() if e.component == component], held)
            for component in (PREFILL, DECODE)
        }
        gpus_held = sum(len(devices) for devices in held.values())
        point = FleetPoint(now_s, counts[PREFILL], counts[DECODE], gpus_held)
        if self.points and self.points[-1].at_s == now_s:
            self.points.pop()
        self.points.append(point)


def _count(entries: list[Entry], held: dict[str, tuple[GpuDevice, ...]]) -> RoleCount:
    states = [entry.state for entry in entries]
    coming = [entry for entry in entries if entry.state in (WorkerState.PENDING, WorkerState.STARTING)]
    starting = sum(entry.name in held for entry in coming)
    return RoleCount(
        ready=states.count(WorkerState.READY),
        starting=starting,
        waiting=len(coming) - starting,
        draining=states.count(WorkerState.DRAINING),
    )


def _templates(options: TwinOptions) -> tuple[Template, ...]:
    decode = Template(DECODE, options.decode_role, options.decode_gpus)
    if not options.shape.prefill:
        return (decode,)
    return (Template(PREFILL, Role.PREFILL, options.prefill_gpus), decode)


def _device(index: int) -> GpuDevice:
    return GpuDevice(index, f"GPU-twin-{index}", "twin", memory_total_bytes=0, memory_used_bytes=0)

"""What a decision tells the shell to do, and what the fleet looks like once that intent is committed.

The shell commits the intent first (`intent`: the lifecycle event, where there is one; the worker's `Course`),
then acts. An instruction says nothing about *how*: that is `core.drains` by role, and the shell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynamo_local.core import lifecycle as lc
from dynamo_local.core.fleet_view import Course, FleetView, WorkerView
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Make a new entry, take `gpus` devices from the ledger, start it.

    `waits`: the devices are still held by workers that leave; the entry stays pending until they are free.
    """

    name: str
    component: str
    n: int
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Revive:
    """Start an entry without a process again, under its name: faulted, backing off, a template, drained to restart."""

    name: str
    component: str
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Ask it to leave; with `restart` it is started again when it is gone. Legal also for one that drains already."""

    name: str
    reason: str = ""
    restart: bool = False


@dataclass(frozen=True, slots=True)
class CancelDrain:
    """Take the drain back: the same process registers again. It keeps its GPUs."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """It does not serve, and shall not any more: undo what is on its way, end the process if there is one.

    Starting: leave by SIGTERM (it may have registered in this moment), see `core.drains.leave_deadline_s`.
    Pending, backing off, faulted: no process; the entry goes, a bare one stays as the template.
    Crashed, start timed out: it is not started again. Drained for a restart: the drain goes on, no restart.
    """

    name: str
    reason: str = ""


Instruction = SpawnWorker | Revive | BeginDrain | CancelDrain | TakeBack


@dataclass(frozen=True, slots=True)
class Decision:
    """All of the instructions or, with `refused`, none. No instruction and no refusal: it is so already."""

    stimulus_id: str
    instructions: tuple[Instruction, ...] = ()
    refused: DynamoError | None = None

    def or_raise(self) -> tuple[Instruction, ...]:
        """The instructions; raises the refusal."""
        if self.refused is not None:
            raise self.refused
        return self.instructions


def stays_as_template(worker: WorkerView) -> bool:
    """The bare entry outlives its worker, so that the component can come back; a suffixed one goes with it."""
    return worker.n == 0


def intent(instruction: Instruction, state: S, stimulus_id: str) -> lc.Event | None:
    """The event that commits the instruction, for a worker in `state`; None where the state does not change now.

    None for `SpawnWorker` (its entry is made pending), for `CancelDrain` (`DrainCancelled` is observed, when it has
    registered again), for a drain under way, and for `TakeBack` of a worker whose process is still being ended
    (commit `Course.LEAVING`, and `Removed` once the process is gone).
    """
    match instruction:
        case Revive():
            return lc.RestartRequested(stimulus_id=stimulus_id)
        case BeginDrain(reason=reason) if state is not S.DRAINING:
            return lc.DrainRequested(stimulus_id=stimulus_id, reason=reason)
        case TakeBack(reason=reason) if state is S.STARTING:
            return lc.DrainRequested(stimulus_id=stimulus_id, reason=reason)
        case TakeBack() if state in (S.PENDING, S.BACKING_OFF, S.FAULTED):
            return lc.Removed(stimulus_id=stimulus_id)
    return None


def after(view: FleetView, instructions: Iterable[Instruction], now_s: float) -> FleetView:
    """The view once the intent of these instructions is committed: what the next decision is made from.

    The ledger's part stays: devices move when a process begins or ends. Raises `UnknownWorker` for a name that is
    not there, and `IllegalTransition` for an instruction that makes no sense for its worker.
    """
    workers = {worker.name: worker for worker in view.workers}
    for instruction in instructions:
        if isinstance(instruction, SpawnWorker):
            role = view.template(instruction.component).role
            workers[instruction.name] = WorkerView(
                instruction.name, instruction.component, role, instruction.n, S.PENDING, since_s=now_s
            )
            continue
        if instruction.name not in workers:
            view.worker(instruction.name)  # raises the error that lists the known ones
        changed = _changed(workers[instruction.name], instruction, now_s)
        if changed is None:
            del workers[instruction.name]
        else:
            workers[instruction.name] = changed
    return replace(view, workers=tuple(workers.values()))


def course_after(worker: WorkerView, instruction: Instruction) -> Course:
    """The worker's `Course` to commit with the instruction's intent."""
    match instruction:
        case BeginDrain(restart=True):
            return Course.RESTARTING
        case CancelDrain():
            return Course.RETURNING
        case TakeBack() if worker.state in (S.CRASHED, S.START_TIMED_OUT):
            return Course.LEAVING
    return Course.STEADY


def _changed(worker: WorkerView, instruction: Instruction, now_s: float) -> WorkerView | None:
    """The entry after the instruction's intent; None if there is none any more."""
    event = intent(instruction, worker.state, "after")
    state = worker.state if event is None else lc.apply(worker.state, event)
    gone = state is S.EXITED and isinstance(instruction, TakeBack)
    if gone and not stays_as_template(worker) and not worker.gpus:
        return None
    since_s = worker.since_s if state is worker.state else now_s
    served = worker.served and state is not S.PENDING
    return replace(worker, state=state, since_s=since_s, course=course_after(worker, instruction), served=served)

"""Commands: each is decided (`scaling`, `sleeping`, `flipping`, `restarting`), carried out, and answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import flipping, scaling, sleeping, starting
from dynamo_local.core.fleet import observed as observing
from dynamo_local.core.fleet import restarting as rolling
from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.effects import CallBack, Tell
from dynamo_local.core.fleet.events import Change, Drain, Restart, Resume, Scale, ScaleAll, Sleep, Wake
from dynamo_local.core.fleet.fleet import Intent, RestartPlan, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import Answer, Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import Actuator
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import NotEnoughGpus


def scale(builder: StepBuilder, command: Scale) -> Answer:
    """Raises the refusals of `scaling.decide`."""
    moves = scaling.decide(builder.fleet, command)
    carry_out(builder, moves)
    builder.decided_anew(component=command.component)
    return Answer(moves)


def scale_all(builder: StepBuilder, command: ScaleAll) -> Answer:
    """Every component to its number, or none. Raises the refusals of `scaling.decide`.

    Flips come first: they are the quickest, and no device changes hands. Next come scale-downs, because a scale-up may
    need their devices and waits until these are free. Drains are taken back last: that keeps devices from a worker
    that hoped for them.
    """
    flipped = _flipped(builder, command) if Actuator.FLIP in command.actuators else {}
    before, sleeps = builder.fleet, Actuator.WAKE in command.actuators

    def turn(item: tuple[str, int]) -> tuple[bool, bool]:
        component, count = item
        more = count >= before.capacity(component)
        return more, more and not any(worker.cancellable for worker in before.of(component))

    frees = scaling.gpus_to_free(before, command.targets, command.victim_policy)
    if sleeps:
        frees |= sleeping.wanted_gpus(before, command.targets)
    made: dict[str, tuple[Move, ...]] = {}
    for component, count in sorted(command.targets.items(), key=turn):
        one = Scale(
            stimulus_id=command.stimulus_id,
            component=component,
            target=Change(count, relative=False),
            victim_policy=command.victim_policy,
            by_person=False,
            wait_for_gpus=True,
            wake=sleeps,
            sleep=sleeps,
            frees=frees,
            reason=command.reasons.get(component),
        )
        made[component] = (*flipped.get(component, ()), *scale(builder, one).moves)
    for component, count in command.targets.items():
        if builder.fleet.capacity(component) != count:
            raise NotEnoughGpus(
                f"{component} cannot have {count} workers: GPUs that it waits for stay with workers whose drain would "
                "be taken back by the same order; nothing was changed"
            )
    return Answer(tuple(move for moves in made.values() for move in moves), made)


def _flipped(builder: StepBuilder, command: ScaleAll) -> dict[str, tuple[Move, ...]]:
    """As many workers as one component is to give up, and the other is to get, change their role; as far as they can.

    The moves of either component: they are both's.
    """
    missing = {component: count - builder.fleet.capacity(component) for component, count in command.targets.items()}
    for gives, surplus in missing.items():
        takes = builder.fleet.template(gives).flips_to
        if surplus >= 0 or takes not in missing:
            continue
        back = sum(worker.cancellable for worker in builder.fleet.of(takes))  # quicker still, and it keeps its devices
        count = min(-surplus, missing[takes] - back)
        moves = flipping.most(
            builder.fleet, gives, count, victim_policy=command.victim_policy, reason="scale, with flips"
        )
        carry_out(builder, moves)
        return dict.fromkeys((gives, takes), moves) if moves else {}
    return {}


def drain(builder: StepBuilder, command: Drain) -> Answer:
    """Raises the refusals of `scaling.decide_drain` and `scaling.decide_cancel`."""
    if command.cancel:
        moves = scaling.decide_cancel(builder.fleet, command)
        carry_out(builder, moves, answered=True)
        return Answer(moves)
    moves = scaling.decide_drain(builder.fleet, command)
    component = builder.fleet.worker(command.name).component
    carry_out(builder, moves)
    builder.decided_anew(component=component)
    return Answer(moves)


def sleep(builder: StepBuilder, command: Sleep) -> Answer:
    """Raises the refusals of `sleeping.decide_sleep`, and `LastReadyWorker`."""
    fleet, moves = builder.fleet, sleeping.decide_sleep(builder.fleet, command)
    going = [worker for move in moves if (worker := fleet.worker(move.name)).counts]
    scaling.check_not_last(fleet, going, command.force, f"`dynamo sleep {command.name}`")
    carry_out(builder, moves)
    return Answer(moves)


def wake(builder: StepBuilder, command: Wake) -> Answer:
    """Raises the refusals of `sleeping.decide_wake`, and `TooManyWorkers`."""
    moves = sleeping.decide_wake(builder.fleet, command)
    if moves:
        scaling.check_limit(builder.fleet, builder.fleet.worker(command.name).component)
    carry_out(builder, moves)
    return Answer(moves)


def restart(builder: StepBuilder, command: Restart) -> Answer:
    """Raises the refusals of `restarting.plan_restart`. The plan goes on by itself: `advance_restarts`."""
    plan = rolling.plan_restart(builder.fleet, command)
    for warning in plan.warnings:
        builder.do(Tell(warning))
    builder.set(restarts=(*builder.fleet.restarts, plan))
    return Answer(plan=plan)


def advance_restarts(builder: StepBuilder) -> None:
    """The next step of each restart that is under way, as far as the fleet is now."""
    if not builder.fleet.restarts:
        return
    cause = builder.stimulus_id
    going_on = [left for plan in builder.fleet.restarts if (left := _advanced(builder, plan)) is not None]
    builder.stimulus_id = cause
    builder.set(restarts=tuple(going_on))


def _advanced(builder: StepBuilder, plan: RestartPlan) -> RestartPlan | None:
    """The plan as it goes on; None when it has ended."""
    builder.stimulus_id = plan.stimulus_id
    while True:
        step, plan = rolling.next_step(builder.fleet, plan)
        if isinstance(step, rolling.Wait):
            return plan
        if isinstance(step, rolling.Stopped):
            text = f"restart stopped: {step.name}: {step.why}; those not yet restarted keep their old process"
            builder.do(Tell(text))
            return None
        if isinstance(step, rolling.Done):
            return None
        carry_out(builder, [step])


# --- moves -----------------------------------------------------------------------------------------


def carry_out(builder: StepBuilder, moves: Sequence[Move], *, answered: bool = False) -> None:
    """All of the moves. `answered`: a person waits for the answer of a drain that is taken back."""
    for move in moves:
        match move.kind:
            case M.SPAWN:
                _spawn(builder, move)
            case M.DRAIN:
                _begin_drain(builder, builder.worker(move.name), move)
            case M.TAKE_BACK:
                _take_back(builder, builder.worker(move.name), move)
            case M.CANCEL_DRAIN:
                _call_back(builder, builder.worker(move.name), builder.stimulus_id if answered else None)
            case M.SLEEP:
                sleeping.put_to_sleep(builder, builder.worker(move.name), move.level, move.reason)
            case M.WAKE:
                sleeping.wake_up(builder, builder.worker(move.name), move.reason)
            case M.FLIP | M.CANCEL_FLIP:
                flipping.carry_out(builder, move)


def _spawn(builder: StepBuilder, move: Move) -> None:
    if builder.get(move.name) is not None:
        starting.revive(builder, move.name, builder.stimulus_id)
        return
    role = builder.fleet.template(move.component).role
    builder.add(Worker(move.name, move.component, role, move.n, since_s=builder.now_s, cause=builder.stimulus_id))
    if move.waits:
        builder.look_at_gpus(builder.now_s + starting.GPU_POLL_S)
    else:
        starting.try_start(builder, move.name)


def _call_back(builder: StepBuilder, worker: Worker, requested_by: str | None) -> None:
    builder.change(worker.name, intent=Intent.RETURNING, cause=builder.stimulus_id, silent_at_expiry=False)
    if worker.pid is not None:
        builder.change(worker.name, calls=worker.leave.calls + 1)
        builder.do(CallBack(worker.name, worker.pid, worker.leave.signalled, requested_by))


def _begin_drain(builder: StepBuilder, worker: Worker, move: Move) -> None:
    kind = None if worker.state is S.DRAINING else K.DRAIN_REQUESTED
    intent = Intent.RESTARTING if move.restart else Intent.STEADY
    _record_intent(builder, worker, move, kind, intent, cause=builder.stimulus_id)
    leaving.ask(builder, worker.name)
    if builder.worker(worker.name).state is S.EXITED:
        starting.called_off(builder, worker.name)


def _take_back(builder: StepBuilder, worker: Worker, move: Move) -> None:
    """One without a process goes at once; of one whose process is being ended, or drains, only that is waited for."""
    if worker.state is S.STARTING:
        _begin_drain(builder, worker, move)
        return
    kind = K.REMOVED if worker.state in (S.PENDING, S.BACKING_OFF, S.FAULTED) else None
    intent = Intent.LEAVING if worker.state in (S.CRASHED, S.START_TIMED_OUT) else Intent.STEADY
    _record_intent(builder, worker, move, kind, intent, waiting_for_infra=False)
    worker = builder.worker(worker.name)
    if worker.state is S.EXITED and not worker.ended.sweeping:
        starting.remove(builder, worker.name)
    elif worker.runs and worker.state is S.DRAINING and worker.leave.requested_at_s is None:
        # Its lease was revoked by somebody else. Now it is our order, too: written down, and with a deadline.
        leaving.ask(builder, worker.name)


def _record_intent(
    builder: StepBuilder, worker: Worker, move: Move, kind: K | None, intent: Intent, **with_event: Any
) -> None:
    """Write down what is meant to become of the worker. `kind` is None where its state does not change now.

    `with_event`: fields that change only with a transition.
    """
    if kind is None:
        builder.change(worker.name, intent=intent, reason=move.reason, cause=builder.stimulus_id)
    else:
        details = {"reason": move.reason} if kind is K.DRAIN_REQUESTED else {}
        builder.apply(worker.name, kind, details, intent=intent, reason=move.reason, due_s=None, **with_event)


# --- a successor -----------------------------------------------------------------------------------


def resume(builder: StepBuilder, order: Resume) -> None:
    """Go on with every worker where the killed arbiter stood. The registry has been looked through."""
    for worker in builder.workers():
        observing.left_unseen(builder, worker)
    for name in order.gone:
        starting.ended_unseen(builder, name)
    for worker in builder.workers():
        name = worker.name
        if name in order.gone:
            continue
        if worker.runs:
            _resume_running(builder, worker)
        elif worker.state is S.PENDING:
            starting.regain_gpus(builder, name)  # the memory of its last process may be on its way back
        elif worker.state is S.BACKING_OFF:
            starting.backoff_over(builder, worker)
        elif worker.state is S.FAULTED:
            starting.give_back(builder, name, keep=False)
        else:
            starting.after_process(builder, name)


def _resume_running(builder: StepBuilder, worker: Worker) -> None:
    if worker.state is S.STARTING:
        deadline_s = builder.template(worker.name).start_deadline_s
        builder.change(worker.name, due_s=builder.now_s + deadline_s)
    elif worker.state is S.DRAINING and worker.intent is Intent.RETURNING:
        # It may never have heard that it was called back. Its deadline is watched either way: a call back may fail.
        builder.change(worker.name, due_s=builder.now_s + builder.template(worker.name).drain_deadline_s)
        _call_back(builder, worker, requested_by=None)
    elif worker.state is S.DRAINING:
        if not worker.leave.lease_gone:  # else it leaves by itself, and takes the time that it needs
            leaving.ask(builder, worker.name)
    elif worker.state is S.FLIPPING:
        flipping.ask(builder, worker)
    elif TRAITS[worker.state].standby:
        sleeping.resume(builder, worker)
    elif worker.state is not S.READY:
        leaving.finish(builder, worker)  # as was decided
    elif worker.lease is None:
        # The registry has been looked through, and does not know it: nothing is routed to it.
        observing.unregistered(builder, worker, "", "its lease was revoked, or has expired, while nobody watched")

"""Flips: a worker changes its role, its component and its name, and stays the same process.

Only a ready worker flips, and only to the component that its template names: their engines are alike. The worker counts
for `target_component` from the moment of the decision. Unforced, the component that it leaves keeps a ready worker. Its
new name is the lowest free one of that component. A worker that a restart or an apply has still to come to does not
flip: its new process would have the old role.

    READY --FlipRequested--> FLIPPING --Flipped--> READY, renamed
                                \\--FlipFailed--> READY, as it was

The intent is committed before the worker is asked. Its ready key under the new name, or its answer, shows that it has
flipped. Then name, role and component change in one step and one commit. If nobody can tell (NATS or etcd is away, the
arbiter was killed), the worker is asked again: its answer says how far it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.effects import CallOffFlip, FlipRole, Rename, Revoke, Tell
from dynamo_local.core.fleet.events import Flip, FlipAnswered, ScaleFlip, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, FlipTarget, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import Answer, Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.scaling import victims
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import (
    BadTarget,
    BeingRestarted,
    DynamoError,
    FlipNotCancellable,
    LastReadyWorker,
    NotFlippable,
    TooManyWorkers,
)

AGAIN_S = 1.0
"""One whose answer did not come is asked again after this."""


# --- decisions ---------------------------------------------------------------------------------


def decide(view: Fleet, command: Flip) -> tuple[Move, ...]:
    """None for a worker that flips already.

    Raises `UnknownWorker`, `NotFlippable`, `LastReadyWorker`, `TooManyWorkers` or `BeingRestarted`.
    """
    worker = view.worker(command.name)
    if worker.flip is not None and not worker.flip.cancelled:
        return ()
    return _flipped(view, [worker], command.force, "flip")


def decide_scale(view: Fleet, command: ScaleFlip) -> tuple[Move, ...]:
    """That many ready workers of `gives` go over to `takes`, chosen by the victim policy.

    Raises as `decide` does, and `BadTarget` if there are not so many.
    """
    gives, count = command.gives, command.count
    template, other = view.template(gives), view.template(command.takes)
    if count < 1:
        raise BadTarget(f"{count} is no number of workers: 1 or more")
    _check_flips(template.component, template.flips_to, template.cannot_flip)
    if template.flips_to != other.component:
        raise NotFlippable(f"a worker of {gives} can become one of {template.flips_to}, not of {command.takes}")
    ready = victims(view.ready(gives), command.victim_policy)
    if count > len(ready):
        raise BadTarget(f"{count} workers of {gives} cannot flip: {len(ready)} are ready")
    return _flipped(view, ready[:count], command.force, f"scale {gives} -{count} --flip")


def most(view: Fleet, gives: str, count: int, *, victim_policy: VictimPolicy, reason: str) -> tuple[Move, ...]:
    """At most so many ready workers of that component go over to the one that it flips to: as many as can, unforced."""
    able = victims(able_to_flip(view, gives), victim_policy)
    for n in range(min(count, len(able)), 0, -1):
        try:
            return _flipped(view, able[:n], force=False, reason=reason)
        except DynamoError:  # it would be the last that serves, or one too many over there
            continue
    return ()


def able_to_flip(view: Fleet, component: str) -> list[Worker]:
    """Its ready workers that may change their role now, each for itself."""
    if view.template(component).flips_to is None:
        return []

    def may(worker: Worker) -> bool:
        try:
            _check_may_flip(view, worker)
        except DynamoError:
            return False
        return True

    return [worker for worker in view.ready(component) if may(worker)]


def decide_cancel(view: Fleet, command: Flip) -> tuple[Move, ...]:
    """Raises `UnknownWorker` or `FlipNotCancellable`."""
    worker = view.worker(command.name)
    if worker.flip is None:
        raise FlipNotCancellable(
            f"{worker.name} does not change its role: it is {worker.state}; to have it back, flip it again"
        )
    return () if worker.flip.cancelled else (Move(M.CANCEL_FLIP, worker.name, "flip --cancel"),)


def _flipped(view: Fleet, chosen: Sequence[Worker], force: bool, reason: str) -> tuple[Move, ...]:
    for worker in chosen:
        _check_may_flip(view, worker)
    _check_not_last(view, chosen, force, reason)
    target = view.template_of(chosen[0]).flips_to or ""
    if view.template(target).retired:
        raise NotFlippable(f"{target} is wanted no more, as an apply has said: nobody becomes one of its workers")
    limit = view.template(target).max_workers
    if limit is not None and view.capacity(target) + len(chosen) > limit:
        raise TooManyWorkers(f"{target} would have more than the {limit} workers that its class allows")
    moves: list[Move] = []
    taken = set(view.reserved())
    for worker in chosen:
        name, n = _name_for(view, worker, target, taken)
        taken.add(name)
        moves.append(Move(M.FLIP, worker.name, reason, becomes=FlipTarget(name, target, n)))
    return tuple(moves)


def _name_for(view: Fleet, worker: Worker, component: str, taken: set[str]) -> tuple[str, int]:
    for name, n, entry in view.names_from_lowest(component):
        mine = worker.start.spawned_as == name
        if (mine or name not in taken) and (entry is None or _is_template(entry)):
            return name, n
    raise AssertionError("names have no end")


def _is_template(entry: Worker) -> bool:
    """A bare entry that nothing runs under, nor is cleared away."""
    busy = entry.on_its_way or entry.ended.sweeping or entry.ended.gpus_pending_release is not None or entry.gpus
    return entry.state is S.EXITED and entry.n == 0 and not busy


def _check_flips(component: str, flips_to: str | None, why: str) -> None:
    if flips_to is None:
        raise NotFlippable(f"a worker of {component} cannot change its role: {why}")


def _check_may_flip(view: Fleet, worker: Worker) -> None:
    template = view.template_of(worker)
    _check_flips(worker.component, template.flips_to, template.cannot_flip)
    if not worker.ready:
        raise NotFlippable(f"{worker.name} is {worker.state}: only a worker that is ready can change its role")
    if worker.standby.wanted:
        raise NotFlippable(f"{worker.name} is about to be put to sleep; `dynamo wake {worker.name}` first")
    if view.outdated(worker):
        raise NotFlippable(
            f"{worker.name} runs with another configuration than that of now: whether its engine fits nobody "
            f"knows; `dynamo restart {worker.name}` first"
        )
    for plan in view.restarts:
        named = {name for name, _ in plan.todo} | set(plan.substitutes.values()) | {*plan.awaited, *plan.removed}
        if worker.name in named:
            raise BeingRestarted(f"{plan.stimulus_id} is under way, and has still to come to {worker.name}")


def _check_not_last(view: Fleet, going: Sequence[Worker], force: bool, what: str) -> None:
    names = {worker.name for worker in going}
    component = going[0].component
    if force or any(worker.name not in names for worker in view.ready(component)):
        return
    raise LastReadyWorker(
        f"`{what}` of {', '.join(sorted(names))} is refused: it would leave {component} ({going[0].role}) without a "
        f"ready worker; add one first (`dynamo scale {component} +1`), or insist with --force",
        worker=going[0].name,
        component=component,
    )


# --- carrying out --------------------------------------------------------------------------------


def flip(builder: StepBuilder, command: Flip) -> Answer:
    """Raises the refusals of `decide` and `decide_cancel`."""
    decision = decide_cancel if command.cancel else decide
    return _carry_out_all(builder, decision(builder.fleet, command))


def scale_flip(builder: StepBuilder, command: ScaleFlip) -> Answer:
    """Raises the refusals of `decide_scale`."""
    return _carry_out_all(builder, decide_scale(builder.fleet, command))


def _carry_out_all(builder: StepBuilder, moves: Sequence[Move]) -> Answer:
    for move in moves:
        carry_out(builder, move)
    return Answer(tuple(moves))


def carry_out(builder: StepBuilder, move: Move) -> None:
    """A move of the kinds `FLIP` and `CANCEL_FLIP`."""
    worker = builder.worker(move.name)
    if move.becomes is None:
        _call_off(builder, worker)
        return
    _begin(builder, worker, move.becomes)
    builder.decided_anew(component=worker.component)
    builder.decided_anew(component=move.becomes.component)


def _begin(builder: StepBuilder, worker: Worker, to: FlipTarget) -> None:
    what: dict[str, Any] = {"flip": to, "reason": f"becomes {to.name}", "cause": builder.stimulus_id, "due_s": None}
    builder.apply(worker.name, K.FLIP_REQUESTED, {"becomes": to.name}, **what)
    ask(builder, builder.worker(worker.name))


def _call_off(builder: StepBuilder, worker: Worker) -> None:
    if worker.flip is not None and worker.pid is not None:
        builder.change(worker.name, flip=replace(worker.flip, cancelled=True), cause=builder.stimulus_id)
        builder.do(CallOffFlip(worker.name, worker.pid))


def ask(builder: StepBuilder, worker: Worker) -> None:
    """Ask the worker to flip, or how far it is."""
    if worker.flip is None or worker.pid is None:
        return
    builder.change(worker.name, flip=replace(worker.flip, asking=True), due_s=None)
    builder.do(FlipRole(worker.name, worker.pid, worker.flip.name, worker.flip.component))
    if worker.flip.cancelled:
        builder.do(CallOffFlip(worker.name, worker.pid))


def answered(builder: StepBuilder, seen: FlipAnswered) -> None:
    """Take the worker's answer. If nobody can tell, ask again: the worker, its key, or its end will tell."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid or worker.flip is None or worker.flip.name != seen.to:
        return  # its new key was seen first, or it has ended
    if seen.unknown:
        again = replace(worker.flip, asking=False)
        builder.change(worker.name, flip=again, due_s=builder.now_s + AGAIN_S)
    elif seen.error is not None or seen.lease is None:
        _failed(builder, worker, seen.error or "it is not registered in its new role")
    else:
        become(builder, worker, seen.lease, seen.endpoints, ())


def awaited(builder: StepBuilder, name: str, pid: int) -> Worker | None:
    """The worker that is about to become `name`, if its process is the one that has registered under it."""
    found = (w for w in builder.workers() if w.flip is not None and w.flip.name == name and w.pid == pid)
    return next((worker for worker in found if worker.state is S.FLIPPING), None)


def become(
    builder: StepBuilder, worker: Worker, lease: str, endpoints: tuple[str, ...], other_leases: tuple[str, ...]
) -> None:
    """It has registered in its new role: name, role and component change, all else stays."""
    target = worker.flip
    if target is None or worker.pid is None:
        return
    fleet, was, old_lease = builder.fleet, worker.name, worker.lease
    template = fleet.template(target.component)
    before = fleet.template_of(worker)
    current = worker.start.launched in ("", before.fingerprint)
    builder.rename(
        was,
        target.name,
        component=target.component,
        role=template.role,
        n=target.n,
        flip=None,
        spawned_as=None if worker.spawn_name == target.name else worker.spawn_name,
        launched=template.fingerprint if current and worker.start.launched else worker.start.launched,
        due_s=None,
        absent_s=None,
    )
    if worker.stays_as_template and not before.retired:  # the component keeps the entry by which it can come back
        rest = Worker(was, worker.component, worker.role, 0, S.EXITED, since_s=builder.now_s, cause=builder.stimulus_id)
        builder.add(rest)
    registered: dict[str, Any] = {"lease": lease, "endpoints": endpoints, "other_leases": other_leases, "reason": None}
    builder.apply(target.name, K.FLIPPED, {"was": was, "lease": lease}, **registered)
    builder.do(Rename(target.name, was, worker.pid))
    if old_lease is not None and old_lease != lease:  # the worker gives it back itself; its watcher may be stopped
        builder.do(Revoke(target.name, old_lease))
    if worker.flip is not None and worker.flip.cancelled:
        builder.do(Tell(f"the flip of {was} was taken back too late: it is {target.name} now"))


def _failed(builder: StepBuilder, worker: Worker, why: str) -> None:
    cancelled = worker.flip is not None and worker.flip.cancelled
    builder.apply(worker.name, K.FLIP_FAILED, {"reason": why}, flip=None, reason=None, due_s=None)
    if not cancelled:
        builder.do(Tell(f"the flip of {worker.name} has failed, it stays what it was: {why}"))

"""What follows a flip: a worker changes its role, its component and its name, and stays the same process.

    READY --FlipRequested--> FLIPPING --Flipped--> READY, renamed
                                \\--FlipFailed--> READY, as it was

The intent is committed before the worker is asked. That it has flipped is observed: its ready key under the new name,
or its answer, whichever comes first. Then name, role and component change in one step and one commit. While nobody can
tell (NATS or etcd is away, the arbiter was killed) it is asked again: the question is the same as the first, and the
answer says how far it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet import flip_decisions as flips
from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.effects import CallOffFlip, FlipRole, Rename, Revoke, Tell
from dynamo_local.core.fleet.events import CancelFlip, Flip, FlipAnswered, ScaleFlip
from dynamo_local.core.fleet.fleet import Fleet, FlipTarget, Worker
from dynamo_local.core.fleet.lifecycle import FlipFailed, Flipped, FlipRequested
from dynamo_local.core.fleet.moves import CallOffFlipOf, FlipWorker, Move
from dynamo_local.core.types import WorkerState as S

AGAIN_S = 1.0
"""One whose answer did not come is asked again after this."""


def decided(fleet: Fleet, order: Flip | ScaleFlip | CancelFlip) -> tuple[Move, ...]:
    """The moves. Raises the refusals of `flips`."""
    match order:
        case Flip():
            decision = flips.decide(fleet, order.name, stimulus_id=order.stimulus_id, force=order.force)
        case CancelFlip():
            decision = flips.decide_cancel(fleet, order.name, stimulus_id=order.stimulus_id)
        case ScaleFlip():
            decision = flips.decide_scale(
                fleet,
                order.gives,
                order.takes,
                order.count,
                stimulus_id=order.stimulus_id,
                force=order.force,
                victim_policy=order.victim_policy,
            )
    return decision.or_raise()


def flip(builder: StepBuilder, order: Flip | ScaleFlip | CancelFlip) -> None:
    """Raises the refusals of `flips`."""
    for move in decided(builder.fleet, order):
        if isinstance(move, FlipWorker | CallOffFlipOf):
            carry_out(builder, move)


def carry_out(builder: StepBuilder, move: FlipWorker | CallOffFlipOf) -> None:
    """One of the moves."""
    if isinstance(move, CallOffFlipOf):
        _call_off(builder, builder.worker(move.name))
        return
    _begin(builder, move)
    builder.decided_anew(component=builder.worker(move.name).component)
    builder.decided_anew(component=move.component)


def _begin(builder: StepBuilder, move: FlipWorker) -> None:
    event = FlipRequested(stimulus_id=builder.stimulus_id, becomes=move.to)
    target = FlipTarget(move.to, move.component, move.n)
    builder.apply(move.name, event, flip=target, cause=builder.stimulus_id, reason=f"becomes {move.to}", due_s=None)
    ask(builder, builder.worker(move.name))


def _call_off(builder: StepBuilder, worker: Worker) -> None:
    if worker.flip is not None and worker.pid is not None:
        builder.change(worker.name, flip=replace(worker.flip, cancelled=True), cause=builder.stimulus_id)
        builder.do(CallOffFlip(worker.name, worker.pid))


def ask(builder: StepBuilder, worker: Worker) -> None:
    """Ask the worker to flip, or how far it is."""
    if worker.flip is None or worker.pid is None:
        return
    builder.change(worker.name, write=False, flip=replace(worker.flip, asking=True), due_s=None)
    builder.do(FlipRole(worker.name, worker.pid, worker.flip.name, worker.flip.component))
    if worker.flip.cancelled:
        builder.do(CallOffFlip(worker.name, worker.pid))


def answered(builder: StepBuilder, seen: FlipAnswered) -> None:
    """What the worker said. Where nobody can tell it is asked again: it, its key, or its end will tell."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid or worker.flip is None or worker.flip.name != seen.to:
        return  # its new key was seen first, or it has ended
    if seen.unknown:
        again = replace(worker.flip, asking=False)
        builder.change(worker.name, write=False, flip=again, due_s=builder.now_s + AGAIN_S)
    elif seen.error is not None or seen.lease is None:
        _failed(builder, worker, seen.error or "it is not registered in its new role")
    else:
        become(builder, worker, seen.lease, seen.endpoints, ())


def awaited(builder: StepBuilder, name: str, pid: int) -> Worker | None:
    """Who is about to be called `name`, if that is the process that has registered under it."""
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
    current = worker.launched in ("", before.fingerprint)
    builder.rename(
        was,
        target.name,
        component=target.component,
        role=template.role,
        n=target.n,
        flip=None,
        spawned_as=None if worker.spawn_name == target.name else worker.spawn_name,
        launched=template.fingerprint if current and worker.launched else worker.launched,
        due_s=None,
        absent_s=None,
    )
    if worker.stays_as_template and not before.retired:  # the component keeps the entry by which it can come back
        rest = Worker(was, worker.component, worker.role, 0, S.EXITED, since_s=builder.now_s, cause=builder.stimulus_id)
        builder.add(rest)
    registered: dict[str, Any] = {"lease": lease, "endpoints": endpoints, "other_leases": other_leases, "reason": None}
    builder.apply(target.name, Flipped(stimulus_id=builder.stimulus_id, was=was, lease=lease), **registered)
    builder.do(Rename(target.name, was, worker.pid))
    if old_lease is not None and old_lease != lease:  # the worker gives it back itself; its watcher may be stopped
        builder.do(Revoke(target.name, old_lease))
    if worker.flip is not None and worker.flip.cancelled:
        builder.do(Tell(f"the flip of {was} was taken back too late: it is {target.name} now"))


def _failed(builder: StepBuilder, worker: Worker, why: str) -> None:
    cancelled = worker.flip is not None and worker.flip.cancelled
    event = FlipFailed(stimulus_id=builder.stimulus_id, reason=why)
    builder.apply(worker.name, event, flip=None, reason=None, due_s=None)
    if not cancelled:
        builder.do(Tell(f"the flip of {worker.name} has failed, it stays what it was: {why}"))

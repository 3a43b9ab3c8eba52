"""`flip`, `flip --cancel` and `scale … --flip` as decisions: a view of the fleet in, moves or a typed refusal out.

The rules, in prose:

* Only a ready worker flips, and only to the component that its template names: their engines are alike, which was
  found out before anything was started.
* It counts for the component that it goes to from the moment of the decision; unforced, the component that it leaves
  keeps a worker that serves.
* Its new name is the lowest of that component which nobody has: not a live process either that was made under it.
* A worker that a restart or an apply has still to come to does not flip: its new process would be of the old role.
* `scale … --flip` takes as many workers from the one component as it gives to the other: all of them flip, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.moves import CallOffFlipOf, FlipWorker, Move, ScalingDecision
from dynamo_local.core.fleet.scaling import VictimPolicy, victims
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import (
    BadTarget,
    BeingRestarted,
    DynamoError,
    FlipNotCancellable,
    LastReadyWorker,
    NotFlippable,
    TooManyWorkers,
)


def decide(view: Fleet, name: str, *, stimulus_id: str, force: bool = False) -> ScalingDecision:
    """`dynamo flip NAME`. Nothing for one that flips already.

    `refused` is `UnknownWorker`, `NotFlippable`, `LastReadyWorker`, `TooManyWorkers` or `BeingRestarted`.
    """
    try:
        worker = view.worker(name)
        if worker.flip is not None and not worker.flip.cancelled:
            return ScalingDecision(stimulus_id)
        return ScalingDecision(stimulus_id, _flipped(view, [worker], force, "flip"))
    except DynamoError as refusal:
        return ScalingDecision(stimulus_id, refused=refusal)


def decide_scale(
    view: Fleet, gives: str, takes: str, count: int, *, stimulus_id: str, force: bool, victim_policy: VictimPolicy
) -> ScalingDecision:
    """So many ready workers of `gives` go over to `takes`, those first that the policy names.

    `refused` is as for `decide`, or `UnknownWorker` (no such component), `BadTarget` (there are not so many).
    """
    try:
        template, other = view.template(gives), view.template(takes)
        _check_flips(template.component, template.flips_to, template.cannot_flip)
        if template.flips_to != other.component:
            raise NotFlippable(f"a worker of {gives} can become one of {template.flips_to}, not of {takes}")
        ready = victims(view.ready(gives), victim_policy)
        if count > len(ready):
            raise BadTarget(f"{count} workers of {gives} cannot flip: {len(ready)} are ready")
        return ScalingDecision(stimulus_id, _flipped(view, ready[:count], force, f"scale {gives} -{count} --flip"))
    except DynamoError as refusal:
        return ScalingDecision(stimulus_id, refused=refusal)


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


def decide_cancel(view: Fleet, name: str, *, stimulus_id: str) -> ScalingDecision:
    """`dynamo flip --cancel NAME`. `refused` is `UnknownWorker` or `FlipNotCancellable`."""
    try:
        worker = view.worker(name)
        if worker.flip is None:
            raise FlipNotCancellable(
                f"{worker.name} does not change its role: it is {worker.state}; to have it back, flip it again"
            )
        moves: tuple[Move, ...] = () if worker.flip.cancelled else (CallOffFlipOf(worker.name, "flip --cancel"),)
        return ScalingDecision(stimulus_id, moves)
    except DynamoError as refusal:
        return ScalingDecision(stimulus_id, refused=refusal)


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
        moves.append(FlipWorker(worker.name, name, target, n, reason))
    return tuple(moves)


def _name_for(view: Fleet, worker: Worker, component: str, taken: set[str]) -> tuple[str, int]:
    for name, n, entry in view.names_from_lowest(component):
        mine = worker.spawned_as == name
        if (mine or name not in taken) and (entry is None or _is_template(entry)):
            return name, n
    raise AssertionError("names have no end")


def _is_template(entry: Worker) -> bool:
    """A bare entry that nothing runs under, nor is cleared away."""
    busy = entry.on_its_way or entry.sweeping or entry.gpus_pending_release is not None or entry.gpus
    return entry.state is WorkerState.EXITED and entry.n == 0 and not busy


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

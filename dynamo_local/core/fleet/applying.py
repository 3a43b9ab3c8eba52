"""`dynamo apply`: another deployment in place of the one that runs, without a moment in which no worker serves.

One step replaces the templates, brings components to their numbers of workers, and makes a plan. `restarting` carries
the plan out, in this order:

1. New workers become ready.
2. Components that are wanted no more leave.
3. Each worker that was started with another configuration gets a new process.

All of it happens, or nothing. Unless forced, an apply is refused that would leave a component without a ready worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dynamo_local.core.fleet import commands as deciding
from dynamo_local.core.fleet import scaling, starting
from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.events import Apply, Change, Scale
from dynamo_local.core.fleet.fleet import Fleet, RestartPlan, Template, Worker
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError, NotApplicable


def apply(builder: StepBuilder, order: Apply) -> None:
    """Raises `NotApplicable` with all reasons."""
    reasons = list(_busy(builder.fleet))
    _replace_templates(builder, order)
    there = set(builder.fleet.workers)
    removed = [worker for worker in builder.workers() if builder.template(worker.name).retired]
    late = frozenset(each.name for each in removed if builder.template(each.name).shared_floor is not None)
    if order.force:  # their devices may be needed
        _remove(builder, removed)
    reasons += _to_counts(builder, order)
    awaited = tuple(name for name in builder.fleet.workers if name not in there)
    fits, in_place = _fitting(builder.fleet, removed, order.force)
    reasons += fits
    if reasons:
        raise NotApplicable.because(reasons)
    plan = RestartPlan(
        order.stimulus_id,
        tuple((worker.name, worker.start.starts) for worker in outdated(builder.fleet)),
        in_place=in_place,
        awaited=awaited,
        removed=tuple(worker.name for worker in removed),
        late=late,
    )
    builder.set(no_standby={}, restarts=(plan,), policy=order.policy, health_bound_s=order.health_bound_s)
    builder.head = True


def outdated(fleet: Fleet) -> list[Worker]:
    """Those that need a new process, in the order in which they get one.

    Workers that need fewer GPUs than before go first. Next, workers that serve requests go before those that pass them
    on (the last in the graph's order first), and workers that are not ready before those that are.
    """
    order = [template.component for template in fleet.templates]
    there = [w for w in fleet.workers.values() if w.counts or w.stands_by]
    found = [w for w in there if fleet.outdated(w) and not fleet.template_of(w).retired]
    return sorted(found, key=lambda w: (_more_gpus(fleet, w), -order.index(w.component), w.ready, -w.n))


def _more_gpus(fleet: Fleet, worker: Worker) -> int:
    return fleet.template_of(worker).gpus_per_worker - len(worker.gpus)


def _busy(fleet: Fleet) -> Iterator[str]:
    for plan in fleet.restarts:
        left = ", ".join(dict.fromkeys((*plan.awaited, *plan.removed, *(name for name, _ in plan.todo))))
        yield f"{plan.stimulus_id} is under way, and has not come to {left}: wait until it is done"
    for worker in fleet.workers.values():
        if worker.flip is not None:
            yield f"{worker.name} becomes {worker.flip.name} at this moment: wait until it has"


def _replace_templates(builder: StepBuilder, order: Apply) -> None:
    wanted = {template.component for template in order.templates}
    gone = [replace(each, retired=True) for each in builder.fleet.templates if each.component not in wanted]
    builder.set(templates=(*order.templates, *gone))
    for template in gone:
        if not builder.fleet.of(template.component):
            _forget(builder, template)
    for worker in builder.workers():  # a template without a worker: its entry goes at once
        comes = worker.on_its_way or worker.stands_by
        rests = worker.state is S.EXITED and not (comes or worker.ended.sweeping or worker.ended.gpus_pending_release)
        if rests and builder.template(worker.name).retired:
            starting.remove(builder, worker.name)


def _forget(builder: StepBuilder, template: Template) -> None:
    builder.set(templates=tuple(each for each in builder.fleet.templates if each != template))


def _remove(builder: StepBuilder, removed: list[Worker]) -> None:
    for worker in removed:
        if worker.counts or worker.stands_by or worker.state is S.FAULTED:
            deciding.carry_out(builder, [scaling.taken(worker, "apply: its component is removed")])


def _to_counts(builder: StepBuilder, order: Apply) -> Iterator[str]:
    """Fewer first: their devices may be needed."""
    now = {component: builder.fleet.capacity(component) for component in order.counts}
    for component, count in sorted(order.counts.items(), key=lambda item: item[1] - now[item[0]]):
        one = Scale(
            stimulus_id=order.stimulus_id,
            component=component,
            target=Change(count, relative=False),
            force=order.force,
            wait_for_gpus=True,
        )
        try:
            moves = scaling.decide(builder.fleet, one)
        except DynamoError as refusal:
            yield f"{component}: {refusal}"
        else:
            deciding.carry_out(builder, moves)


def _fitting(fleet: Fleet, removed: list[Worker], force: bool) -> tuple[list[str], frozenset[str]]:
    """Why workers cannot get new processes one after the other, counting devices; and who goes before its substitute is
    there, because it can have none (forced)."""
    reasons: list[str] = []
    in_place: set[str] = set()
    there = [fleet.workers[worker.name] for worker in removed if worker.name in fleet.workers]
    coming = sum(len(worker.gpus) for worker in there if worker.counts)  # of the others it is counted as coming back
    free = len(fleet.gpus.free) + fleet.gpus_coming_back() + coming - sum(fleet.promised().values())
    for worker in outdated(fleet):
        if worker.stands_by:  # nobody waits for one that is to sleep again
            continue
        template = fleet.template_of(worker)
        needs, has = template.gpus_per_worker, len(worker.gpus)
        limit = template.max_workers
        alone = worker.ready and fleet.capacity(worker.component) == 1
        too_many = limit is not None and limit < 2
        if alone and (too_many or needs > free):
            why = (
                "it can have one worker only" if too_many else f"{needs} GPUs would have to be free, {max(0, free)} are"
            )
            if not force:
                reasons.append(
                    f"{worker.name} needs a new process and is the only worker of {worker.component}, which would be "
                    f"gone until that is ready; another one cannot be started first: {why}; --force takes the gap"
                )
                continue
            in_place.add(worker.name)
        free += has - needs
        if free < 0:
            reasons.append(f"{worker.name} needs {needs} GPUs, {-free} more than there will be")
            free = 0
    return reasons, frozenset(in_place)

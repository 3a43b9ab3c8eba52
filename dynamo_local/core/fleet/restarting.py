"""`dynamo restart [--rolling] NAME|COMPONENT`: one worker at a time gets a new process, and somebody always serves.

A worker with a sibling that serves is drained and started again under its name: it needs no spare GPU, its devices are
its own again. Always one after the other; `--rolling` only says so. As long as a sibling is on its way, the restart
waits for it.

The only worker of a component is replaced instead. Its substitute is started first, under another name and on other
devices. When that is ready, the old one leaves for good. If no substitute is possible (no GPU is free, or the component
has one port), the restart is refused. Forced, the component has no ready worker until the new process is ready.

If the new process is faulted, the sequence stops: the siblings go on serving with the old configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynamo_local.core.fleet.events import Restart
from dynamo_local.core.fleet.fleet import Fleet, Intent, RestartPlan, Worker
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.scaling import flip_under_way, one_more, taken
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import Role
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError, LastReadyWorker, NotRestartable


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until the fleet changes."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every worker was restarted, or skipped because it left, or was called back, while the restart was under way."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The new process of `name` is faulted; those still in the plan keep their old one."""

    name: str
    why: str


Step = Move | Wait | Done | Stopped


def plan_restart(view: Fleet, command: Restart) -> RestartPlan:
    """A plan for the worker, or all workers of the component, of that name.

    For a component, workers that are not ready come first (a fault is cleared, capacity comes before it goes), then the
    highest suffix. Leaving workers and the template are left alone. A template that is named is brought back.
    Raises `UnknownWorker`, or `NotRestartable` for a worker that is leaving or a component without workers.
    """
    target, force = command.name, command.force
    if any(template.component == target for template in view.templates):
        chosen = [w for w in view.of(target) if w.counts or w.stands_by or w.state is S.FAULTED]
        if not chosen:
            raise NotRestartable(f"{target} has no worker to restart; `dynamo scale {target} +1` starts one")
    else:
        worker = view.worker(target)
        if not (worker.counts or worker.stands_by) and worker.state not in (S.FAULTED, S.EXITED):
            raise NotRestartable(
                f"{worker.name} is leaving ({worker.state}); take that back first (`dynamo drain {worker.name} "
                f"--cancel`), or start another one (`dynamo scale {worker.component} +1`)"
            )
        chosen = [worker]
    turning = next((w for w in chosen if w.flip is not None), None)
    if turning is not None:
        raise flip_under_way(turning, f"`dynamo restart {target}`")
    for worker in chosen:
        if worker.state is S.EXITED and worker.name in view.reserved():
            raise NotRestartable(
                f"{worker.name} is the name under which a process was made that has another role now; `dynamo scale "
                f"{worker.component} +1` starts one under a name that is free"
            )
    chosen.sort(key=lambda w: (w.ready, -w.n))
    last = [w for w in chosen if w.ready and view.capacity(w.component) == 1]
    if last and not force and len(chosen) == 1:
        check_replaceable(view, last[0], f"`dynamo restart {target}`")
    warnings = tuple(
        f"{w.name} is the only worker of {w.component}: until it is ready again, requests to it have nowhere to go"
        for w in (last if force else ())
    )
    todo = tuple((w.name, w.start.starts) for w in chosen)
    bring_back = frozenset(w.name for w in chosen if w.state is S.EXITED and not w.counts)
    in_place = frozenset(w.name for w in chosen) if force else frozenset()
    return RestartPlan(command.stimulus_id, todo, bring_back=bring_back, in_place=in_place, warnings=warnings)


def check_replaceable(view: Fleet, worker: Worker, what: str) -> None:
    """Raise `LastReadyWorker` where the only worker that serves cannot have a substitute; `what` is refused then."""
    try:
        one_more(view, worker.component, "")
    except DynamoError as error:
        raise LastReadyWorker(
            f"{what} is refused: {worker.name} is the only worker of {worker.component}, so its requests "
            f"would have nowhere to go. No other worker can be started first: {error}. Insist with --force",
            worker=worker.name,
            component=worker.component,
        ) from None


def next_step(view: Fleet, plan: RestartPlan) -> tuple[Step, RestartPlan]:
    """The step to take now, and the plan to ask with after the next change of the fleet.

    Commit the step, then ask with the returned plan. A drained worker is started again by `starting.after_process`, so
    that a restart comes back even if the sequence is lost. A spawn here is for what has no process to drain.
    Bounded because what it waits for is: drains and starts have deadlines, back-offs end in a start or a fault.
    """
    late = tuple(name for name in plan.removed if name in plan.late)
    if plan.awaited or len(plan.removed) > len(late):
        step, plan = _swapped(view, plan, late)
        if step is not None:
            return step, plan
    while plan.todo and plan.stopped is None:
        name, starts = plan.todo[0]
        worker, substitute = view.find(name), plan.substitutes.get(name)
        if substitute is not None and name in plan.begun and (worker is None or not worker.counts):
            plan = replace(plan, todo=plan.todo[1:], done=(*plan.done, name))
            continue
        if worker is None or _called_off(view, worker, starts, plan):
            plan = replace(plan, todo=plan.todo[1:], skipped=(*plan.skipped, name))
            continue
        if substitute is not None:
            return _replaced(view, worker, view.workers[substitute], plan)
        begun_asleep = worker.stands_by and name in plan.begun  # nobody waits for one that is to sleep again
        if begun_asleep or (worker.settled and worker.start.starts > starts):
            plan = replace(plan, todo=plan.todo[1:], done=(*plan.done, name))
            continue
        step = _new_process(worker) if worker.start.starts > starts else _old_process(view, worker, plan)
        if not isinstance(step, Move):
            return step, plan
        if step.name != name:
            return step, replace(plan, substitutes={**plan.substitutes, name: step.name})
        return step, replace(plan, begun=plan.begun | {name})
    if late and plan.stopped is None:
        step = _leaving_frontend(view) or _leaving(view, late)
        if step is not None:
            return step, plan
    return (Done() if plan.stopped is None else Stopped(*plan.stopped)), plan


def _leaving_frontend(view: Fleet) -> Wait | None:
    """A Frontend that drains still dispatches the requests that it holds, and those of connections that clients keep.

    The drain has a deadline. Past it the Frontend is killed, and nothing is waited for any more.
    """
    for worker in view.workers.values():
        if worker.role is Role.FRONTEND and TRAITS[worker.state].drains:
            return Wait(worker.name, f"it is {worker.state}, and may still send requests to removed models")
    return None


def _swapped(view: Fleet, plan: RestartPlan, late: tuple[str, ...]) -> tuple[Step | None, RestartPlan]:
    """New workers become ready first, then those that are wanted no more leave; `late` ones at the end of the plan."""
    for name in plan.awaited:
        worker = view.workers.get(name)
        if worker is not None and worker.state is S.FAULTED:
            return Stopped(name, worker.reason or "it is faulted"), plan
        if worker is not None and worker.on_its_way:
            return Wait(name, f"it is {worker.state}"), plan
    plan = replace(plan, awaited=())
    step = _leaving(view, tuple(name for name in plan.removed if name not in late))
    return step, plan if step is not None else replace(plan, removed=late)


def _leaving(view: Fleet, removed: tuple[str, ...]) -> Step | None:
    """The next of them that is asked to leave. None: all are."""
    for name in removed:
        worker = view.workers.get(name)
        if worker is not None and (worker.counts or worker.stands_by or worker.state is S.FAULTED):
            return taken(worker, "apply: its component is removed")
    return None


def _called_off(view: Fleet, worker: Worker, starts: int, plan: RestartPlan) -> bool:
    """It, or its substitute, leaves for good, or it was to be restarted and a person took that back."""
    if worker.name in plan.substitutes:
        substitute = view.workers.get(plan.substitutes[worker.name])
        lost = substitute is None or not (substitute.counts or substitute.state is S.FAULTED)
        return lost or worker.name in plan.begun or not (worker.counts or worker.runs)
    if worker.state is S.FAULTED or (worker.state is S.EXITED and worker.name in plan.bring_back - plan.begun):
        return False
    if worker.intent is Intent.RETURNING:
        return True
    if not (worker.counts or worker.stands_by):
        return True
    return worker.settled and worker.start.starts == starts and worker.name in plan.begun


def _replaced(view: Fleet, worker: Worker, substitute: Worker, plan: RestartPlan) -> tuple[Step, RestartPlan]:
    """The old one leaves when the new one serves; a new one that is faulted is taken away again."""
    if substitute.state is S.FAULTED:
        why = substitute.reason or "it is faulted"
        step = Move(M.TAKE_BACK, substitute.name, f"restart of {worker.name}: {why}")
        return step, replace(plan, stopped=(substitute.name, why))
    if not worker.counts:  # its lease went by itself: it leaves, or comes back
        return Wait(worker.name, f"it is {worker.state}, without our having asked it"), plan
    if substitute.ready:
        step = taken(worker, f"restart: {substitute.name} serves in its place")
        return step, replace(plan, begun=plan.begun | {worker.name})
    return Wait(substitute.name, f"it is {substitute.state}, and takes the place of {worker.name}"), plan


def _new_process(worker: Worker) -> Step:
    if worker.state is S.FAULTED:
        return Stopped(worker.name, worker.reason or "it is faulted")
    return Wait(worker.name, f"it is {worker.state}, started anew")


def _old_process(view: Fleet, worker: Worker, plan: RestartPlan) -> Step:
    if worker.state is S.FAULTED and worker.name in plan.begun:
        return Stopped(worker.name, worker.reason or "it is faulted")
    if worker.state in (S.FAULTED, S.BACKING_OFF, S.EXITED) and worker.name not in plan.begun:
        return Move(M.SPAWN, worker.name, f"restart: it was {worker.state}", component=worker.component, n=worker.n)
    if worker.state is S.STARTING:
        return Move(M.DRAIN, worker.name, "restart", restart=True)
    if TRAITS[worker.state].asleep and worker.standby.wanted:
        return Move(M.DRAIN, worker.name, "restart", restart=True)
    if not worker.ready:
        return Wait(worker.name, f"it is {worker.state}")
    siblings = [w for w in view.of(worker.component) if w.name != worker.name]
    serving = any(w.ready and not w.standby.wanted for w in siblings)  # one that is to sleep is ready for this step
    if worker.name in plan.in_place or serving:
        return Move(M.DRAIN, worker.name, "restart", restart=True)
    coming = next((w for w in siblings if w.on_its_way), None)
    if coming is not None:
        return Wait(coming.name, f"{worker.name} is the last ready worker until {coming.name} is ready")
    try:
        return one_more(view, worker.component, f"restart of {worker.name}")
    except DynamoError as error:
        return Stopped(worker.name, f"it is the only worker, and no other one can be started first: {error}")

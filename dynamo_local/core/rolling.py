"""`dynamo restart [--rolling] NAME|COMPONENT`: one worker at a time is drained and started again under its name.

It needs no spare GPU: a worker's devices are its own again. Always one after the other; `--rolling` only says so.

The last ready worker of a component is restarted, with a warning and without `--force`: a restart comes back, that is
what was asked for, and a component of one worker (each frontend) could not be restarted otherwise. But as long as a
sibling is on its way, the restart waits for it (unless forced): the gap is never wider than it must be.

Where the new process is faulted the sequence stops: the siblings go on serving with the old configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynamo_local.core.fleet_view import Course, FleetView, WorkerView
from dynamo_local.core.instructions import BeginDrain, Revive
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import NotRestartable


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What is left to restart, in order: `(watcher name, its WorkerView.starts when the plan was made)`.

    `begun` are those told to go or to start: one that serves again with its old process was called back by a person,
    and is skipped. `bring_back` are templates, named by a person: their having exited is no reason to leave them alone.
    """

    stimulus_id: str
    todo: tuple[tuple[str, int], ...]
    begun: frozenset[str] = frozenset()
    bring_back: frozenset[str] = frozenset()
    force: bool = False
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until the fleet changes."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """All have been restarted, or were skipped because they left, or were called back, meanwhile."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The new process of `name` is faulted; those still in the plan keep their old one."""

    name: str
    why: str


Step = BeginDrain | Revive | Wait | Done | Stopped


def plan_restart(view: FleetView, target: str, *, stimulus_id: str, force: bool = False) -> RestartPlan:
    """A plan for the worker, or all workers of the component, of that name.

    Of a component: what does not serve first (a fault is cleared, capacity comes before it goes), then by the highest
    suffix; leaving workers and the template are left alone. Of a name: a template is brought back.
    Raises `UnknownWorker`, or `NotRestartable` for a worker that is leaving or a component without workers.
    """
    if any(template.component == target for template in view.templates):
        chosen = [w for w in view.of(target) if w.counts or w.state is S.FAULTED]
        if not chosen:
            raise NotRestartable(f"{target} has no worker to restart; `dynamo scale {target} +1` starts one")
    else:
        worker = view.worker(target)
        if not worker.counts and worker.state not in (S.FAULTED, S.EXITED):
            raise NotRestartable(
                f"{worker.name} is leaving ({worker.state}); take that back first (`dynamo drain {worker.name} "
                f"--cancel`), or start another one (`dynamo scale {worker.component} +1`)"
            )
        chosen = [worker]
    chosen.sort(key=lambda w: (w.ready, -w.n))
    warnings = tuple(
        f"{w.name} is the only worker of {w.component}: until it is ready again, requests to it have nowhere to go"
        for w in chosen
        if w.ready and view.capacity(w.component) == 1
    )
    todo = tuple((w.name, w.starts) for w in chosen)
    bring_back = frozenset(w.name for w in chosen if w.state is S.EXITED and not w.counts)
    return RestartPlan(stimulus_id, todo, bring_back=bring_back, force=force, warnings=warnings)


def next_step(view: FleetView, plan: RestartPlan) -> tuple[Step, RestartPlan]:
    """What to do now, and the plan to ask with after the next change of the fleet.

    Commit the step, then ask with the returned plan. A drained worker is started again by `core.drains.at_exit`, so
    that a restart comes back even if the sequence is lost; `Revive` here is for what has no process to drain.
    Bounded because what it waits for is: drains and starts have deadlines, back-offs end in a start or a fault.
    """
    while plan.todo:
        name, starts = plan.todo[0]
        worker = view.find(name)
        if worker is None or _called_off(worker, starts, plan):
            plan = replace(plan, todo=plan.todo[1:], skipped=(*plan.skipped, name))
            continue
        if worker.ready and worker.starts > starts:
            plan = replace(plan, todo=plan.todo[1:], done=(*plan.done, name))
            continue
        step = _new_process(worker) if worker.starts > starts else _old_process(view, worker, plan)
        begun = plan.begun | {name} if isinstance(step, BeginDrain | Revive) else plan.begun
        return step, replace(plan, begun=begun)
    return Done(), plan


def _called_off(worker: WorkerView, starts: int, plan: RestartPlan) -> bool:
    """It leaves for good, or it was to be restarted and a person took that back."""
    if worker.state is S.FAULTED or (worker.state is S.EXITED and worker.name in plan.bring_back - plan.begun):
        return False
    if worker.course is Course.RETURNING:
        return True
    return not worker.counts or (worker.ready and worker.starts == starts and worker.name in plan.begun)


def _new_process(worker: WorkerView) -> Step:
    if worker.state is S.FAULTED:
        return Stopped(worker.name, worker.reason or "it is faulted")
    return Wait(worker.name, f"it is {worker.state}, started anew")


def _old_process(view: FleetView, worker: WorkerView, plan: RestartPlan) -> Step:
    if worker.state is S.FAULTED and worker.name in plan.begun:
        return Stopped(worker.name, worker.reason or "it is faulted")
    if worker.state in (S.FAULTED, S.BACKING_OFF, S.EXITED) and worker.name not in plan.begun:
        gpus = view.template(worker.component).gpus_per_worker
        return Revive(worker.name, worker.component, gpus, reason=f"restart: it was {worker.state}")
    if worker.state is S.STARTING:
        return BeginDrain(worker.name, "restart", restart=True)
    if not worker.ready:
        return Wait(worker.name, f"it is {worker.state}")
    siblings = [w for w in view.of(worker.component) if w.name != worker.name]
    if not plan.force and not any(w.ready for w in siblings):
        coming = next((w for w in siblings if w.on_its_way), None)
        if coming is not None:
            return Wait(coming.name, f"{worker.name} is the last ready worker until {coming.name} is ready")
    return BeginDrain(worker.name, "restart", restart=True)

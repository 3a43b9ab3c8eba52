"""`scale`, `drain` and `restart`: a view of the fleet, a decision of `core`, its intent committed, then the deeds.

One decision at a time, so that each is made from what the last one committed; what they set in motion runs side by
side. The calls return once the intent is committed. The planner calls the same (`LocalConnector`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core import rolling, scaling
from dynamo_local.core.fleet_view import Course, FleetView, Template, WorkerView
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
)
from dynamo_local.core.lifecycle import Event, SpawnRequested
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.core.victims import VictimPolicy
from dynamo_local.errors import BadInput, DynamoError, GpuError
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.operations import Operations
from dynamo_local.serve.plan import WorkerPlanner
from dynamo_local.state import RestartEntry

KINDS: dict[type[Instruction], str] = {
    SpawnWorker: "spawn",
    Revive: "spawn",
    BeginDrain: "drain",
    CancelDrain: "cancel_drain",
    TakeBack: "take_back",
}


class Scaler:
    """Carries decisions out on the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        pool: GpuPool,
        planner: WorkerPlanner,
        operations: Operations,
        clock: Clock,
        *,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._planner = planner
        self._operations = operations
        self._clock = clock
        self._background = background
        self._tell = tell
        self._deciding = asyncio.Lock()
        self.on_manual: Callable[[str], None] = lambda stimulus_id: None
        """Called when a person's command has changed something: whoever plans by itself holds still for a while."""

    def view(self) -> FleetView:
        """The fleet at this moment, as a value."""
        graph = self._planner.graph
        templates = tuple(
            Template(spec.name, spec.role, spec.resources.gpu, spec.max_workers) for spec in graph.services
        )
        workers = tuple(_view_of(worker) for worker in self._fleet.workers.values())
        return FleetView(graph.namespace, templates, workers, self._pool.ledger.snapshot())

    # --- commands ------------------------------------------------------------------------------

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool = False,
        victim_policy: str | None = None,
        stimulus_id: str,
        by_person: bool = True,
        wait_for_gpus: bool = False,
    ) -> dict[str, Any]:
        """Bring a component to a number of workers. Raises the refusals of `core.scaling.decide`."""
        change = scaling.parse_target(target)
        policy = _policy(victim_policy)

        def decide(view: FleetView) -> Decision:
            return scaling.decide(
                view,
                component,
                change,
                stimulus_id=stimulus_id,
                force=force,
                victim_policy=policy,
                by_person=by_person,
                wait_for_gpus=wait_for_gpus,
            )

        instructions = await self._carry_out(decide, stimulus_id, by_person=by_person)
        view = self.view()
        return {
            "component": component,
            "instructions": _as_json(instructions),
            "ready": len(view.ready(component)),
            "target": view.capacity(component),
        }

    async def drain(self, name: str, *, cancel: bool = False, force: bool = False, stimulus_id: str) -> dict[str, Any]:
        """Drain a worker, or take its drain back (then the answer comes when it has registered again).

        `name` may be without the namespace; the answer has the whole one.
        """
        found = self.view().find(name)
        name = name if found is None else found.name

        def decide(view: FleetView) -> Decision:
            if cancel:
                return scaling.decide_cancel(view, name, stimulus_id=stimulus_id)
            return scaling.decide_drain(view, name, stimulus_id=stimulus_id, force=force)

        instructions = await self._carry_out(decide, stimulus_id, wait_for_cancel=cancel)
        worker = self._fleet.workers.get(name)
        state = "removed" if worker is None else str(worker.state)
        return {"watcher_name": name, "state": state, "instructions": _as_json(instructions)}

    async def restart(
        self, target: str, *, rolling_: bool = False, force: bool = False, stimulus_id: str
    ) -> dict[str, Any]:
        """Drain one worker, start it with the configuration of now, then the next; needs no spare GPU."""
        plan = rolling.plan_restart(self.view(), target, stimulus_id=stimulus_id, force=force)
        for warning in plan.warnings:
            self._tell(warning)
        self.on_manual(stimulus_id)
        await self._note_restart(plan)
        self._background(self._restart(plan))
        return {"workers": [name for name, _ in plan.todo], "warnings": list(plan.warnings)}

    def resume_restarts(self, entries: Iterable[RestartEntry]) -> None:
        """Go on with those of a killed arbiter: the workers are adopted."""
        for entry in entries:
            self._tell(f"the restart that was under way goes on: {', '.join(entry.todo)}")
            self._background(self._restart(_plan(entry)))

    async def _note_restart(self, plan: rolling.RestartPlan, *, ended: bool = False) -> None:
        """Into the statefile: a successor goes on with it."""
        head = self._fleet.head
        entries = {entry.stimulus_id: entry for entry in head.restarts or ()}
        if ended:
            entries.pop(plan.stimulus_id, None)
        else:
            entries[plan.stimulus_id] = _entry(plan)
        restarts = list(entries.values()) or None
        if restarts != head.restarts:
            head.restarts = restarts
            await self._fleet.commit_head()

    async def _restart(self, plan: rolling.RestartPlan) -> None:
        while True:
            async with self._deciding:
                step, plan = rolling.next_step(self.view(), plan)
                if isinstance(step, BeginDrain | Revive):
                    await self._commit([step], plan.stimulus_id)
                # After the step: one that is noted as begun, and was not, would be taken for called back.
                await self._note_restart(plan, ended=isinstance(step, rolling.Stopped | rolling.Done))
            if isinstance(step, BeginDrain | Revive):
                self._act(step, plan.stimulus_id)
            elif isinstance(step, rolling.Stopped):
                self._tell(f"restart stopped: {step.name}: {step.why}; those not yet restarted keep their old process")
                return
            elif isinstance(step, rolling.Done):
                return
            else:
                await self._fleet.changed()

    # --- carrying out --------------------------------------------------------------------------

    async def _carry_out(
        self,
        decide: Callable[[FleetView], Decision],
        stimulus_id: str,
        *,
        wait_for_cancel: bool = False,
        by_person: bool = True,
    ) -> tuple[Instruction, ...]:
        async with self._deciding:
            await self._pool.refresh()
            instructions = decide(self.view()).or_raise()
            await self._commit(instructions, stimulus_id)
        if by_person and instructions:
            self.on_manual(stimulus_id)
        for instruction in instructions:
            if wait_for_cancel and isinstance(instruction, CancelDrain):
                await self._call_back(self._fleet.workers[instruction.name], stimulus_id)
            else:
                self._act(instruction, stimulus_id)
        return instructions

    async def _commit(self, instructions: Iterable[Instruction], stimulus_id: str) -> None:
        """All of it in one commit, or nothing: GPUs that another namespace took meanwhile undo the whole decision."""
        instructions = list(instructions)
        self._take_gpus(instructions)
        events: dict[str, Event] = {}
        for instruction in instructions:
            worker = self._fleet.workers[instruction.name]
            worker.course = course_after(_view_of(worker), instruction)
            if isinstance(instruction, BeginDrain | TakeBack):
                worker.reason = instruction.reason
                if worker.runs and worker.asked_s is None:
                    worker.asked_s = self._clock.now_s()
            if isinstance(instruction, SpawnWorker) and not instruction.waits:  # it has its GPUs: one commit for both
                event: Event | None = SpawnRequested(stimulus_id=stimulus_id)
            else:
                event = intent(instruction, worker.state, stimulus_id)
            if event is not None:
                events[instruction.name] = event
        await self._fleet.apply(events)
        await self._fleet.commit([i.name for i in instructions if i.name not in events])
        self._fleet.notify()

    def _take_gpus(self, instructions: list[Instruction]) -> None:
        made: list[str] = []
        try:
            for instruction in instructions:
                if isinstance(instruction, SpawnWorker):
                    spec = self._planner.graph.service(instruction.component)
                    count = 0 if instruction.waits else instruction.gpus
                    devices = self._pool.allocate(instruction.name, count) if count else ()
                    self._fleet.add(self._planner.plan(spec, instruction.name, devices))
                    made.append(instruction.name)
        except GpuError:
            for name in made:
                self._pool.let_go(name, self._fleet.workers.pop(name).gpus)
            raise

    def _act(self, instruction: Instruction, stimulus_id: str) -> None:
        worker = self._fleet.workers.get(instruction.name)
        if worker is None:
            return
        ops = self._operations
        if isinstance(instruction, SpawnWorker):
            start = ops.start_when_possible if instruction.waits else ops.spawn
            self._background(start(worker, stimulus_id))
        elif isinstance(instruction, Revive):
            self._background(ops.bring_back(worker, stimulus_id))
        elif isinstance(instruction, CancelDrain):
            self._background(ops.draining.called_back(worker, stimulus_id))
        elif worker.runs:
            self._background(ops.draining.ask_to_leave(worker, stimulus_id))
        elif isinstance(instruction, TakeBack) and worker.state is WorkerState.EXITED:
            self._background(ops.remove(worker))  # it had no process; what follows an exit, follows it by itself

    async def _call_back(self, worker: Worker, stimulus_id: str) -> None:
        """A person waits for this answer: where it is no, the worker just leaves, and nothing is started instead."""
        try:
            await self._operations.draining.call_back(worker, stimulus_id)
        except DynamoError:
            if worker.course is Course.RETURNING:
                worker.course = Course.STEADY
            raise


def _view_of(worker: Worker) -> WorkerView:
    suffix = re.search(r"_(\d+)$", worker.name)
    return WorkerView(
        name=worker.name,
        component=worker.plan.component,
        role=worker.plan.role,
        n=int(suffix.group(1)) if suffix else 0,
        state=worker.state,
        since_s=worker.since_s,
        gpus=tuple(device.uuid for device in worker.gpus),
        load=worker.load if worker.load is not None else Missing("not sampled"),
        course=worker.course,
        served=worker.served,
        starts=worker.starts,
        reason=worker.reason,
    )


def _policy(text: str | None) -> VictimPolicy:
    if text is None:
        return VictimPolicy.HIGHEST_SUFFIX
    try:
        return VictimPolicy(text)
    except ValueError:
        raise BadInput(f"{text!r} is no victim policy; there are: {', '.join(VictimPolicy)}") from None


def _as_json(instructions: Iterable[Instruction]) -> list[dict[str, str]]:
    return [{"kind": KINDS[type(i)], "watcher_name": i.name, "reason": i.reason} for i in instructions]


def _entry(plan: rolling.RestartPlan) -> RestartEntry:
    return RestartEntry(
        stimulus_id=plan.stimulus_id,
        todo=dict(plan.todo),
        begun=sorted(plan.begun),
        bring_back=sorted(plan.bring_back),
        force=plan.force,
    )


def _plan(entry: RestartEntry) -> rolling.RestartPlan:
    return rolling.RestartPlan(
        entry.stimulus_id,
        tuple(entry.todo.items()),
        begun=frozenset(entry.begun),
        bring_back=frozenset(entry.bring_back),
        force=entry.force,
    )

"""`dynamo apply` in the arbiter: compares, checks, commits the change as a whole, and carries it out.

`core.differences` computes the difference, and `core.fleet.applying` decides what follows for workers. This module
updates the rest of the arbiter. With `dry_run` it takes the machine's step and discards it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.arbiter.commands import ApplyDeployment
from dynamo_local.arbiter.composition import Parts
from dynamo_local.arbiter.deployment import base_environment
from dynamo_local.arbiter.deployment_spec import DeploymentSpec, options_of
from dynamo_local.arbiter.profile_check import with_nearest
from dynamo_local.config.resolve import planned_components
from dynamo_local.core.differences import Described, Differences, Live, differences, planner_goal
from dynamo_local.core.fleet.applying import outdated
from dynamo_local.core.fleet.events import Apply
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.step import step
from dynamo_local.core.secrets import mask_config
from dynamo_local.core.types import GraphSpec, Role
from dynamo_local.errors import ConfigError, DynamoError, NotApplicable
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.state.schema import Environment


@dataclass(frozen=True, slots=True)
class _Plan:
    """A deployment that may be applied, and the machine's step for it."""

    wanted: DeploymentSpec
    differences: Differences
    order: Apply
    before: Fleet
    after: Fleet
    planner_goal: str | None
    said_otherwise: bool
    """The run's words change, and perhaps nothing else."""

    @property
    def is_due(self) -> bool:
        """Whether something differs, or an earlier apply stopped before all workers were renewed."""
        return bool(self.differences.lines or outdated(self.before) or self.said_otherwise)


class ApplyCommand:
    """Applies deployments to a run that has begun."""

    def __init__(self, parts: Parts) -> None:
        began = parts.deployment
        self._parts = parts
        self._one = asyncio.Lock()
        self._described = Described(
            began.graph, began.host, options_of(began.load_planner), planner_starts=began.load_planner_starts
        )

    async def apply(self, command: ApplyDeployment) -> dict[str, Any]:
        """The difference, and the changes that follow, once they are committed. With `dry_run` nothing is committed.

        Raises `BadInput` for an invalid deployment, `NotApplicable` with every reason.
        """
        wanted = self._with_profile(DeploymentSpec.from_json(command.deployment))
        async with self._one:
            await self._parts.commands.refresh_gpus(command.stimulus_id)
            plan = self._planned(wanted, command)
            if plan.is_due and not command.dry_run:
                await self._carry_out(plan)
            return self._answer(plan, command.dry_run)

    # --- deciding --------------------------------------------------------------------------------

    def _with_profile(self, wanted: DeploymentSpec) -> DeploymentSpec:
        """The deployment with the profile that `dynamo serve` takes if none is given. Else the same file differs."""
        options = wanted.planner_config
        if options is None or wanted.planner is None:
            return wanted
        profile = with_nearest(options, wanted.graph, self._parts.deployment.gpus).profile_results_dir
        if profile == options.profile_results_dir:
            return wanted
        return replace(wanted, planner={**wanted.planner, "profile_results_dir": str(profile)})

    def _planned(self, wanted: DeploymentSpec, command: ApplyDeployment) -> _Plan:
        """Raises `NotApplicable` with all reasons."""
        parts, live, described = self._parts, self._live(), wanted.described
        found = differences(self._described, described, live)
        reasons = [*found.refused, *parts.host.refuses_to_apply(wanted.file, wanted.overrides)]
        goal = planner_goal(self._described, described, live)
        if live.planned and _planned_in(wanted.graph) != _planned_in(self._described.graph):
            reasons.append("the planner would have other components to scale: stop it, and apply this again")
        if goal == "running" and parts.planning.follows() is not None:
            reasons.append(
                "Planner: this run carries out another planner's decisions (--follow): serve it without that"
            )
        fleet, factory = parts.controller.fleet, parts.launcher.factory
        order = Apply(
            stimulus_id=command.stimulus_id,
            templates=replace(factory, graph=wanted.graph, retired=()).templates(),
            counts=found.counts,
            policy=wanted.policy,
            health_bound_s=wanted.host_config.health_bound_s,
            force=command.force,
        )
        after = fleet
        try:
            base_environment(wanted.graph, factory.base_env, factory.settings)
            if found.lines or outdated(fleet):
                after, _, _ = step(fleet, order, parts.clock.now_s())
        except NotApplicable as refused:
            reasons += refused.details["reasons"]
        except ConfigError as error:
            reasons.append(str(error))
        if reasons:
            raise NotApplicable.because(reasons)
        said = mask_config(wanted.command_line) != (parts.statefile.head.command_line or {})
        return _Plan(wanted, found, order, fleet, after, goal, said)

    def _live(self) -> Live:
        parts = self._parts
        fleet, planning = parts.controller.fleet, parts.planning
        plans = planning.state is not PlannerState.STOPPED or planning.follows() is not None
        planned = {Role.DECODE, Role.AGGREGATED, Role.PREFILL} if plans else set()
        return Live(
            workers={each.component: fleet.capacity(each.component) for each in fleet.templates},
            planner=options_of(planning.options),
            planned=frozenset(each.component for each in fleet.templates if each.role in planned),
            planner_state=str(planning.state),
            planner_by_flag=parts.deployment.load_planner_flag is not None,
        )

    # --- carrying out ------------------------------------------------------------------------------

    async def _carry_out(self, plan: _Plan) -> None:
        """Commit the intent, then start or stop the planner."""
        parts, wanted = self._parts, plan.wanted
        options = wanted.planner_config
        policy = None if options is None else await parts.planning.prepared(options)
        await parts.commands.committed(plan.order, then=lambda: self._switch(wanted, policy))
        parts.commands.changed(plan.order)
        try:
            if plan.planner_goal == "running":
                await parts.planning.start({})
            elif plan.planner_goal == "stopped":
                await parts.planning.stop()
        except DynamoError as error:  # the change takes effect even if this write fails
            parts.notes.tell(f"apply: {error}")

    def _switch(self, wanted: DeploymentSpec, policy: Policy[Any] | None) -> None:
        """Give the new deployment to all parts that start workers or describe the run, before anything is written."""
        parts, launcher = self._parts, self._parts.launcher
        factory, here = launcher.factory, {spec.name for spec in wanted.graph.services}
        gone = [spec for spec in (*factory.graph.services, *factory.retired) if spec.name not in here]
        launcher.factory = replace(
            factory, graph=wanted.graph, service_config_json=wanted.sections_json, retired=tuple(gone)
        )
        head = parts.statefile.head
        head.target = wanted.graph.target
        resources = head.environment.SYSTEM_RESOURCES
        head.environment = Environment(DYNAMO_SERVICE_CONFIG=wanted.masked_json, SYSTEM_RESOURCES=resources)
        head.command_line = mask_config(wanted.command_line) or None
        parts.planning.reconfigure(wanted.graph, wanted.planner_config, policy)
        self._described = wanted.described

    # --- telling -----------------------------------------------------------------------------------

    def _answer(self, plan: _Plan, dry_run: bool) -> dict[str, Any]:
        before, after, found = plan.before, plan.after, plan.differences
        sequence = next((each for each in after.restarts if each.stimulus_id == plan.order.stimulus_id), None)
        counted = {name for name, worker in before.workers.items() if worker.counts}
        counts = [name for name, worker in after.workers.items() if worker.counts]
        renewed = [] if sequence is None else [name for name, _ in sequence.todo]
        touched = dict.fromkeys((*found.touched, *(after.workers[name].component for name in renewed)))
        return {
            "dry_run": dry_run,
            "changes": [line.shown() for line in found.lines],
            "notes": list(found.notes),
            "components": {name: found.counts.get(name) for name in touched if name not in found.removed},
            "removed": list(found.removed),
            "workers": {
                "start": [name for name in counts if name not in counted],
                "leave": [*sorted(counted - set(counts)), *(() if sequence is None else sequence.removed)],
                "renew": renewed,
            },
        }


def _planned_in(graph: GraphSpec) -> tuple[str | None, str] | None:
    """The components that a planner scales. None if it cannot scale this graph."""
    try:
        return planned_components(graph)
    except ConfigError:
        return None

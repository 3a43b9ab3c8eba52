"""The load planner as a policy like any other: its rules are `load`'s, its times those of `intervals`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing, floor_workers
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.policies.load_intervals import AdjustmentIntervals
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    Needs,
    Observation,
    Override,
    PolicyStatus,
    Prediction,
    Proposal,
    Reason,
    Rule,
    WorkerPools,
)

PLUGIN_ID = "builtin_load_planner"
PRIORITY = 10


class LoadState(NamedTuple):
    """The intervals, and the decision of the present tick. Whoever goes on from a state does so on a copy."""

    intervals: AdjustmentIntervals
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class LoadPlanner:
    """A `Policy`. Plugins of others are heard at the end of an interval; what they leave alone, it decides."""

    options: PlannerConfig

    def first(self, now_s: float) -> LoadState:
        """An interval begins."""
        return LoadState(AdjustmentIntervals(LoadPolicy(self.options), self.options, now_s))

    def taking_over(self, state: LoadState) -> LoadState:
        """The interval keeps its beginning and its readings."""
        intervals = state.intervals.copied()
        intervals.with_options(LoadPolicy(self.options), self.options)
        return LoadState(intervals)

    def next_at_s(self, state: LoadState) -> float:
        """See `Policy`."""
        return state.intervals.next_pull_at

    def needs(self, state: LoadState) -> Needs:
        """The loads are always there."""
        return Needs()

    def forecasting(self, state: LoadState, observation: Observation) -> ForecastTask | None:
        """It looks at the past only."""
        return None

    def predicted(
        self, state: LoadState, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[LoadState, Prediction | None]:
        """It predicts nothing."""
        return state, None

    def propose(
        self, state: LoadState, observation: Observation, prediction: Prediction | None
    ) -> tuple[LoadState, tuple[Proposal, ...]]:
        """The numbers of the components with a step, at the end of an interval."""
        intervals = state.intervals.copied()
        decision = intervals.on_observation(observation.reading, observation.pools, observation.blind)
        targets = () if decision is None else _targets(decision, observation.pools)
        proposals = (Proposal(PLUGIN_ID, PRIORITY, Override(targets)),) if targets else ()
        return LoadState(intervals, decision), proposals

    def settle(
        self, state: LoadState, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[LoadState, Decision | None]:
        """Its own decision, or that of the plugins which wanted something else."""
        own = state.decision
        if (
            own is None
            or observation.blind is not None
            or _numbers(targets) == _numbers(_targets(own, observation.pools))
        ):
            return LoadState(state.intervals), own
        intervals = state.intervals.copied()
        intervals.forget_deferred("a plugin wanted another number of workers")
        return LoadState(intervals), _overridden(own, observation.pools, _numbers(targets), self.options)

    def manual(self, state: LoadState, now_s: float) -> LoadState:
        """It holds for an interval."""
        intervals = state.intervals.copied()
        intervals.on_manual_change(now_s)
        return LoadState(intervals)

    def status(self, state: LoadState) -> PolicyStatus:
        """See `Policy`."""
        intervals = state.intervals
        seen = intervals.observation
        return PolicyStatus(
            intervals.next_tick_at,
            intervals.adjusting,
            intervals.deferred,
            0.0 if seen is None else seen.interval_began_s,
            () if seen is None else seen.readings,
        )


def _targets(decision: Decision, pools: WorkerPools) -> tuple[ComponentTarget, ...]:
    steps = decision.steps
    return tuple(
        ComponentTarget(role, decision.targets[pool.component])
        for role, pool in pools.by_role.items()
        if steps.get(pool.component)
    )


def _numbers(targets: tuple[ComponentTarget, ...]) -> dict[str, int]:
    return {target.sub_component_type: target.replicas for target in targets}


def _overridden(own: Decision, pools: WorkerPools, wanted: dict[str, int], options: PlannerConfig) -> Decision:
    """The numbers that were merged, above the floors; nothing at all where they do not fit under the budget."""
    floors = {role: floor_workers(options.min_gpu_budget, pool.gpus_per_worker) for role, pool in pools.by_role.items()}
    numbers = {role: max(floors[role], wanted.get(role, pool.capacity)) for role, pool in pools.by_role.items()}
    gpus = sum(numbers[role] * pool.gpus_per_worker for role, pool in pools.by_role.items())
    fits = gpus <= options.max_gpu_budget
    reasons = []
    for role, pool in pools.by_role.items():
        step = numbers[role] - pool.capacity if fits else 0
        said = {"workers_wanted": numbers[role], "gpus_wanted": gpus, "max_gpu_budget": options.max_gpu_budget}
        why = f"plugins want {numbers[role]}, all in all {gpus} of {options.max_gpu_budget} GPUs"
        reasons.append(Reason(pool.component, step, Rule.OVERRIDDEN, said, why=why))
    reasons.sort(key=lambda reason: reason.step >= 0)
    targets = {pool.component: numbers[role] if fits else pool.capacity for role, pool in pools.by_role.items()}
    return replace(own, targets=targets, reasons=tuple(reasons), apart=False)

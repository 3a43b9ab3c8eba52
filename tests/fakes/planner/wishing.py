"""A policy that wants what a test says, once in an interval: the least that a planner by targets can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynamo_local.core.types import Missing
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
)


@dataclass(frozen=True)
class Wished:
    """`seen` are the predictions of its ticks."""

    due_s: float
    seen: tuple[Prediction | None, ...] = ()


@dataclass(frozen=True)
class Wishing:
    """Wants `targets` by role. `task` is what it has forecast; `wants`, what its pulls must bring."""

    targets: Mapping[str, int]
    interval_s: float = 10.0
    task: ForecastTask | None = None
    need: Needs = field(default_factory=Needs)

    def first(self, now_s: float) -> Wished:
        return Wished(now_s + self.interval_s)

    def taking_over(self, state: Wished) -> Wished:
        return state

    def next_at_s(self, state: Wished) -> float:
        return state.due_s

    def needs(self, state: Wished) -> Needs:
        return self.need

    def forecasting(self, state: Wished, observation: Observation) -> ForecastTask | None:
        return self.task

    def predicted(
        self, state: Wished, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[Wished, Prediction | None]:
        if not isinstance(forecasts, Forecasts):
            return state, None
        (values,) = forecasts.values
        return state, None if isinstance(values, Missing) else Prediction(num_req=values[0], source="wishing")

    def propose(
        self, state: Wished, observation: Observation, prediction: Prediction | None
    ) -> tuple[Wished, tuple[Proposal, ...]]:
        wanted = tuple(ComponentTarget(role, count) for role, count in self.targets.items())
        return replace(state, seen=(*state.seen, prediction)), (Proposal("wishing", 10, Override(wanted)),)

    def settle(
        self, state: Wished, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[Wished, Decision | None]:
        pools, wanted = observation.pools.by_role, {target.sub_component_type: target.replicas for target in targets}
        due_s = observation.at_s + self.interval_s
        steps = {pool.component: wanted.get(role, pool.capacity) - pool.capacity for role, pool in pools.items()}
        reasons = tuple(
            Reason(pool.component, steps[pool.component], "wished", {"wanted": wanted.get(role, pool.capacity)})
            for role, pool in pools.items()
        )
        numbers = {pool.component: pool.capacity + steps[pool.component] for pool in pools.values()}
        return replace(state, due_s=due_s), Decision(observation.at_s, numbers, reasons, due_s)

    def manual(self, state: Wished, now_s: float) -> Wished:
        return replace(state, due_s=now_s + self.interval_s)

    def status(self, state: Wished) -> PolicyStatus:
        return PolicyStatus(state.due_s)

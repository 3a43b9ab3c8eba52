"""The interface of policies. The arbiter's loop, the simulator and a replay drive any of them."""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    Needs,
    Observation,
    PolicyStatus,
    Prediction,
    Proposal,
    Reason,
    WorkerPools,
)

S = TypeVar("S")


class Policy(Protocol[S]):
    """Pure: the same state and the same values give the same answer. `S` is its state, an immutable value.

    A tick runs through it in this order (`driver.PolicyDriver`); the shell does what takes time (forecasts in another
    process, plugins of others) between the calls, each under a deadline:

        task = policy.forecasting(state, observation)          # PREDICT
        state, prediction = policy.predicted(state, observation, forecasts)
        state, proposals = policy.propose(state, observation, prediction)   # PROPOSE; RECONCILE and CONSTRAIN merge
        them state, decision = policy.settle(state, observation, targets)        # budgets and floors, with the reasons

    A policy that holds proposes nothing; `settle` then says why. While `observation.blind` says that the workers cannot
    be observed, every other value of the observation is `Missing`, and a policy holds.
    """

    @property
    def options(self) -> PlannerConfig:
        """Its options."""
        ...

    def first(self, now_s: float) -> S:
        """The state at a start, or after a pause."""
        ...

    def taking_over(self, state: S) -> S:
        """The state goes on under this policy's options; one of its kind with other options has made it."""
        ...

    def next_at_s(self, state: S) -> float:
        """When it wants the next observation: an absolute time of the planner's clock."""
        ...

    def needs(self, state: S) -> Needs:
        """The needs for the next observation."""
        ...

    def forecasting(self, state: S, observation: Observation) -> ForecastTask | None:
        """The forecast that this tick needs; None if none is due."""
        ...

    def predicted(
        self, state: S, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[S, Prediction | None]:
        """The next window as this policy expects it; plugins of others may then fill in, or say otherwise."""
        ...

    def propose(
        self, state: S, observation: Observation, prediction: Prediction | None
    ) -> tuple[S, tuple[Proposal, ...]]:
        """The targets that its built-in stages propose, one proposal for each of them."""
        ...

    def settle(
        self, state: S, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[S, Decision | None]:
        """The decision for the merged targets (none: nobody proposed any): within floors, budget and jumps. None where
        this observation was only an observation."""
        ...

    def manual(self, state: S, now_s: float) -> S:
        """A person has changed the number of workers."""
        ...

    def status(self, state: S) -> PolicyStatus:
        """Where it stands, for people and for the record of the last decision."""
        ...


# --- adapting
# Intervals and leads that follow how long scaling really takes (`adaptive-intervals`).


def start_up_s(pools: WorkerPools) -> float:
    """The longest start-up of a role; 0 where none was seen yet."""
    return max((pool.start_up_s or 0.0 for pool in pools.all), default=0.0)


def adapted_interval_s(interval_s: float, pools: WorkerPools) -> float:
    """Not shorter than what a start or a drain takes: the next decision then sees what became of the last."""
    drains = (pool.drain_s or 0.0 for pool in pools.all)
    return max(interval_s, start_up_s(pools), *drains)


def steps_ahead(interval_s: float, pools: WorkerPools) -> int:
    """Windows to forecast: the last of them begins when a worker that is started now serves."""
    return 1 + math.ceil(start_up_s(pools) / interval_s - 1e-9)


# --- holding
# The decision of a policy that changes nothing.


def holding(observation: Observation, held: tuple[str, str], next_tick_at: float) -> Decision:
    """All components keep the workers that they have. `held` is the rule that says so, and its sentence;
    `next_tick_at` the absolute time of the next decision, in seconds."""
    rule, why = held
    return Decision(
        now_s=observation.at_s,
        targets={pool.component: pool.capacity for pool in observation.pools.all},
        reasons=tuple(
            Reason(pool.component, 0, rule, {"workers": pool.capacity}, why=why) for pool in observation.pools.all
        ),
        next_tick_at=next_tick_at,
    )

"""Drives a policy: holds its state, and runs one tick through PREDICT, PROPOSE, merge and settle.

The arbiter's loop, the simulator and a replay drive the same object. They differ in the calls that take time. In the
arbiter forecasts are made in another process, and plugins of others are asked; in the simulator both answer at once.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.sources import Forecaster, NoForecaster
from dynamo_local.planner.stages import merge
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Needs,
    Observation,
    PolicyStatus,
    Prediction,
    Proposal,
)

T = TypeVar("T")

FORECAST_DEADLINE_S = 30.0
"""A forecast that takes longer is missing; the policy then goes by what it knows."""


SLACK_S = 1e-3
"""A observation this much before a decision is due is still that decision's (rounding)."""


class Pipeline(Protocol):
    """Plugins that act between the policy's own stages. Each call has a deadline of its own, and never raises."""

    def needs(self, needs: Needs) -> Needs:
        """The needs of the policy and of the plugins."""
        ...

    async def predict(self, observation: Observation, own: Prediction | None) -> Prediction | None:
        """The prediction of the policy (None: it has none), with what others say."""
        ...

    async def targets(
        self, observation: Observation, prediction: Prediction | None, proposals: tuple[Proposal, ...]
    ) -> tuple[ComponentTarget, ...]:
        """The policy's proposals, merged with those of others, reconciled and constrained."""
        ...


class BuiltIns:
    """A pipeline without plugins: what the policy proposes is what counts."""

    def needs(self, needs: Needs) -> Needs:
        return needs

    async def predict(self, observation: Observation, own: Prediction | None) -> Prediction | None:
        return own

    async def targets(
        self, observation: Observation, prediction: Prediction | None, proposals: tuple[Proposal, ...]
    ) -> tuple[ComponentTarget, ...]:
        return merge(proposals, baseline_of(observation)).targets


class Recorder(Protocol):
    """Told by a `PolicyDriver` what happens to it, in order. On the planner's loop: it must return at once."""

    def began(self, options: PlannerConfig, at_s: float) -> None:
        """A policy with these options begins, at that time of the planner's clock."""
        ...

    def changed(self, options: PlannerConfig, at_s: float) -> None:
        """It goes on with other options (or another policy begins)."""
        ...

    def manual(self, at_s: float) -> None:
        """A person has changed the number of workers."""
        ...

    def ticked(self, observation: Observation, decision: Decision | None) -> None:
        """It has taken this observation in, and decided this."""
        ...


def baseline_of(observation: Observation) -> dict[str, int]:
    """The numbers that bounds apply to if no stage sets one: workers that serve or will serve.

    A floor that counted only the serving workers would cancel workers that are starting."""
    return {role: pool.capacity for role, pool in observation.pools.by_role.items()}


class PolicyDriver:
    """A policy and its state, from `now_s` on. A `recorder` is told all that a replay needs."""

    def __init__(
        self,
        policy: Policy[Any],
        now_s: float,
        *,
        forecaster: Forecaster | None = None,
        pipeline: Pipeline | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._policy = policy
        self._state = policy.first(now_s)
        self._recorder = recorder
        self._began_s = now_s
        self._forecaster = forecaster or NoForecaster()
        self._pipeline = pipeline or BuiltIns()
        self._changes = 0
        self.prediction: Prediction | None = None
        """The prediction of the last tick."""
        if recorder is not None:
            recorder.began(policy.options, now_s)

    @property
    def options(self) -> PlannerConfig:
        """Those of its policy."""
        return self._policy.options

    @property
    def next_at_s(self) -> float:
        """When the next observation is due."""
        return self._policy.next_at_s(self._state)

    @property
    def needs(self) -> Needs:
        """The needs for the next observation. A tick that decides also collects for plugins."""
        own = self._policy.needs(self._state)
        return self._pipeline.needs(own) if _decides(self.status, self.next_at_s) else own

    @property
    def status(self) -> PolicyStatus:
        """Where the policy stands."""
        return self._policy.status(self._state)

    def manual(self, now_s: float) -> None:
        """A person has changed the number of workers."""
        self._state, self._began_s = self._policy.manual(self._state, now_s), now_s
        self._changes += 1
        if self._recorder is not None:
            self._recorder.manual(now_s)

    def change(self, policy: Policy[Any], now_s: float) -> None:
        """Go on with other options, or begin with another policy."""
        if type(policy) is type(self._policy):
            self._state = policy.taking_over(self._state)
        else:
            self._state, self._began_s = policy.first(now_s), now_s
        self._policy = policy
        self._changes += 1
        if self._recorder is not None:
            self._recorder.changed(policy.options, now_s)

    async def tick(self, observation: Observation) -> Decision | None:
        """A decision, where the observation led to one.

        None, too, if the observation is older than a person's change, or if something was changed during the tick: that
        decision was made for another world. Exceptions of the policy pass through, and its state is then the former.
        """
        if observation.at_s < self._began_s:
            return None
        changes, policy, state = self._changes, self._policy, self._state
        # Plugins have turns: one that is asked at an observation which decides nothing would miss that of the decision.
        pipeline = self._pipeline if _decides(self.status, observation.at_s) else BuiltIns()
        task = policy.forecasting(state, observation)
        forecasts = None if task is None else await self._forecaster.run(task, FORECAST_DEADLINE_S)
        state, own = policy.predicted(state, observation, forecasts)
        prediction = await pipeline.predict(observation, own)
        state, proposals = policy.propose(state, observation, prediction)
        targets = await pipeline.targets(observation, prediction, proposals)
        state, decision = policy.settle(state, observation, targets)
        if changes != self._changes:
            return None
        self._state, self.prediction = state, prediction
        if self._recorder is not None:
            self._recorder.ticked(observation, decision)
        return decision

    def tick_now(self, observation: Observation) -> Decision | None:
        """As `tick`, where forecaster and pipeline answer at once. RuntimeError where one of them waits."""
        return _at_once(self.tick(observation))


def _decides(status: PolicyStatus, at_s: float) -> bool:
    return status.next_tick_at is not None and at_s >= status.next_tick_at - SLACK_S


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    work.close()
    raise RuntimeError("a forecaster or a pipeline waits, where time does not pass")

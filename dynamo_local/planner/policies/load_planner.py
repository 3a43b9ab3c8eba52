"""The load planner's intervals as a state machine without clock or I/O, which `LoadPlanner` makes a policy of.

    intervals = AdjustmentIntervals(LoadPolicy(options), options, now_s)
    while True:
        sleep until intervals.next_pull_at
        decision = intervals.on_pull(reading, pools)
        carry out decision.acts, if there is a decision

The rules, in prose:

* Pulls are due at `began + n × metric_pulling_interval`, the last of them exactly where the interval ends. These are
  absolute times: work in between causes no drift, and pulls that were missed in a sleep are left out.
* An interval ends in one decision, from its own readings. The next begins where it ended.
* While an adjustment is under way nothing is sampled or decided; the interval begins anew when it has ended (rule 2).
* A person's change is respected: the interval begins anew, then it is planned from what is. An up that waited for a
  GPU is forgotten.
* A tick that fails (the policy raises) costs its interval and nothing else.
* New options apply from the next decision on; the interval keeps its beginning and its readings.
* An up that a decision deferred waits here until GPUs are really free under the budget, and is then carried out
  by a decision of its own (`Rule.GPU_FREED`). Until then it counts as capacity on its way (rule 5). If a drain is
  taken back and its GPU does not come after all (in three pulls, since a step takes a moment to be seen), the up is
  forgotten. While another environment has yet to carry the down out (`WorkerPools.pending`), it waits for that first.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing, floor_workers
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    IntervalObservation,
    Needs,
    Observation,
    Override,
    PolicyStatus,
    Pool,
    Prediction,
    Proposal,
    Reading,
    Reason,
    Rule,
    WorkerPools,
)

T = TypeVar("T")

STALE_PULLS = 3
"""A value older than this many pulls is missing; GPUs that are not free after this many pulls will not come."""

_SLACK = 1e-6
"""A observation counts as the interval's end within this share of a pulling interval (rounding)."""


class IntervalPolicy(Protocol):
    """The rules that decide at the end of an interval."""

    def on_tick(self, observation: IntervalObservation) -> Decision:
        """The decision after this interval, and the time of the next one."""
        ...


def fresh(value: T, *, taken_at_s: float, now_s: float, pulling_interval_s: float) -> T | Missing:
    """The value, or `Missing` where it is older than three pulls."""
    age_s = now_s - taken_at_s
    if age_s > STALE_PULLS * pulling_interval_s:
        return Missing(f"{age_s:.1f} s old, and older than {STALE_PULLS} pulls of {pulling_interval_s:g} s")
    return value


def _unseen(observation: IntervalObservation, why: Missing) -> IntervalObservation:
    readings = tuple(
        Reading(reading.at_s, None if reading.queue is None else why, dict.fromkeys(reading.loads, why))
        for reading in observation.readings
    )
    return replace(observation, readings=readings)


class AdjustmentIntervals:
    """Collects the readings of an interval, asks the policy at its end, and says when the next observation is due."""

    def __init__(self, policy: IntervalPolicy, options: PlannerConfig, now_s: float) -> None:
        self._policy = policy
        self._options = options
        self._deferred: dict[str, int] = {}
        self._pulls_without_gpu = 0
        self._notes: tuple[str, ...] = ()
        self._readings: list[Reading] = []
        self._pulls = 0
        self._observation: IntervalObservation | None = None
        self._begin(now_s)

    # --- what one may ask ----------------------------------------------------------------------

    @property
    def options(self) -> PlannerConfig:
        """The current options."""
        return self._options

    @property
    def next_pull_at(self) -> float:
        """The absolute time of the next observation."""
        pull_s = self._options.metric_pulling_interval
        at_s = self._began_s + (self._pulls + 1) * pull_s
        if not self._adjusting and at_s > self._due_s - _SLACK * pull_s:
            return self._due_s
        return at_s

    @property
    def next_tick_at(self) -> float | None:
        """When the next decision is due; None while an adjustment is under way."""
        return None if self._adjusting else self._due_s

    @property
    def interval_began_s(self) -> float:
        """When this interval, or this wait for an adjustment to end, began."""
        return self._began_s

    @property
    def adjusting(self) -> bool:
        """Whether it waits for an adjustment to end."""
        return self._adjusting

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The readings of this interval so far."""
        return tuple(self._readings)

    @property
    def observation(self) -> IntervalObservation | None:
        """The observation behind the last decision; None before the first."""
        return self._observation

    @property
    def deferred(self) -> tuple[str, ...]:
        """Components with an up that waits for a GPU."""
        return tuple(self._deferred)

    # --- what happens --------------------------------------------------------------------------

    def on_observation(self, reading: Reading, pools: WorkerPools, blind: str | None = None) -> Decision | None:
        """Take in one observation. A decision where one is due, else None. Whatever the policy raises passes through;
        the next interval has begun by then.

        `blind` is why the workers cannot be observed now. The policy is then shown no sample at all, and holds: older
        ones do not justify a change that could not be carried out, or observed, now.
        """
        now_s = reading.at_s
        freed = None if pools.pending else self._freed(pools, now_s)
        if freed is not None:
            self._observation = IntervalObservation(now_s, self._began_s, (*self.readings, reading), pools)
            self._begin(now_s, adjusting=True)
            return freed
        if pools.adjusting or self._adjusting:
            self._begin_or_count(now_s, pools)
            return None
        self._readings.append(reading)
        self._count(now_s)
        if now_s < self._due_s - _SLACK * self._options.metric_pulling_interval:
            return None
        return self._tick(max(now_s, self._due_s), pools, blind)

    def on_manual_change(self, now_s: float) -> None:
        """A person changed the number of workers: hold for an interval from now."""
        self.forget_deferred("a person changed the number of workers")
        self._begin(now_s)

    def forget_deferred(self, why: str) -> None:
        """Ups that wait for a GPU are not wanted any more; the next decision has a note of it."""
        for component in self._deferred:
            self._notes += (f"{component} +1 waited for a GPU and was dropped: {why}",)
        self._deferred = {}

    def copied(self) -> AdjustmentIntervals:
        """The same at this moment; what happens to one is nothing to the other."""
        other = copy.copy(self)
        other._readings, other._deferred = list(self._readings), dict(self._deferred)
        return other

    def with_options(self, policy: IntervalPolicy, options: PlannerConfig) -> None:
        """Other options from now on. The interval keeps its beginning; its end moves with the new length."""
        began_s, pulls, readings, adjusting = self._began_s, self._pulls, self._readings, self._adjusting
        last_s = self.next_pull_at - self._options.metric_pulling_interval
        pull_s = options.metric_pulling_interval
        same_grid = pull_s == self._options.metric_pulling_interval
        self._policy, self._options = policy, options
        self._begin(began_s, adjusting=adjusting)
        self._readings = readings
        self._pulls = pulls if same_grid else max(0, int((last_s - began_s) / pull_s))

    # --- inside --------------------------------------------------------------------------------

    def _begin(self, now_s: float, *, adjusting: bool = False) -> None:
        self._began_s = now_s
        self._due_s = now_s + self._options.adjustment_interval
        self._pulls = 0
        self._adjusting = adjusting
        self._readings = []

    def _begin_or_count(self, now_s: float, pools: WorkerPools) -> None:
        """Start or continue to wait for an adjustment, or begin the interval anew when it has ended."""
        if pools.adjusting and self._adjusting:
            self._count(now_s)
        else:
            self._begin(now_s, adjusting=pools.adjusting)

    def _count(self, now_s: float) -> None:
        """This observation is done; skip all others whose time has passed."""
        self._pulls = max(self._pulls + 1, self._passed(now_s))

    def _passed(self, now_s: float) -> int:
        return int((now_s - self._began_s) / self._options.metric_pulling_interval + _SLACK)

    def _tick(self, now_s: float, pools: WorkerPools, blind: str | None) -> Decision:
        observation = IntervalObservation(now_s, self._began_s, self.readings, self._with_deferred(pools))
        self._observation = observation
        notes, self._notes = self._notes, ()
        interval_s = self._options.adjustment_interval
        # Set before the policy is asked: if it raises, this interval is over, too.
        self._begin(self._due_s + interval_s * int((now_s - self._due_s) / interval_s))
        self._pulls = self._passed(now_s)
        decision = self._policy.on_tick(observation if blind is None else _unseen(observation, Missing(blind)))
        self._due_s = decision.next_tick_at
        self._defer(decision, pools)
        return replace(decision, notes=(*notes, *decision.notes)) if notes else decision

    # --- an up that waits for a GPU ------------------------------------------------------------

    def _defer(self, decision: Decision, pools: WorkerPools) -> None:
        sizes = {pool.component: pool.gpus_per_worker for pool in pools.all}
        for reason in decision.reasons:
            if not reason.deferred:
                continue
            if reason.step > 0:
                self._pulls_without_gpu = 0
                self._deferred[reason.component] = sizes[reason.component]
            else:
                self._deferred.pop(reason.component, None)

    def _with_deferred(self, pools: WorkerPools) -> WorkerPools:
        def counted(pool: Pool) -> Pool:
            if pool.component not in self._deferred:
                return pool
            return replace(pool, coming=pool.coming + 1, waiting=pool.waiting + 1, deferred=1)

        return WorkerPools(None if pools.prefill is None else counted(pools.prefill), counted(pools.decode))

    def _freed(self, pools: WorkerPools, now_s: float) -> Decision | None:
        """The deferred up whose GPUs are free now, as a decision."""
        if not self._deferred:
            return None
        held, budget = pools.gpus_spoken_for, self._options.max_gpu_budget
        leaving = sum(pool.gpus_leaving for pool in pools.all)
        component, size = next(iter(self._deferred.items()))
        if held + size <= budget:
            del self._deferred[component]
            pool = next(pool for pool in pools.all if pool.component == component)
            numbers = {"gpus_counted": held, "gpus_per_worker": size, "max_gpu_budget": budget}
            reason = Reason(component, 1, Rule.GPU_FREED, numbers)
            return Decision(now_s, {component: pool.capacity + 1}, (reason,), now_s, apart=True)
        self._pulls_without_gpu = self._pulls_without_gpu + 1 if held - leaving + size > budget else 0
        if self._pulls_without_gpu >= STALE_PULLS:
            self.forget_deferred("the drain whose GPU it waited for was taken back")
        return None


PLUGIN_ID = "builtin_load_planner"
PRIORITY = 10


class LoadState(NamedTuple):
    """The intervals, and the decision of the present tick. A caller that changes a state works on a copy."""

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

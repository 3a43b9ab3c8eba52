"""A planner that knows the demand: what is left to be gained by forecasting.

For each moment the queueing twin says, of the requests that really come around it, which is the smallest fleet that
serves as many of them within the targets as the largest one does, but for `GIVEN_UP`. A worker is ordered one start-up
before it is needed, and is kept over pauses in which it could not be back in time. It begins with what is needed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.queueing import Demand, Engine, EngineOptions, Evaluator, Shares
from dynamo_local.planner.queueing_task import passes_of
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
from dynamo_local.simulator.trace import TraceRequest

STEP_S = 5.0
BEFORE_S, AFTER_S = 20.0, 10.0
"""A moment's requests: those that come so long before it, and after,"""
LIVES = 2.0
"""and those before that may be answered still: so many times as long as an answer takes, within its target."""
REQUESTS_MIN = 20
GIVEN_UP = 0.005

Fleet = tuple[int, int]


def schedule(requests: Sequence[TraceRequest], options: PlannerConfig, speed: float) -> tuple[Fleet, ...]:
    """The fleet that is needed in each `STEP_S` of these requests, within the budget."""
    engine = Engine(passes_of(str(options.profile_results_dir), speed), EngineOptions())
    evaluator = Evaluator(engine, options.ttft_ms / 1000, options.itl_ms / 1000)
    times = [each.at_s for each in requests]
    before_s = BEFORE_S + LIVES * fmean(each.output_length for each in requests) * options.itl_ms / 1000
    needed: list[Fleet] = []
    most = options.max_gpu_budget - 1
    for step in range(int(times[-1] / STEP_S) + 1):
        at_s = step * STEP_S
        first, last = bisect_left(times, at_s - before_s), bisect_left(times, at_s + AFTER_S)
        if last - first < REQUESTS_MIN:
            needed.append((1, 1))
            continue
        span_s = min(before_s, at_s) + AFTER_S
        rate = (last - first) / span_s
        demand = _demand(requests[first:last], rate)
        needed.append(_smallest(evaluator.shares(demand, step, rate, most), options.max_gpu_budget))
    return tuple(needed)


def _demand(requests: Sequence[TraceRequest], rate: float) -> Demand:
    gaps = (0.0, *((after.at_s - before.at_s) * rate for before, after in pairwise(requests)))
    return Demand(gaps, tuple(each.input_length for each in requests), tuple(each.output_length for each in requests))


def _smallest(shares: Shares, cap: int) -> Fleet:
    fits = [
        (min(shares.prefill[prefill], shares.decode[decode]), -prefill - decode, (prefill, decode))
        for prefill in range(1, cap)
        for decode in range(1, cap - prefill + 1)
    ]
    best = max(fits)[0]
    return max((size, served, fleet) for served, size, fleet in fits if served >= best - GIVEN_UP)[2]


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """`planner.policies.protocol.Policy` of the time of its next decision: it goes by `needed` and looks at nothing."""

    options: PlannerConfig
    needed: tuple[Fleet, ...]
    start_up_s: float

    @property
    def start(self) -> Fleet:
        """The fleet to begin with."""
        return self.needed_from(0.0)

    def needed_from(self, now_s: float) -> Fleet:
        """What is needed at that time, or before a worker that is ordered later could serve."""
        first = int(now_s / STEP_S)
        ahead = self.needed[first : first + int((self.start_up_s + STEP_S) / STEP_S) + 1] or self.needed[-1:]
        return max(each[0] for each in ahead), max(each[1] for each in ahead)

    def first(self, now_s: float) -> float:
        """See `Policy`, as for all below."""
        return now_s + STEP_S

    def taking_over(self, state: float) -> float:
        """It is as it was."""
        return state

    def next_at_s(self, state: float) -> float:
        """Every `STEP_S`."""
        return state

    def needs(self, state: float) -> Needs:
        """Nothing."""
        return Needs()

    def status(self, state: float) -> PolicyStatus:
        """When it decides next."""
        return PolicyStatus(state)

    def forecasting(self, state: float, observation: Observation) -> ForecastTask | None:
        """It knows."""
        return None

    def predicted(
        self, state: float, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[float, Prediction | None]:
        """It knows."""
        return state, None

    def propose(
        self, state: float, observation: Observation, prediction: Prediction | None
    ) -> tuple[float, tuple[Proposal, ...]]:
        """What is needed until a worker that is ordered later could be there; shrunk to the budget."""
        prefill, decode = self.needed_from(observation.at_s)
        now = self.needed[min(int(observation.at_s / STEP_S), len(self.needed) - 1)]
        while prefill + decode > self.options.max_gpu_budget:
            if prefill > now[0]:
                prefill -= 1
            else:
                decode -= 1
        targets = (ComponentTarget("prefill", prefill), ComponentTarget("decode", decode))
        return state, (Proposal("clairvoyant", 0, Override(targets, "known")),)

    def settle(
        self, state: float, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[float, Decision | None]:
        """As proposed."""
        wanted = {target.sub_component_type: target.replicas for target in targets}
        found = {pool.component: wanted[role] for role, pool in observation.pools.by_role.items()}
        after = observation.at_s + STEP_S
        reasons = tuple(
            Reason(pool.component, found[pool.component] - pool.capacity, "scale", {}) for pool in observation.pools.all
        )
        ordered = tuple(sorted(reasons, key=lambda reason: reason.step >= 0))
        return after, Decision(now_s=observation.at_s, targets=found, reasons=ordered, next_tick_at=after)

    def manual(self, state: float, now_s: float) -> float:
        """Nobody else scales."""
        return state


def clairvoyant(
    requests: Sequence[TraceRequest], options: PlannerConfig, start_up_s: float, speed: float = 1.0
) -> Clairvoyant:
    """For these requests; its start-up is the options'."""
    return Clairvoyant(options, schedule(requests, options, speed), start_up_s)

"""A planner that knows the demand: what is left to be gained by forecasting.

For each moment the queueing model takes the requests that really come around it. It says which is the smallest fleet
that serves as many of them within the targets as the largest one does, but for `GIVEN_UP`. A worker is ordered one
start-up before it is needed, and is kept over pauses in which it could not be back in time. It begins with what is
needed first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


def schedule(
    requests: Sequence[TraceRequest], options: PlannerConfig, speed: float, engine: EngineOptions
) -> tuple[Fleet, ...]:
    """The fleet that is needed in each `STEP_S` of these requests, within the budget."""
    passes = passes_of(str(options.profile_results_dir), speed)
    evaluator = Evaluator(Engine(passes, engine), options.ttft_ms / 1000, options.itl_ms / 1000)
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


Wanted = tuple[float, int, int]
"""When so many prefill and decode workers were wanted."""
Waiting = tuple[float, tuple[Wanted, ...]]
"""The time of the next decision, and what was wanted lately."""


@dataclass(frozen=True, slots=True)
class Yardstick(ABC):
    """`planner.policies.protocol.Policy` of a rule without a state of its own, asked every `STEP_S`.

    A worker is given back when it was not wanted for `hold_s` seconds.
    """

    options: PlannerConfig

    @property
    def hold_s(self) -> float:
        """Seconds for which a worker is kept that is no longer wanted."""
        return 0.0

    @abstractmethod
    def wanted(self, observation: Observation) -> Fleet:
        """The prefill and decode workers that this moment wants."""

    def first(self, now_s: float) -> Waiting:
        return now_s + STEP_S, ()

    def taking_over(self, state: Waiting) -> Waiting:
        return state

    def next_at_s(self, state: Waiting) -> float:
        return state[0]

    def needs(self, state: Waiting) -> Needs:
        return Needs()

    def status(self, state: Waiting) -> PolicyStatus:
        return PolicyStatus(state[0])

    def forecasting(self, state: Waiting, observation: Observation) -> ForecastTask | None:
        return None

    def predicted(
        self, state: Waiting, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[Waiting, Prediction | None]:
        return state, None

    def propose(
        self, state: Waiting, observation: Observation, prediction: Prediction | None
    ) -> tuple[Waiting, tuple[Proposal, ...]]:
        """The most of what was wanted within `hold_s`, within the budget: what is wanted now comes first."""
        now_s = observation.at_s
        now = self.wanted(observation)
        lately = (*(each for each in state[1] if each[0] > now_s - self.hold_s), (now_s, *now))
        prefill, decode = max(each[1] for each in lately), max(each[2] for each in lately)
        while prefill + decode > max(2, self.options.max_gpu_budget):
            if decode == 1 or (prefill > 1 and prefill - now[0] >= decode - now[1]):
                prefill -= 1
            else:
                decode -= 1
        targets = (ComponentTarget("prefill", prefill), ComponentTarget("decode", decode))
        return (state[0], lately), (Proposal(type(self).__name__.lower(), 0, Override(targets, "wanted")),)

    def settle(
        self, state: Waiting, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[Waiting, Decision | None]:
        """As proposed."""
        wanted = {target.sub_component_type: target.replicas for target in targets}
        found = {pool.component: wanted[role] for role, pool in observation.pools.by_role.items()}
        after = observation.at_s + STEP_S
        reasons = tuple(
            Reason(pool.component, found[pool.component] - pool.capacity, "scale", {}) for pool in observation.pools.all
        )
        ordered = tuple(sorted(reasons, key=lambda reason: reason.step >= 0))
        return (after, state[1]), Decision(observation.at_s, found, ordered, next_tick_at=after)

    def manual(self, state: Waiting, now_s: float) -> Waiting:
        return state


@dataclass(frozen=True, slots=True)
class Clairvoyant(Yardstick):
    """It goes by `needed` and looks at nothing."""

    needed: tuple[Fleet, ...]
    start_up_s: float

    @property
    def start(self) -> Fleet:
        """The fleet to begin with."""
        return self.needed_from(0.0)

    def needed_from(self, now_s: float) -> Fleet:
        """The fleet that is needed at that time, or before a worker that is ordered later could serve."""
        first = int(now_s / STEP_S)
        ahead = self.needed[first : first + int((self.start_up_s + STEP_S) / STEP_S) + 1] or self.needed[-1:]
        return max(each[0] for each in ahead), max(each[1] for each in ahead)

    def wanted(self, observation: Observation) -> Fleet:
        """The need until a worker that is ordered later could be there; shrunk to the budget, first by what is
        not needed now."""
        prefill, decode = self.needed_from(observation.at_s)
        now = self.needed[min(int(observation.at_s / STEP_S), len(self.needed) - 1)]
        while prefill + decode > self.options.max_gpu_budget:
            if prefill > now[0]:
                prefill -= 1
            else:
                decode -= 1
        return prefill, decode


def clairvoyant(
    requests: Sequence[TraceRequest],
    options: PlannerConfig,
    start_up_s: float,
    speed: float = 1.0,
    engine: EngineOptions | None = None,
) -> Clairvoyant:
    """For these requests, on engines as our simulator has them (`engine`: on others)."""
    return Clairvoyant(options, schedule(requests, options, speed, engine or EngineOptions()), start_up_s)

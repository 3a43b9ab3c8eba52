"""Observations with the decision that they must lead to: the rules' worked cases, and the values on each boundary.

Data, not tests: `test_load_rules` checks the policy and every mutant of it with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.values import Decision, IntervalObservation, Rule
from tests.fakes.planner.observations import DECODE, NOT_HAD, PREFILL, observe, pool, readings
from tests.fakes.planner.options import load_options

Expected = tuple[int, Rule]


KV_UNKNOWN = Load(gpu_cache_usage_perc=Missing("not told"))


@dataclass(frozen=True, slots=True)
class Case:
    """`prefill` is None for an aggregated graph. `acts` are the steps of now, None: all steps, downs first."""

    name: str
    observation: IntervalObservation
    prefill: Expected | None
    decode: Expected
    options: PlannerConfig = load_options()  # noqa: RUF009 - frozen
    acts: tuple[tuple[str, int], ...] | None = None
    apart: bool = True
    """Its steps stand apart."""
    next_tick_at: float | None = None
    """None: two intervals after this one began."""

    def decide(self, policy: Callable[[PlannerConfig], Any] = LoadPolicy) -> Decision:
        """What a policy makes of it."""
        decision: Decision = policy(self.options).on_tick(self.observation)
        return decision

    def check(self, decision: Decision) -> None:
        """AssertionError where it is not what was expected."""
        expected = {DECODE: self.decode} | ({} if self.prefill is None else {PREFILL: self.prefill})
        found = {reason.component: (reason.step, reason.rule) for reason in decision.reasons}
        assert found == expected, self.name
        capacity = {pool.component: pool.capacity for pool in self.observation.pools.all}
        assert decision.targets == {name: capacity[name] + step for name, (step, _) in expected.items()}, self.name
        order = sorted((c for c in (PREFILL, DECODE) if c in expected), key=lambda c: expected[c][0] >= 0)
        assert [reason.component for reason in decision.reasons] == order, self.name
        steps = tuple((c, expected[c][0]) for c in order if expected[c][0])
        assert decision.acts == (steps if self.acts is None else self.acts), self.name
        assert decision.apart is self.apart, self.name
        due_s = self.observation.interval_began_s + 2 * self.options.adjustment_interval
        assert decision.next_tick_at == (due_s if self.next_tick_at is None else self.next_tick_at), self.name
        self._check_numbers(decision)

    def _check_numbers(self, decision: Decision) -> None:
        """Each reason has the numbers that could be had, and no others."""
        depths = [
            observation.queue for observation in self.observation.readings if not isinstance(observation.queue, Missing)
        ]
        had = {"average_kv_load"} if any(observation.kv.count for observation in self.observation.readings) else set()
        if self.prefill is not None and depths:
            had |= {"prefill_queue_size", "prefill_queue_expected"}
        found = {name for reason in decision.reasons for name in reason.numbers}
        assert found & {"average_kv_load", "prefill_queue_size", "prefill_queue_expected"} == had, self.name
        of_decode = next(reason.numbers for reason in decision.reasons if reason.component == DECODE)
        assert ("since_added_s" in of_decode) is (self.observation.pools.decode.added_at_s is not None), self.name


def _decode(ready: int, **more: Any) -> Any:
    return pool(DECODE, ready, **more)


def _prefill(ready: int, **more: Any) -> Any:
    return pool(PREFILL, ready, **more)


R = Rule
HOLD, UP, DOWN = (0, R.WITHIN), (1, R.SCALE_UP), (-1, R.SCALE_DOWN)
QUIET, BUSY = [0.0] * 3, [9.0] * 3
IDLE, CALM, FULL = [0.3] * 3, [0.7] * 3, [0.95] * 3
CHANGES_HANDS = ((PREFILL, -1),)

WORKED = (
    Case("1", observe(1, 1, queue=QUIET, kv=CALM), (0, R.FLOOR), HOLD),
    Case("2", observe(2, 2, queue=QUIET, kv=IDLE), DOWN, DOWN),
    *(
        Case(f"3-{n}", observe(2, 2, queue=QUIET, kv=IDLE, added_intervals_ago=n), DOWN, (0, R.GRACE))
        for n in (1, 2, 3)
    ),
    Case("4", observe(2, 2, queue=QUIET, kv=IDLE, added_intervals_ago=4), DOWN, DOWN),
    Case("5", observe(1, 1, queue=[2, 4, 6], kv=CALM), UP, HOLD),
    Case("6", observe(1, 1, queue=[9, 6, 2], kv=CALM), (0, R.QUEUE_EMPTYING), HOLD),
    Case("7", observe(4, 4, queue=BUSY, kv=FULL), (0, R.BUDGET), (0, R.BUDGET)),
    Case("8", observe(4, 4, queue=QUIET, kv=FULL), DOWN, UP, acts=CHANGES_HANDS),
    Case("9", observe(3, 4, queue=BUSY, kv=FULL), UP, (0, R.BUDGET)),
    Case("10", observe(None, 2, kv=[0.95, 0.95]), None, UP),
    Case("11", observe(1, 2, queue=[NOT_HAD, NOT_HAD], kv=[0.3, 0.3]), (0, R.MISSING), DOWN),
    Case("12", observe(1, 2, queue=[0, 0], kv=[None, None]), (0, R.FLOOR), (0, R.MISSING)),
    Case("13", observe(1, 1, queue=[0.5, 0.5], kv=[0.9, 0.9]), HOLD, HOLD),
    Case(
        "14",
        observe(1, _decode(1, leaving=1, cancellable=1), queue=[0], kv=[0.95]),
        (0, R.FLOOR),
        (1, R.TAKE_BACK),
    ),
    Case("15", observe(1, 3, queue=[0], kv=[0.95, 0.95], decode_gpus=2), (0, R.FLOOR), (0, R.BUDGET)),
    Case("16", observe(1, 2, queue=[0], kv=[0.95, 0.95], decode_gpus=2), (0, R.FLOOR), UP),
)

FLIPS = (
    Case("a flip is done at once", observe(_prefill(4, flippable=1), 4, queue=QUIET, kv=FULL), DOWN, UP, apart=False),
    Case("so is the other one", observe(1, _decode(3, flippable=1), queue=BUSY, kv=IDLE), UP, DOWN, apart=False),
    Case(
        "who could flip stays",
        observe(4, _decode(4, flippable=3), queue=QUIET, kv=FULL),
        DOWN,
        UP,
        acts=CHANGES_HANDS,
    ),
    Case(
        "who could flip stays, within the budget", observe(2, _decode(2, flippable=1), queue=QUIET, kv=FULL), DOWN, UP
    ),
    Case("one less is no flip", observe(_prefill(2, flippable=1), 2, queue=QUIET, kv=CALM), DOWN, HOLD),
    Case("one more is no flip", observe(_prefill(2, flippable=1), 2, queue=[2, 4, 6], kv=CALM), UP, HOLD),
)

_BACKING_OFF = {"coming": 1, "waiting": 1}
_PROMISED = {"coming": 1, "waiting": 1, "deferred": 1}
"""An up that waits in `AdjustmentIntervals` for another worker's GPU."""

BOUNDARIES = (
    # Thresholds, from both sides.
    Case("neither lower threshold is below itself", observe(2, 2, queue=[0.2], kv=[0.5]), HOLD, HOLD),
    Case("just above both", observe(2, 2, queue=[0.51], kv=[0.91]), UP, UP),
    Case("aggregated down", observe(None, 2, kv=IDLE), None, DOWN),
    Case("the mean of all samples decides", observe(1, 1, queue=[0, 0, 2], kv=[1.0, 0.9, 0.81]), UP, UP),
    Case("samples that were not had are left out", observe(2, 2, queue=[9, NOT_HAD], kv=[NOT_HAD, 0.3]), UP, DOWN),
    Case("a load without its KV use is no sample", observe(2, 2, queue=[1], kv=[KV_UNKNOWN]), UP, (0, R.MISSING)),
    # Floors.
    Case(
        "whole workers above a floor in GPUs",
        observe(2, 3, queue=QUIET, kv=IDLE, prefill_gpus=2, decode_gpus=1),
        (0, R.FLOOR),
        (0, R.FLOOR),
        load_options(min_gpu_budget=3),
    ),
    Case(
        "one worker above it",
        observe(3, 4, queue=QUIET, kv=IDLE, prefill_gpus=2, decode_gpus=1),
        DOWN,
        DOWN,
        load_options(min_gpu_budget=3, max_gpu_budget=10),
    ),
    Case(
        "below the floor it goes up whatever the load",
        observe(1, 1, queue=QUIET, kv=IDLE),
        (1, R.BELOW_FLOOR),
        (1, R.BELOW_FLOOR),
        load_options(min_gpu_budget=2),
    ),
    Case(
        "below the floor the budget still holds",
        observe(1, 1, queue=QUIET, kv=IDLE),
        (1, R.BELOW_FLOOR),
        (0, R.BUDGET),
        load_options(min_gpu_budget=2, max_gpu_budget=3),
    ),
    Case(
        "below the floor nobody asks where the queue is heading",
        observe(1, 2, queue=[9, 2], kv=CALM),
        (1, R.BELOW_FLOOR),
        HOLD,
        load_options(min_gpu_budget=2),
    ),
    Case("without any worker there is nobody to measure", observe(0, 0), (1, R.BELOW_FLOOR), (1, R.BELOW_FLOOR)),
    Case(
        "one on its way is not none",
        observe(1, _decode(0, **_BACKING_OFF), queue=[0.3]),
        HOLD,
        (0, R.MISSING),
    ),
    Case("workers without GPUs", observe(2, 2, queue=QUIET, kv=FULL, prefill_gpus=0, decode_gpus=0), DOWN, UP),
    Case(
        "never below one worker",
        observe(1, 1, queue=QUIET, kv=IDLE),
        (0, R.FLOOR),
        (0, R.FLOOR),
        load_options(min_gpu_budget=0),
    ),
    # Grace.
    Case(
        "grace to its last moment",
        observe(2, 2, queue=QUIET, kv=IDLE, added_intervals_ago=3.999),
        DOWN,
        (0, R.GRACE),
    ),
    Case("grace keeps nobody from going up", observe(2, 2, queue=BUSY, kv=FULL, added_intervals_ago=1), UP, UP),
    # An adjustment under way, and capacity on its way.
    Case("a start", observe(2, _decode(2, coming=1), queue=QUIET, kv=FULL), (0, R.ADJUSTING), (0, R.ADJUSTING)),
    Case(
        "a drain that is not out of routing",
        observe(_prefill(2, leaving=1, routed=1), 2, queue=QUIET, kv=FULL),
        (0, R.ADJUSTING),
        (0, R.ADJUSTING),
    ),
    Case("a drain out of routing", observe(_prefill(2, leaving=1), 2, queue=QUIET, kv=FULL), DOWN, UP),
    Case("a worker that waits", observe(1, _decode(2, **_BACKING_OFF), queue=BUSY, kv=FULL), UP, (0, R.COMING)),
    Case("one that waits counts as capacity", observe(1, _decode(1, **_BACKING_OFF), queue=[0.3], kv=IDLE), HOLD, DOWN),
    Case(
        "a promise is taken back without a deed",
        observe(_prefill(3, leaving=1), _decode(4, **_PROMISED), queue=[0.3], kv=IDLE),
        HOLD,
        DOWN,
        acts=(),
    ),
    Case(
        "and frees no GPU",
        observe(_prefill(3, leaving=1), _decode(4, **_PROMISED), queue=BUSY, kv=IDLE),
        (0, R.BUDGET),
        DOWN,
        acts=(),
    ),
    # Budget.
    Case("draining GPUs are held", observe(1, _decode(6, leaving=1), queue=[0.3], kv=FULL), HOLD, (0, R.BUDGET)),
    Case("the last GPU", observe(1, _decode(5, leaving=1), queue=[0.3], kv=FULL), HOLD, UP),
    Case(
        "kept for one that comes back",
        observe(_prefill(1, **_BACKING_OFF), 6, queue=[0.3], kv=FULL),
        HOLD,
        (0, R.BUDGET),
    ),
    Case("decode's GPU goes to prefill", observe(4, 4, queue=BUSY, kv=IDLE), UP, DOWN, acts=((DECODE, -1),)),
    Case(
        "a freed GPU is not enough for two",
        observe(2, 3, queue=QUIET, kv=FULL, decode_gpus=2),
        DOWN,
        (0, R.BUDGET),
    ),
    Case(
        "a freed GPU and a free one",
        observe(2, 3, queue=QUIET, kv=FULL, decode_gpus=2),
        DOWN,
        UP,
        load_options(max_gpu_budget=9),
        acts=CHANGES_HANDS,
    ),
    Case(
        "with room for it nothing waits",
        observe(2, 3, queue=QUIET, kv=FULL, decode_gpus=2),
        DOWN,
        UP,
        load_options(max_gpu_budget=10),
    ),
    Case(
        "a drain is taken back without room",
        observe(_prefill(2, leaving=1, cancellable=1), _decode(4, leaving=1, cancellable=1), queue=BUSY, kv=FULL),
        (1, R.TAKE_BACK),
        (1, R.TAKE_BACK),
        load_options(max_gpu_budget=8),
    ),
    Case(
        "a drain taken back takes no room",
        observe(_prefill(2, leaving=1, cancellable=1), 4, queue=BUSY, kv=FULL),
        (1, R.TAKE_BACK),
        UP,
    ),
    # The prefill queue's trend.
    Case("it heads exactly for the threshold", observe(1, 1, queue=[1.5, 1.25], kv=CALM), (0, R.QUEUE_EMPTYING), HOLD),
    Case("it heads above it", observe(1, 1, queue=[1.5, 1.28], kv=CALM), UP, HOLD),
    Case("its first and last samples alone", observe(1, 1, queue=[2, 90, 2], kv=CALM), UP, HOLD),
    # The option.
    Case("requests that wait count for nothing", observe(1, 1, queue=[0.3], kv=[0.85]), HOLD, HOLD),
    Case(
        "or as KV use, if one wants",
        replace(observe(1, 1, queue=[0.3], kv=[0.85]), readings=readings(queue=[0.3, 0.3], kv=[0.85, 0.85], waiting=5)),
        HOLD,
        UP,
        load_options(decode_kv_per_waiting_request=0.02),
    ),
    Case(
        "each as much as was said",
        replace(observe(1, 1, queue=[0.3], kv=[0.85]), readings=readings(queue=[0.3], kv=[0.85], waiting=2)),
        HOLD,
        HOLD,
        load_options(decode_kv_per_waiting_request=0.02),
    ),
    # When to be asked again: on the grid of intervals, and never now.
    Case("late", replace(observe(1, 1, queue=[0.3], kv=CALM), now_s=331.0), HOLD, HOLD, next_tick_at=360.0),
    Case("an interval late", replace(observe(1, 1, queue=[0.3], kv=CALM), now_s=360.0), HOLD, HOLD, next_tick_at=390.0),
    Case(
        "on time by a rounded clock",
        replace(observe(1, 1, queue=[0.3], kv=CALM), now_s=34.75913119424004, interval_began_s=32.459131194240044),
        HOLD,
        HOLD,
        load_options(adjustment_interval=2.3),
    ),
    Case("early", replace(observe(1, 1, queue=[0.3], kv=CALM), now_s=329.0), HOLD, HOLD, next_tick_at=330.0),
)

CASES = (*WORKED, *BOUNDARIES, *FLIPS)

"""Intervals of pulls and decisions: when, from what, and what interrupts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.policies.load_planner import AdjustmentIntervals, fresh
from dynamo_local.planner.values import Decision, IntervalObservation, Rule, WorkerPools
from tests.fakes.planner.observations import DECODE, PREFILL, pool, reading, worker_pools
from tests.fakes.planner.options import load_options

OPTIONS = load_options(adjustment_interval=30.0, metric_pulling_interval=1.0)
CALM = worker_pools(1, 2)
STARTING = worker_pools(1, pool(DECODE, 2, coming=1))


class Recorder:
    """A policy that remembers its observations, and fails on request."""

    def __init__(self, options: PlannerConfig = OPTIONS) -> None:
        self.seen: list[IntervalObservation] = []
        self.fails = False
        self._policy = LoadPolicy(options)

    def on_tick(self, observation: IntervalObservation) -> Decision:
        self.seen.append(observation)
        if self.fails:
            raise RuntimeError("boom")
        return self._policy.on_tick(observation)


def made(options: PlannerConfig = OPTIONS, now_s: float = 100.0) -> tuple[AdjustmentIntervals, Recorder]:
    policy = Recorder(options)
    return AdjustmentIntervals(policy, options, now_s), policy


def observation(
    intervals: AdjustmentIntervals,
    seen: WorkerPools = CALM,
    *,
    late_s: float = 0.0,
    kv: float = 0.7,
    queue: float = 0.3,
) -> Decision | None:
    at_s = intervals.next_pull_at + late_s
    return intervals.on_observation(reading(at_s, None if seen.prefill is None else queue, kv, seen.decode.ready), seen)


def until_decided(intervals: AdjustmentIntervals, seen: WorkerPools = CALM, most: int = 200, **how: float) -> Decision:
    """Pull until there is a decision."""
    for _ in range(most):
        decision = observation(intervals, seen, **how)
        if decision is not None:
            return decision
    raise AssertionError(f"no decision in {most} pulls")


def test_an_interval_ends_in_one_decision_from_all_its_readings() -> None:
    intervals, policy = made()
    assert intervals.next_tick_at == 130.0
    decision = until_decided(intervals)
    assert (decision.now_s, decision.next_tick_at) == (130.0, 160.0)
    (seen,) = policy.seen
    assert (seen.interval_began_s, [r.at_s for r in seen.readings]) == (100.0, [100.0 + n for n in range(1, 31)])
    assert intervals.observation == seen


def test_late_pulls_do_not_make_the_deadlines_drift() -> None:
    intervals, policy = made()
    for _ in range(10):
        until_decided(intervals, late_s=0.4)
    assert policy.seen[-1].interval_began_s == 100.0 + 9 * 30.0
    assert [len(seen.readings) for seen in policy.seen] == [30] * 10


def test_pulls_that_were_slept_over_are_left_out() -> None:
    """The host stood still for 5 s: the next pull is the next on the grid, not five at once."""
    intervals, _ = made()
    observation(intervals, late_s=5.2)
    assert intervals.next_pull_at == 107.0


def test_intervals_that_were_slept_over_are_left_out() -> None:
    intervals, policy = made()
    decision = observation(intervals, late_s=99.5)
    assert decision is not None
    assert (policy.seen[0].interval_began_s, decision.next_tick_at) == (100.0, 220.0)
    assert (intervals.interval_began_s, intervals.next_pull_at) == (190.0, 201.0)


@pytest.mark.parametrize(("interval_s", "pull_s"), [(0.7, 0.1), (30.0, 7.0), (1.0, 1.0), (2.3, 0.3)])
def test_the_last_pull_is_exactly_at_the_end(interval_s: float, pull_s: float) -> None:
    options = load_options(adjustment_interval=interval_s, metric_pulling_interval=pull_s)
    intervals, policy = made(options, now_s=0.0)
    for n in range(1, 6):
        assert until_decided(intervals).now_s == pytest.approx(n * interval_s, rel=1e-12)
    assert len({len(seen.readings) for seen in policy.seen}) == 1


def test_nothing_is_sampled_while_an_adjustment_is_under_way() -> None:
    intervals, policy = made()
    for _ in range(10):
        assert observation(intervals) is None
    for _ in range(50):
        assert observation(intervals, STARTING) is None
    assert (intervals.readings, intervals.next_tick_at, intervals.adjusting) == ((), None, True)
    assert observation(intervals, CALM) is None
    began_s = intervals.interval_began_s
    decision = until_decided(intervals)
    assert decision.now_s == began_s + 30.0
    assert len(policy.seen[0].readings) == 30


def test_a_worker_that_only_finishes_its_streams_holds_nothing_up() -> None:
    intervals, _ = made()
    assert until_decided(intervals, worker_pools(1, pool(DECODE, 2, leaving=1)), most=30).now_s == 130.0


def test_a_persons_change_is_held_for_an_interval() -> None:
    intervals, policy = made()
    for _ in range(29):
        observation(intervals)
    intervals.on_manual_change(129.5)
    decision = until_decided(intervals, worker_pools(1, 3))
    assert decision.now_s == 159.5
    assert policy.seen[0].pools.decode.ready == 3


def test_a_tick_that_fails_costs_its_interval_and_nothing_else() -> None:
    """The next interval decides again."""
    intervals, policy = made()
    policy.fails = True
    with pytest.raises(RuntimeError, match="boom"):
        until_decided(intervals)
    policy.fails = False
    assert until_decided(intervals).now_s == 160.0
    assert len(policy.seen[1].readings) == 30


def test_new_options_keep_the_interval_and_its_readings() -> None:
    intervals, _ = made()
    for _ in range(10):
        observation(intervals)
    options = OPTIONS.model_copy(update=dict(adjustment_interval=15.0, decode_kv_scale_up_threshold=0.6))
    policy = Recorder(options)
    intervals.with_options(policy, options)
    decision = until_decided(intervals)
    assert (decision.now_s, decision.steps[DECODE]) == (115.0, 1)
    assert len(policy.seen[0].readings) == 15


def test_another_pulling_interval_goes_on_from_the_last_pull() -> None:
    intervals, _ = made()
    for _ in range(10):
        observation(intervals)
    intervals.with_options(Recorder(), OPTIONS.model_copy(update=dict(metric_pulling_interval=4.0)))
    assert intervals.next_pull_at == 112.0
    assert len(intervals.readings) == 10


def test_new_options_while_an_adjustment_is_under_way_wait_for_its_end() -> None:
    intervals, _ = made()
    observation(intervals, STARTING)
    intervals.with_options(Recorder(), OPTIONS.model_copy(update=dict(adjustment_interval=5.0)))
    assert intervals.next_tick_at is None
    assert until_decided(intervals).now_s == intervals.interval_began_s


# --- an up that waits for the GPU of a down ----------------------------------------------------

FULL = worker_pools(4, 4)
DRAINING = worker_pools(pool(PREFILL, 3, leaving=1, cancellable=1), 4)
GONE = worker_pools(3, 4)
SHIFT = {"kv": 0.95, "queue": 0.0}


def deferred() -> tuple[AdjustmentIntervals, Recorder]:
    """Case 8 at its decision: prefill -1 now, decode +1 as soon as that GPU is free."""
    intervals, policy = made()
    decision = until_decided(intervals, FULL, **SHIFT)
    assert (decision.acts, decision.steps) == (((PREFILL, -1),), {PREFILL: -1, DECODE: 1})
    assert intervals.deferred == (DECODE,)
    return intervals, policy


def test_a_deferred_up_is_carried_out_when_the_gpu_is_really_free() -> None:
    intervals, _ = deferred()
    for _ in range(10):
        assert observation(intervals, DRAINING, **SHIFT) is None
    decision = observation(intervals, GONE, **SHIFT)
    assert decision is not None
    assert (decision.acts, decision.targets, decision.reasons[0].rule) == (((DECODE, 1),), {DECODE: 5}, Rule.GPU_FREED)
    assert intervals.deferred == ()
    assert observation(intervals, worker_pools(3, pool(DECODE, 4, coming=1)), **SHIFT) is None
    assert intervals.adjusting


def test_a_deferred_up_counts_as_capacity_on_its_way() -> None:
    """No second up for that component while it waits."""
    intervals, policy = deferred()
    decision = until_decided(intervals, DRAINING, kv=0.95, queue=0.3)
    assert (decision.acts, decision.targets[DECODE]) == ((), 5)
    assert {reason.component: reason.rule for reason in decision.reasons}[DECODE] is Rule.COMING
    assert policy.seen[-1].pools.decode.capacity == 5


def test_a_drain_taken_back_cancels_the_up_that_waited_for_it() -> None:
    intervals, _ = deferred()
    observation(intervals, DRAINING, **SHIFT)
    for _ in range(3):
        assert intervals.deferred == (DECODE,)
        assert observation(intervals, FULL, **SHIFT) is None
    assert intervals.deferred == ()
    decision = until_decided(intervals, FULL, kv=0.95, queue=0.3)
    assert "was dropped: the drain whose GPU it waited for was taken back" in decision.notes[0]
    assert until_decided(intervals, FULL, kv=0.95, queue=0.3).notes == ()


def test_a_drain_that_is_seen_a_pull_late_cancels_nothing() -> None:
    intervals, _ = deferred()
    for seen in (FULL, FULL, DRAINING, FULL, FULL, DRAINING):
        observation(intervals, seen, **SHIFT)
    assert intervals.deferred == (DECODE,)


def test_a_down_that_another_environment_has_yet_to_carry_out_is_waited_for() -> None:
    intervals, _ = deferred()
    for seen in (*[replace(FULL, pending=True)] * 10, replace(GONE, pending=True)):
        assert observation(intervals, seen, **SHIFT) is None
        assert intervals.adjusting
    decision = observation(intervals, GONE, **SHIFT)
    assert decision is not None
    assert decision.acts == ((DECODE, 1),)


def test_a_load_that_falls_takes_a_deferred_up_back_without_a_deed() -> None:
    intervals, _ = deferred()
    decision = until_decided(intervals, DRAINING, kv=0.3, queue=0.3)
    assert (decision.steps[DECODE], decision.acts, intervals.deferred) == (-1, (), ())


def test_a_persons_change_forgets_a_deferred_up() -> None:
    intervals, _ = deferred()
    intervals.on_manual_change(140.0)
    assert intervals.deferred == ()


# --- lessons -----------------------------------------------------------------------------------


def test_lesson_14_an_interval_without_samples_holds_and_the_next_one_recovers() -> None:
    intervals, _ = made()
    lost = Missing("nats timeout")
    for _ in range(30):
        at_s = intervals.next_pull_at
        decision = intervals.on_observation(reading(at_s, lost, lost, 2), CALM)
    assert decision is not None
    assert [(reason.step, reason.rule) for reason in decision.reasons] == [(0, Rule.MISSING)] * 2
    assert until_decided(intervals, kv=0.95).steps[DECODE] == 1


def test_lesson_7_a_step_of_a_large_engine_counts_all_its_gpus() -> None:
    intervals, _ = made()
    decision = until_decided(intervals, worker_pools(1, 1, decode_gpus=4), kv=0.95)
    assert {reason.component: reason.rule for reason in decision.reasons}[DECODE] is Rule.BUDGET


def test_lesson_16_a_slow_start_is_answered_by_one_worker_only() -> None:
    intervals, _ = made()
    assert until_decided(intervals, kv=0.95).acts == ((DECODE, 1),)
    assert all(observation(intervals, STARTING, kv=0.95) is None for _ in range(300))


def test_lesson_24_grace_protects_three_whole_intervals_after_a_worker_came() -> None:
    """It became ready between two pulls, as it does in life: the fourth decision after that may go down."""
    intervals, _ = made()
    observation(intervals, STARTING)
    came = worker_pools(1, replace(pool(DECODE, 3), added_at_s=intervals.next_pull_at - 0.6))
    observation(intervals, came)
    steps = [until_decided(intervals, came, kv=0.1).steps[DECODE] for _ in range(4)]
    assert steps == [0, 0, 0, -1]


@pytest.mark.parametrize(("age_s", "missing"), [(0.0, False), (3.0, False), (3.01, True)])
def test_a_value_older_than_three_pulls_is_missing(age_s: float, missing: bool) -> None:
    value = fresh(Load(), taken_at_s=100.0 - age_s, now_s=100.0, pulling_interval_s=1.0)
    assert isinstance(value, Missing) is missing

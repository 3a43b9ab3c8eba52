"""When it decides, what it does without data, and who else may have a say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.sla import SlaPolicy, SlaState
from dynamo_local.planner.policies.sla_sizing import SlaRule
from dynamo_local.planner.values import ComponentTarget, Decision, Forecasts, Prediction, Traffic, Window
from tests.fakes.planner.observations import DECODE, PREFILL, pool
from tests.fakes.planner.sla_worlds import (
    INTERVAL_S,
    constant,
    decided,
    observation,
    policy,
    reason_of,
    targets_of,
    tick,
    traffic,
)

NOT_HAD = Missing("prometheus timeout")


def held(decision: Decision) -> set[str]:
    """The rules; AssertionError where anything is to be changed."""
    assert decision.acts == ()
    return {str(reason.rule) for reason in decision.reasons}


def after_one(one: SlaPolicy, pools: tuple[int, int] = (3, 3)) -> SlaState:
    """The state after one window of the worked case."""
    return tick(one, one.first(0.0), observation(traffic(), pools))[0]


# --- when --------------------------------------------------------------------------------------


def test_it_decides_at_each_intervals_end_and_not_before() -> None:
    one = policy()
    state = one.first(1000.0)
    assert one.next_at_s(state) == 1000.0 + INTERVAL_S
    early = observation(traffic(), at_s=1000.0 + INTERVAL_S - 1)
    assert one.forecasting(state, early) is None
    assert tick(one, state, early) == (state, None)
    assert one.needs(state).traffic_window_s == INTERVAL_S


@pytest.mark.parametrize(("late_s", "next_s"), [(0.0, 360.0), (7.5, 360.0), (INTERVAL_S, 540.0), (400.0, 720.0)])
def test_a_late_tick_moves_no_interval(late_s: float, next_s: float) -> None:
    one = policy()
    seen = observation(traffic(), at_s=INTERVAL_S + late_s)
    state, decision = tick(one, one.first(0.0), seen)
    assert decision is not None
    assert decision.next_tick_at == one.next_at_s(state) == next_s


@pytest.mark.parametrize("duration_s", [90.0, 180.0, 720.0])
def test_a_window_of_another_length_counts_by_its_rate(duration_s: float) -> None:
    seen = traffic(40 * duration_s, duration_s=duration_s)
    assert targets_of(decided(policy(), observation(seen))) == (3, 3)


def test_somebody_who_scales_begins_the_interval_anew() -> None:
    one = policy()
    state = after_one(one)
    later = one.manual(state, 250.0)
    assert one.next_at_s(later) == 250.0 + INTERVAL_S
    assert later.series == state.series


def test_new_options_keep_what_was_learned() -> None:
    state = after_one(policy())
    other = policy(throughput_adjustment_interval_seconds=60.0, itl_ms=20.0)
    taken = other.taking_over(state)
    assert other.next_at_s(taken) == INTERVAL_S + 60.0
    assert taken.series.columns == ((2400.0,), (3000.0,), (300.0,))


def test_where_it_stands_is_told() -> None:
    one = policy()
    seen = observation(traffic())
    state, _ = tick(one, one.first(0.0), seen)
    status = one.status(state)
    assert (status.next_tick_at, status.interval_began_s) == (2 * INTERVAL_S, 0.0)
    assert status.readings == (seen.reading,)


# --- what is not known -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unknown",
    [NOT_HAD, None, traffic(NOT_HAD), traffic(float("nan")), traffic(-3.0), traffic(100.0, duration_s=0.0)],
)
def test_traffic_that_is_not_known_holds(unknown: Traffic | Missing | None) -> None:
    one = policy()
    state = after_one(one)
    seen = observation(unknown, (3, 3), at_s=2 * INTERVAL_S)
    assert one.forecasting(state, seen) is None
    after, decision = tick(one, state, seen)
    assert decision is not None
    assert held(decision) == {SlaRule.NO_TRAFFIC_DATA}
    assert after.series.windows == state.series.windows


def test_why_it_holds_is_said() -> None:
    """In the words of whoever could not measure."""
    decision = decided(policy(), observation(NOT_HAD))
    assert {reason.why for reason in decision.reasons} == {"prometheus timeout"}


def test_silence_is_known_and_goes_to_the_floors() -> None:
    one = policy(min_endpoint=2)
    quiet = Traffic(2 * INTERVAL_S, INTERVAL_S, num_req=0.0)
    _, decision = tick(one, after_one(one), observation(quiet, (3, 3), at_s=2 * INTERVAL_S))
    assert decision is not None
    assert targets_of(decision) == (2, 2)


def test_before_the_first_request_nothing_is_planned() -> None:
    one = policy()
    quiet = Traffic(INTERVAL_S, INTERVAL_S, num_req=0.0)
    state, decision = tick(one, one.first(0.0), observation(quiet, (2, 2)))
    assert decision is not None
    assert held(decision) == {SlaRule.NO_TRAFFIC_DATA}
    _, decision = tick(one, state, observation(traffic(), (2, 2), at_s=2 * INTERVAL_S))
    assert decision is not None
    assert targets_of(decision) == (3, 3)


def test_a_trace_stands_for_the_windows_before() -> None:
    """So that the first silent window is no reason to hold."""
    one = replace(policy(), warmup=(Window(7200.0, 3000.0, 300.0),))
    quiet = Traffic(INTERVAL_S, INTERVAL_S, num_req=0.0)
    assert targets_of(decided(one, observation(quiet))) == (3, 3)


@pytest.mark.parametrize(
    "failed",
    [
        Missing("the predictor took longer than 30 s"),
        Forecasts(((7200.0,), Missing("arima: no convergence"), (300.0,))),
        Forecasts(((float("nan"),), (3000.0,), (300.0,))),
    ],
)
def test_without_a_forecast_it_holds(failed: Forecasts | Missing) -> None:
    """A window that was seen stays seen."""
    one = policy()
    state = after_one(one)
    seen = observation(traffic(14_400.0), (2, 2), at_s=2 * INTERVAL_S)
    after, decision = tick(one, state, seen, forecasts=failed)
    assert decision is not None
    assert held(decision) == {SlaRule.PREDICT_FAILED}
    assert len(after.series.windows) == 2


def test_a_length_that_a_trend_takes_below_one_token_is_the_last_one() -> None:
    decision = decided(policy(), observation(traffic()), forecasts=Forecasts(((7200.0,), (0.0,), (0.3,))))
    numbers = reason_of(decision, PREFILL).numbers
    assert (numbers["next_isl"], numbers["next_osl"]) == (3000.0, 300.0)


def test_what_is_forecast_are_requests_and_lengths() -> None:
    one = policy(load_predictor="kalman", kalman_r=3.0)
    task = one.forecasting(one.first(0.0), observation(traffic()))
    assert task is not None
    assert (task.predictor, task.steps, task.window_s) == ("kalman", 1, INTERVAL_S)
    assert ("r", 3.0) in task.options
    assert task.series == ((7200.0,), (3000.0,), (300.0,))


def test_start_ups_that_were_seen_are_the_lead_and_the_shortest_interval() -> None:
    slow = pool(PREFILL, 1, start_up_s=400.0), pool(DECODE, 1, start_up_s=20.0, drain_s=90.0)
    one = policy(adaptive_intervals=True)
    seen = observation(traffic(), slow)
    task = one.forecasting(one.first(0.0), seen)
    assert task is not None
    assert task.steps == 4
    ahead = Forecasts(((7200.0, 1.0, 1.0, 14_400.0), (3000.0,) * 4, (300.0,) * 4))
    state, decision = tick(one, one.first(0.0), seen, forecasts=ahead)
    assert decision is not None
    assert targets_of(decision) == (5, 6)
    assert decision.next_tick_at == INTERVAL_S + 400.0
    assert one.needs(state).traffic_window_s == 400.0


def test_while_the_workers_cannot_be_observed_it_holds() -> None:
    seen = observation(NOT_HAD, blind="etcd does not answer")
    for plugin in (None, (ComponentTarget("decode", 5),)):
        decision = decided(policy(), seen, plugin=plugin)
        assert decision.acts == ()


def test_a_graph_without_prefill_workers_is_left_alone() -> None:
    decision = decided(policy(), observation(traffic(), (None, 2)))
    assert held(decision) == {SlaRule.DISAGGREGATED_ONLY}
    assert "throughput-load" in decision.reasons[0].why


def test_a_decision_that_another_environment_has_not_acknowledged_is_waited_for() -> None:
    one = policy()
    seen = observation(traffic())
    state, decision = tick(one, one.first(0.0), replace(seen, pools=replace(seen.pools, pending=True)))
    assert decision is not None
    assert held(decision) == {SlaRule.SCALING_IN_PROGRESS}
    assert len(state.series.windows) == 1


def test_what_was_forecast_meanwhile_is_decided_as_soon_as_it_is_acknowledged() -> None:
    one = policy()
    seen = observation(traffic())
    waits = replace(seen.pools, pending=True)
    state, _ = tick(one, one.first(0.0), replace(seen, pools=waits))
    for at_s in (181.0, 182.0):
        assert one.next_at_s(state) == at_s
        state, decision = tick(one, state, replace(observation(None, at_s=at_s), pools=waits))
        assert decision is None
    state, decision = tick(one, state, observation(None, at_s=183.0))
    assert decision is not None
    assert targets_of(decision) == (3, 3)
    assert one.next_at_s(state) == decision.next_tick_at == 2 * INTERVAL_S
    assert len(state.series.windows) == 1


def test_a_decision_that_waits_gives_way_to_the_next_window() -> None:
    one = policy()
    seen = observation(traffic())
    state, _ = tick(one, one.first(0.0), replace(seen, pools=replace(seen.pools, pending=True)))
    assert one.next_at_s(one.manual(state, 200.0)) == 200.0 + INTERVAL_S
    state, decision = tick(one, state, observation(traffic(100.0), (3, 3), at_s=2 * INTERVAL_S))
    assert decision is not None
    assert targets_of(decision) == (1, 1)
    assert one.next_at_s(state) == 3 * INTERVAL_S


# --- others ------------------------------------------------------------------------------------


def test_the_prediction_of_a_plugin_counts() -> None:
    one = policy()
    seen = observation(NOT_HAD)
    state, prediction = one.predicted(one.first(0.0), seen, constant(one, one.first(0.0), seen))
    assert prediction is None
    state, proposals = one.propose(state, seen, Prediction(7200.0, 3000.0, 300.0, source="another"))
    assert len(proposals) == 1
    _, decision = one.settle(state, seen, (ComponentTarget("prefill", 3), ComponentTarget("decode", 3)))
    assert decision is not None
    assert targets_of(decision) == (3, 3)


def test_half_a_prediction_is_none() -> None:
    one = policy()
    seen = observation(traffic())
    assert one.propose(one.first(0.0), seen, Prediction(7200.0, 3000.0))[1] == ()


def test_a_plugins_target_is_kept_within_the_bounds() -> None:
    decision = decided(policy(max_gpu_budget=8), observation(traffic()), plugin=(ComponentTarget("decode", 5),))
    assert targets_of(decision) == (3, 5)
    assert reason_of(decision, DECODE).rule == SlaRule.OVERRIDDEN
    assert "a plugin asked for 5" in reason_of(decision, DECODE).why
    decision = decided(policy(max_gpu_budget=8), observation(traffic()), plugin=(ComponentTarget("decode", 50),))
    assert sum(targets_of(decision)) <= 8
    assert reason_of(decision, DECODE).rule == SlaRule.MAX_GPU_BUDGET


def test_what_a_plugin_rejects_is_not_done() -> None:
    assert held(decided(policy(), observation(traffic()), plugin=())) == {SlaRule.OVERRIDDEN}


def test_a_plugin_may_plan_where_the_traffic_is_not_known() -> None:
    decision = decided(policy(), observation(NOT_HAD, (2, 2)), plugin=(ComponentTarget("decode", 4),))
    assert targets_of(decision) == (2, 4)


def test_a_plugins_ceiling_takes_no_worker_back_that_is_on_its_way() -> None:
    starting = (2, pool(DECODE, 2, coming=1))
    decision = decided(policy(), observation(NOT_HAD, starting), plugin=(ComponentTarget("decode", 2),))
    assert targets_of(decision) == (2, 3)

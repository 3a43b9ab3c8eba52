"""The policy `sla`: when it decides, how it sizes, within which bounds, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.policies.explain import explain, explain_reason
from dynamo_local.planner.policies.sla import SlaPolicy, SlaState
from dynamo_local.planner.policies.sla_sizing import Corrections, SlaRule, corrected, decode_need, prefill_need
from dynamo_local.planner.values import (
    ComponentTarget,
    Counterfactual,
    Decision,
    Forecasts,
    Prediction,
    Traffic,
    Window,
)
from tests.fakes.planner.observations import DECODE, PREFILL, pool
from tests.fakes.planner.sla_worlds import (
    H200,
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


# --- sla worked
# The calculator of Dynamo's SLA planner.

NUM_REQ, ISL, OSL, CONTEXT = 7200.0, 3000.0, 300.0, 3150.0


def prefill_engines(factor: float) -> int:
    return prefill_need(ISL, factor, 500.0, 1, H200[0]).engines(NUM_REQ, INTERVAL_S)


def decode_engines(factor: float) -> int:
    return decode_need(CONTEXT, OSL, factor, 10.0, 1, H200[1]).engines(NUM_REQ, INTERVAL_S)


def test_the_load_of_the_worked_case() -> None:
    assert prefill_need(ISL, 1.0, 500.0, 1, H200[0]).load(NUM_REQ, INTERVAL_S) == pytest.approx(120_000)
    assert decode_need(CONTEXT, OSL, 1.0, 10.0, 1, H200[1]).load(NUM_REQ, INTERVAL_S) == pytest.approx(12_000)


@pytest.mark.parametrize(("factor", "engines"), [(1.0, 3), (0.4, 1), (3.0, 3)])
def test_prefill_of_the_worked_case(factor: float, engines: int) -> None:
    assert prefill_engines(factor) == engines


@pytest.mark.parametrize(("factor", "engines"), [(1.0, 3), (1.25, 4)])
def test_decode_of_the_worked_case(factor: float, engines: int) -> None:
    assert decode_engines(factor) == engines


def test_the_policy_decides_the_worked_case() -> None:
    decision = decided(policy(), observation(traffic()))
    assert targets_of(decision) == (3, 3)
    assert decision.acts == ((PREFILL, 2), (DECODE, 2))
    prefill, decode = reason_of(decision, PREFILL), reason_of(decision, DECODE)
    assert prefill.numbers["load_tokens_per_s"] == pytest.approx(120_000)
    assert prefill.numbers["engine_tokens_per_s"] == pytest.approx(49_481, rel=0.02)
    assert decode.numbers["load_tokens_per_s"] == pytest.approx(12_000)
    assert decode.numbers["engine_tokens_per_s"] == pytest.approx(4_556, rel=0.02)
    assert decode.numbers["context_length"] == CONTEXT


def test_the_policy_decides_the_worked_case_with_both_corrections() -> None:
    """Measured: TTFT 0.4 and ITL 1.25 of what the profile expects. 1P and 4D."""
    prefill, decode = H200
    concurrency = NUM_REQ / 2 * 3.6 / INTERVAL_S
    seen = traffic(
        ttft_ms=0.4 * prefill.interpolate_ttft(ISL).value,
        itl_ms=1.25 * decode.interpolate_itl(concurrency, CONTEXT).value,
        request_duration_s=3.6,
    )
    decision = decided(policy(), observation(seen, (2, 2)))
    assert targets_of(decision) == (1, 4)
    assert reason_of(decision, PREFILL).numbers["p_correction"] == pytest.approx(0.4)
    assert reason_of(decision, DECODE).numbers["d_correction"] == pytest.approx(1.25)
    assert reason_of(decision, DECODE).numbers["corrected_itl_ms"] == pytest.approx(8.0)


def test_without_correction_the_profile_is_believed() -> None:
    seen = traffic(ttft_ms=1.0, itl_ms=500.0, request_duration_s=3.6)
    assert targets_of(decided(policy(no_correction=True), observation(seen))) == (3, 3)


def test_engines_of_more_gpus_are_fewer() -> None:
    decision = decided(policy(), observation(traffic(), prefill_gpus=2, decode_gpus=4))
    assert targets_of(decision) == (2, 1)


@pytest.mark.parametrize(
    "unknown",
    [
        {"ttft_ms": Missing("no request"), "itl_ms": Missing("no request")},
        {"ttft_ms": 0.0, "itl_ms": 0.0},
        {"ttft_ms": float("nan"), "itl_ms": float("nan")},
        {"isl": Missing("no request"), "ttft_ms": 80.0, "itl_ms": 12.0},
        {"num_req": 0.0, "itl_ms": 12.0},
        {"request_duration_s": Missing("no request"), "itl_ms": 12.0},
    ],
)
def test_a_factor_that_cannot_be_computed_stays_as_it_was(unknown: dict[str, float | Missing]) -> None:
    """Missing is not zero: a factor of 0 would plan no prefill worker at all."""
    seen = traffic(**({"request_duration_s": 3.6} | unknown))
    before = Corrections(0.7, 1.1)
    assert corrected(before, seen, 2, *H200) == before


def test_without_a_ready_decode_worker_nothing_is_said_of_decode() -> None:
    seen = traffic(itl_ms=20.0, request_duration_s=3.6)
    assert corrected(Corrections(), seen, 0, *H200).decode == 1.0
    assert corrected(Corrections(), seen, 2, *H200).decode > 1.0


# --- sla bounds
# Floors, budget and the longest step; which of them decided.

R = SlaRule


@pytest.mark.parametrize(
    ("wanted", "floors", "gpus", "budget", "expected"),
    [
        ((3, 3), (1, 1), (1, 1), 8, (3, 3)),
        ((6, 6), (1, 1), (1, 1), 8, (4, 4)),
        ((4, 5), (1, 1), (1, 1), 8, (3, 5)),
        ((3, 9), (3, 1), (1, 1), 8, (3, 5)),
        ((3, 6), (3, 1), (1, 1), 8, (3, 5)),
        ((9, 3), (1, 3), (1, 1), 8, (5, 3)),
        ((9, 1), (1, 1), (2, 1), 8, (3, 1)),
        ((8, 8), (1, 1), (0, 1), 8, (8, 8)),
        ((8, 9), (1, 1), (0, 1), 8, (8, 8)),
    ],
)
def test_both_give_way_in_proportion(
    wanted: tuple[int, int], floors: tuple[int, int], gpus: tuple[int, int], budget: int, expected: tuple[int, int]
) -> None:
    assert fitting(wanted, floors, gpus, budget) == list(expected)


def test_decode_never_grows_above_what_it_wanted() -> None:
    """Upstream gave it what prefill could not use: five of 4 GPUs and one decode worker became 1P4D at 8."""
    assert fitting((5, 1), (1, 1), (4, 1), 8) == [1, 1]


def test_a_budget_below_the_floors_changes_nothing() -> None:
    decision = decided(policy(max_gpu_budget=1), observation(traffic(), (2, 3)))
    assert targets_of(decision) == (2, 3)
    assert [reason.rule for reason in decision.reasons] == [R.MAX_GPU_BUDGET] * 2


@pytest.mark.parametrize(
    ("options", "pools", "prefill", "decode"),
    [
        ({}, (1, 1), (3, R.SCALE), (3, R.SCALE)),
        ({}, (3, 4), (3, R.NO_CHANGE), (3, R.SCALE)),
        ({"min_endpoint": 3}, (3, 1), (3, R.NO_CHANGE), (3, R.SCALE)),
        ({"min_endpoint": 5}, (5, 5), (5, R.MIN_ENDPOINT), (5, R.MIN_ENDPOINT)),
        ({"min_gpu_budget": 4}, (4, 1), (4, R.MIN_ENDPOINT), (4, R.MIN_ENDPOINT)),
        ({"max_gpu_budget": 4}, (1, 1), (2, R.MAX_GPU_BUDGET), (2, R.MAX_GPU_BUDGET)),
        ({"max_gpu_budget": 5}, (1, 1), (2, R.MAX_GPU_BUDGET), (3, R.SCALE)),
        ({"max_throughput_scaling_replicas": 1}, (1, 9), (2, R.MAX_STEP), (8, R.MAX_STEP)),
        ({"max_throughput_scaling_replicas": 1, "min_endpoint": 2}, (0, 2), (2, R.MIN_ENDPOINT), (3, R.SCALE)),
    ],
)
def test_the_bound_that_decided_is_the_reason(
    options: dict[str, int], pools: tuple[int, int], prefill: tuple[int, SlaRule], decode: tuple[int, SlaRule]
) -> None:
    decision = decided(policy(**options), observation(traffic(), pools))
    assert targets_of(decision) == (prefill[0], decode[0])
    assert [reason_of(decision, name).rule for name in (PREFILL, DECODE)] == [prefill[1], decode[1]]


def test_workers_on_their_way_count() -> None:
    """It does not wait for them, and does not ask for them again: upstream's user scaled 2, 4, 8, 16."""
    starting = (pool(PREFILL, 1, coming=2), pool(DECODE, 1, coming=1))
    decision = decided(policy(), observation(traffic(), starting))
    assert targets_of(decision) == (3, 3)
    assert decision.steps == {PREFILL: 0, DECODE: 1}


def test_a_role_goes_down_before_the_other_goes_up() -> None:
    decision = decided(policy(), observation(traffic(), (1, 6)))
    assert decision.acts == ((DECODE, -3), (PREFILL, 2))


def test_a_stricter_target_never_takes_workers_away() -> None:
    """Upstream took the best capacity that is not eligible: a TTFT nobody can keep gave more capacity per engine."""
    found = [
        targets_of(decided(policy(itl_ms=itl_ms), observation(traffic())))
        for itl_ms in (40, 20, 10, 8, 6, 5, 4.4, 4, 1)
    ]
    assert found == sorted(found)
    assert found[-1] == found[-2]
    unreachable = decided(policy(itl_ms=4.0), observation(traffic()))
    assert reason_of(unreachable, DECODE).numbers["attainable"] == 0
    assert "no engine keeps the ITL of 4 ms" in unreachable.notes[0]
    tight = decided(policy(ttft_ms=20.0), observation(traffic()))
    assert targets_of(tight)[0] == 3
    assert "no engine keeps the TTFT of 20 ms" in tight.notes[0]


# --- sla words
# Decisions of the SLA planner in words, and what it would have taken to decide otherwise.


@pytest.mark.parametrize(
    ("options", "pools", "said"),
    [
        ({}, (1, 1), "PrefillWorker +2 (scale): 7,200 requests of 3,000 tokens in 180 s: 120,000 tokens/s; an engine "),
        ({}, (1, 1), "VllmWorker +2 (scale): 7,200 requests of 300 tokens in 180 s: 12,000 tokens/s; an engine does "),
        ({}, (1, 1), "tokens/s within ITL 10 ms at 3,150 tokens: 3 wanted, 1 there; with "),
        ({}, (3, 3), "PrefillWorker holds (no_change): "),
        ({}, (3, 3), ": 3 wanted, as many there; with "),
        ({"min_endpoint": 4}, (4, 4), "(min_endpoint): "),
        ({"min_endpoint": 4}, (4, 4), "3 wanted, but there are never fewer than 4; with min-endpoint 5 instead of 4 "),
        ({"max_gpu_budget": 4}, (1, 1), "3 wanted, but both roles share 4 GPUs; with "),
        ({"max_throughput_scaling_replicas": 1}, (1, 1), "3 wanted, 1 there, but one step is at most 1; with "),
    ],
)
def test_it_says_the_load_the_capacity_and_the_bound(
    options: dict[str, int], pools: tuple[int, int], said: str
) -> None:
    assert said in "\n".join(explain(decided(policy(**options), observation(traffic(), pools))))


def test_corrections_are_said_where_they_are_some() -> None:
    seen = traffic(ttft_ms=24.0, itl_ms=30.0, request_duration_s=3.6)
    told = "\n".join(explain(decided(policy(), observation(seen))))
    assert "in 180 s × 0." in told
    assert "(TTFT measured / expected): " in told
    assert "within ITL 10 ms / " in told


def test_what_is_extrapolated_is_noted() -> None:
    """Prompts of 60,000 tokens were never measured."""
    told = explain(decided(policy(), observation(traffic(100.0, isl=60_000.0))))
    assert "PrefillWorker: nothing like what is expected was profiled; its capacity is extrapolated" in told
    assert any(line.startswith("VllmWorker: nothing like") for line in told)


def test_a_plugins_word_is_told_from_ones_own() -> None:
    decision = decided(policy(), observation(traffic()), plugin=(ComponentTarget("prefill", 7),))
    assert "3 wanted, but a plugin asked for 7" in "\n".join(explain(decision))


def test_the_number_of_requests_that_would_decide_otherwise() -> None:
    reason = reason_of(decided(policy(), observation(traffic())), DECODE)
    other = reason.otherwise
    assert other is not None
    assert other.name == "next_num_req"
    engine = reason.numbers["engine_tokens_per_s"]
    edges = [engines * engine * 180 / 300 for engines in (2, 3)]
    assert min(abs(other.needed / edge - 1) for edge in edges) < 1e-6
    assert reason_of(decided(policy(), observation(traffic(other.needed))), DECODE).step == other.step


def test_more_requests_are_not_said_to_be_below_a_number() -> None:
    """Rounded to the nearest, 979.6239 was told as `below 979.624 requests it would have gone +1`."""
    reason = replace(reason_of(decided(policy(), observation(traffic())), PREFILL), otherwise=None)
    for value, needed, told in (
        (978.571, 979.6239, "979.624"),
        (978.571, 979.6241, "979.625"),
        (980.0, 979.6241, "979.624"),
    ):
        other = Counterfactual("next_num_req", value, needed, 1)
        words = explain_reason(replace(reason, otherwise=other))
        assert words.endswith(f"with {told} requests in the next interval it would have gone +1")


def test_the_budget_that_would_decide_otherwise() -> None:
    reason = reason_of(decided(policy(max_gpu_budget=5), observation(traffic(), (2, 3))), PREFILL)
    assert reason.otherwise is not None
    assert (reason.otherwise.name, reason.otherwise.needed, reason.otherwise.step) == ("max_gpu_budget", 6, 1)

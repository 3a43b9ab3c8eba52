"""When the loops are due, what they ask for, and what changes under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.pass_model import Kind, PassModel
from dynamo_local.planner.policies.explain import explain
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.planner.policies.throughput_load.state import ScalingState
from dynamo_local.planner.values import ComponentTarget, Decision, Forecasts, OverrideType, Reason, Window
from tests.fakes.planner.engines_seen import (
    LIMITS,
    MODELS,
    PREFILL_PASSES,
    LastValue,
    both_loops,
    decide,
    driver,
    load_loop,
    numbers,
    observation,
    replicas,
    rules,
    sized,
    sla,
    traffic,
    untrained,
)
from tests.fakes.planner.observations import DECODE, PREFILL, pool
from tests.fakes.planner.options import throughput_load_options


@pytest.mark.parametrize(
    ("options", "tick_s"),
    [
        (throughput_load_options(), 5.0),
        (sla(), 180.0),
        (both_loops(), 5.0),
        (both_loops(load_adjustment_interval_seconds=7.0), 1.0),
        (both_loops(load_adjustment_interval_seconds=0.5), 0.5),
        (both_loops(scheduling={"scale_interval_seconds": 2.5}), 2.5),
    ],
)
def test_ticks_divide_the_intervals_of_the_loops_that_run(options: PlannerConfig, tick_s: float) -> None:
    assert (options.tick_s, driver(options).next_at_s) == (tick_s, tick_s)


def test_dynamos_defaults_are_the_load_loop_by_a_table() -> None:
    defaults, bare = throughput_load_options(), throughput_load_options(optimization_target="sla")
    assert (defaults.loads, defaults.predicts) == (True, False)
    assert (bare.loads, bare.predicts) == (False, True)


def test_traffic_is_asked_for_where_the_throughput_loop_is_due() -> None:
    drives = driver(both_loops(throughput_adjustment_interval_seconds=15.0))
    windows = []
    for _ in range(6):
        windows.append(drives.needs.traffic_window_s)
        drives.tick_now(observation(drives.next_at_s))
    assert windows == [None, None, 15.0] * 2


def test_a_person_is_respected_for_an_interval() -> None:
    drives = driver(both_loops())
    while drives.next_at_s < 180.0:
        drives.tick_now(observation(drives.next_at_s))
    assert replicas(drives.tick_now(observation(180.0, seen=traffic(180.0, 7200)))) == (2, 3)
    drives.manual(183.0)
    assert drives.next_at_s == 188.0
    decision = drives.tick_now(observation(188.0))
    assert replicas(decision) == (1, 1)


def test_other_options_keep_what_was_learned() -> None:
    drives = driver(load_loop())
    drives.tick_now(observation(5.0, queues=[4_000]))
    drives.change(ThroughputLoadPolicy(load_loop(ttft_ms=100.0)), 6.0)
    decision = drives.tick_now(observation(10.0, queues=[4_000]))
    assert replicas(decision) == (2, 1)


def test_a_predictor_that_failed_holds() -> None:
    drives = driver(sla(), forecaster=LastValue(failed="it was killed"))
    decision = drives.tick_now(observation(180.0, 3, 3, seen=traffic(180.0, 900)))
    assert (replicas(decision), set(rules(decision).values())) == ((3, 3), {"predict_failed"})


def test_the_predictor_is_asked_for_three_series() -> None:
    options = sla(load_predictor="kalman", kalman_q_level=2.0)
    policy = ThroughputLoadPolicy(options, MODELS, (Window(10.0, 100.0, 20.0),))
    task = policy.forecasting(policy.first(0.0), observation(180.0, seen=traffic(180.0, 7200)))
    assert task is not None
    assert (task.predictor, task.steps, task.window_s, dict(task.options)["q_level"]) == ("kalman", 1, 180.0, 2.0)
    assert task.series == ((10.0, 7200.0), (100.0, 2000.0), (20.0, 200.0))


def test_blind_means_hold() -> None:
    decision = decide(load_loop(), 2, 1, queues=[None, None], blind="etcd does not answer")
    assert (replicas(decision), rules(decision)[PREFILL]) == ((2, 1), "no_fpm_data")
    assert decision.reasons[0].why == "etcd does not answer"


def test_nothing_is_done_while_another_environment_has_not_acknowledged() -> None:
    drives = driver(load_loop())
    waits = observation(5.0, 1, 1, queues=[30_000])
    decision = drives.tick_now(replace(waits, pools=replace(waits.pools, pending=True)))
    assert (replicas(decision), rules(decision)[PREFILL]) == ((1, 1), "scaling_in_progress")


def test_a_worker_that_waits_for_a_gpu_counts_and_blocks_nothing() -> None:
    waits = pool(PREFILL, 1, coming=1, waiting=1)
    assert replicas(decide(load_loop(), waits, 1, queues=[30_000])) == (2, 1)
    assert replicas(decide(load_loop(), waits, 1)) == (1, 1)


def test_only_the_throughput_loop_reaches_and_leaves_zero() -> None:
    options = both_loops(min_endpoint=0)
    drives = driver(options)

    def until(at_s: float, ready: int) -> None:
        while drives.next_at_s < at_s:
            decision = drives.tick_now(observation(drives.next_at_s, ready, ready))
            assert decision is not None
            assert replicas(decision) == (ready, ready)

    until(180.0, 1)
    assert replicas(drives.tick_now(observation(180.0, seen=traffic(180.0, 900)))) == (1, 1)
    until(360.0, 1)
    assert replicas(drives.tick_now(observation(360.0, seen=traffic(360.0, 0)))) == (0, 0)
    until(540.0, 0)
    assert replicas(drives.tick_now(observation(540.0, 0, 0, seen=traffic(540.0, 900)))) == (1, 1)


def test_proposals_are_those_of_dynamos_builtin_plugins() -> None:
    policy = ThroughputLoadPolicy(
        both_loops(throughput_adjustment_interval_seconds=10.0, load_adjustment_interval_seconds=5.0), MODELS
    )
    state = policy.first(0.0)
    state, _ = policy.predicted(state, observation(5.0), None)
    state, _ = policy.propose(state, observation(5.0), None)
    busy = observation(10.0, queues=[30_000], seen=traffic(10.0, 7200))
    forecasts = Forecasts(((400.0,), (2000.0,), (200.0,)))
    state, prediction = policy.predicted(state, busy, forecasts)
    state, proposals = policy.propose(state, busy, prediction)
    said = {one.plugin_id: (one.priority, one.result) for one in proposals}
    load, throughput = said["builtin_load_propose"], said["builtin_throughput_propose"]
    assert (load[0], load[1].targets) == (10, (ComponentTarget("prefill", 2),))  # type: ignore[union-attr]
    bounds = (ComponentTarget("prefill", 2, OverrideType.AT_LEAST), ComponentTarget("decode", 3, OverrideType.AT_LEAST))
    assert (throughput[0], throughput[1].targets) == (20, bounds)  # type: ignore[union-attr]


def test_a_plugin_that_rejects_leaves_all_as_it_is() -> None:
    policy = ThroughputLoadPolicy(load_loop(), MODELS)
    state = policy.first(0.0)
    seen = observation(5.0, 1, 1, queues=[30_000])
    state, _ = policy.predicted(state, seen, None)
    state, _ = policy.propose(state, seen, None)
    _, decision = policy.settle(state, seen, ())
    assert (replicas(decision), rules(decision)[PREFILL]) == ((1, 1), "override_by_user_plugin")


def test_speculation_makes_decode_faster_up_to_what_can_be_accepted() -> None:
    needed = [replicas(sized(sla(speculative_nextn=nextn), 14_400, accept_length=3.0))[1] for nextn in (0, 1, 3)]
    assert needed == sorted(needed, key=lambda count: -(count or 0))
    assert needed[0] != needed[1]
    assert needed[0] == replicas(sized(sla(), 14_400))[1]


def test_decode_alone_and_prefill_alone_have_their_own_floors() -> None:
    decision = sized(sla(prefill_min_endpoint=2, decode_min_endpoint=3), 900)
    assert replicas(decision) == (2, 3)
    assert set(decision.targets) == {PREFILL, DECODE}


def test_it_looks_as_far_ahead_as_a_start_takes() -> None:
    starting_up = pool(PREFILL, 1, start_up_s=400.0)
    ahead = Forecasts(((900.0, 900.0, 7200.0, 900.0), (2000.0,) * 4, (200.0,) * 4))
    for adaptive, expected in ((True, (2, 3)), (False, (1, 1))):
        policy = ThroughputLoadPolicy(sla(adaptive_intervals=adaptive), MODELS)
        state, seen = policy.first(0.0), observation(180.0, starting_up, 1, seen=traffic(180.0, 900))
        task = policy.forecasting(state, seen)
        assert task is not None
        assert task.steps == (4 if adaptive else 1)
        state, prediction = policy.predicted(state, seen, ahead)
        state, _ = policy.propose(state, seen, prediction)
        assert (state.bounds["prefill"], state.bounds["decode"]) == expected


def test_prompts_in_the_graphs_own_queue_count_for_those_who_pull_from_it() -> None:
    waits = decide(load_loop(), 2, 1, waiting=20)
    assert (replicas(waits), numbers(waits, PREFILL)["estimated_ttft_ms_min"]) == (
        (3, 1),
        pytest.approx(823.7, abs=0.1),
    )
    assert replicas(decide(load_loop(), 2, 1, waiting=5)) == (2, 1)
    assert replicas(decide(load_loop(), 2, 1, waiting=0)) == (1, 1)
    table = throughput_load_options(max_gpu_budget=16)
    assert replicas(decide(table, 2, 1, waiting=20)) == (3, 1)


def test_a_queue_that_was_long_since_the_last_decision_counts_for_going_down() -> None:
    drives = driver(both_loops(throughput_adjustment_interval_seconds=11.0, load_adjustment_interval_seconds=5.0))
    for at_s, waiting in ((1.0, 5), (2.0, 0), (3.0, 0), (4.0, 0)):
        drives.tick_now(observation(at_s, 2, 1, waiting=waiting))
    assert replicas(drives.tick_now(observation(5.0, 2, 1, waiting=0))) == (2, 1)
    assert replicas(drives.tick_now(observation(10.0, 2, 1, waiting=0))) == (1, 1)


def test_a_queue_that_is_not_known_holds() -> None:
    for held in (
        decide(load_loop(), 2, 1, waiting=Missing("nats timeout")),
        decide(load_loop(), 2, 1, waiting=3, models={}),
    ):
        assert (replicas(held), rules(held)[PREFILL]) == ((2, 1), "insufficient_data")


# --- own benchmarks
# Models that begin with what a worker measured of itself: before a profile, and before what live passes taught.

SLOW = tuple(replace(one, wall_time_s=one.wall_time_s * 3) for one in PREFILL_PASSES)


def seen(policy: ThroughputLoadPolicy, state: ScalingState, at_s: float, benchmark: Any) -> ScalingState:
    shown = observation(at_s)
    can = {**shown.capabilities, PREFILL: replace(LIMITS, benchmark=benchmark)}
    return policy.predicted(state, replace(shown, capabilities=can), None)[0]


def took(state: ScalingState) -> float:
    return state.models[Kind.PREFILL].pass_s(prefill_tokens=PREFILL_PASSES[0].scheduled.sum_prefill_tokens)


@pytest.mark.parametrize("known", [untrained(), MODELS], ids=["nothing", "a profile"])
def test_it_goes_before_a_profile_and_is_named(known: Mapping[Kind, PassModel]) -> None:
    policy = ThroughputLoadPolicy(load_loop(), known)
    state = seen(policy, policy.first(0.0), 5.0, SLOW)
    assert took(state) == pytest.approx(SLOW[0].wall_time_s)
    assert policy.status(state).models[PREFILL] == "worker"
    assert state.models[Kind.DECODE] == known[Kind.DECODE]


def test_it_is_taken_once_and_again_after_another_configuration() -> None:
    policy = ThroughputLoadPolicy(load_loop(), untrained())
    state = seen(policy, policy.first(0.0), 5.0, PREFILL_PASSES)
    first = state.models[Kind.PREFILL]
    assert seen(policy, state, 10.0, PREFILL_PASSES).models[Kind.PREFILL] is first
    assert seen(policy, policy.taking_over(state), 10.0, PREFILL_PASSES).models[Kind.PREFILL] is first
    again = seen(policy, state, 10.0, SLOW)
    assert took(again) == pytest.approx(3 * took(state))


def test_one_that_makes_no_model_and_none_leave_the_next_source() -> None:
    policy = ThroughputLoadPolicy(load_loop(), MODELS)
    begun = policy.first(0.0)
    for nothing in (None, Missing("it has none"), PREFILL_PASSES[:2]):
        state = seen(policy, begun, 5.0, nothing)
        assert took(state) == took(begun)
    told = policy.status(seen(policy, begun, 5.0, Missing("it has none"))).models
    assert told[PREFILL].endswith("(it has none)")
    told = policy.status(seen(policy, begun, 5.0, PREFILL_PASSES[:2])).models
    assert told[PREFILL].endswith("(its own benchmark makes no model)")
    bare = ThroughputLoadPolicy(load_loop(), untrained())
    assert bare.status(seen(bare, bare.first(0.0), 5.0, None)).models == {PREFILL: "none yet", DECODE: "none yet"}


# --- reasons
# Why: Dynamo's enums, the numbers, what it would have taken to do otherwise, and the words.

AT_8 = load_loop(max_gpu_budget=8)


def of(decision: Decision, component: str = PREFILL) -> Reason:
    (found,) = (reason for reason in decision.reasons if reason.component == component)
    return found


def line(decision: Decision, component: str = PREFILL) -> str:
    (found,) = (one for one in explain(decision) if one.startswith(component))
    return found


def test_a_step_up_in_words() -> None:
    assert line(decide(load_loop(), 1, 1, queues=[30_000])) == (
        "PrefillWorker +1 (scale_up): TTFT on the best engine 720.3 > 500; "
        "at TTFT on the best engine 500 it would have held"
    )


def test_a_refused_step_down_in_words() -> None:
    said = line(decide(load_loop(), 2, 1, queues=[9_000, 9_000]))
    assert said.startswith(
        "PrefillWorker holds (scale_down_refused_consolidation): "
        "the wait behind the queue, with one engine less, 380 > 335.728"
    )
    assert said.endswith("it would have gone -1")


def test_a_forecast_in_words() -> None:
    """With the requests at which one worker less would have done."""
    said = line(sized(sla(), 7200))
    assert said == (
        "PrefillWorker +1 (scale): 40 requests/s are expected, a worker takes 23.53: 2 needed; "
        "the throughput loop's bound is 2; at predicted requests 4235 it would have held"
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("publish no forward-pass metrics", decide(load_loop(), 1, 1, queues=[None], kvs=[None])),
        ("metrics of 1 engines, where 2 are ready", decide(load_loop(), 2, 1, queues=[0, None])),
        ("workers start or leave (1 ready of 2)", decide(load_loop(), pool(PREFILL, 1, coming=1), 1, queues=[30_000])),
        ("0 samples of at least 5", decide(load_loop(), 1, 1, models={})),
        ("not known yet, or what requests look like", sized(sla(), 0, 1, 1)),
        ("wanted, 8 GPUs counted, max-gpu-budget 8", decide(AT_8, 4, 4, queues=[30_000] * 4, kvs=[100_000] * 4)),
    ],
)
def test_every_hold_is_said(said: str, found: Decision) -> None:
    assert said in line(found)


def test_a_budget_that_held_a_step_says_how_much_it_would_have_taken() -> None:
    held = decide(AT_8, 4, 4, queues=[30_000] * 4, kvs=[100_000] * 4)
    other = of(held).otherwise
    assert other is not None
    assert (other.name, other.value, other.needed, other.step) == ("max_gpu_budget", 8, 9, 1)


def test_both_loops_are_told_under_dynamos_names() -> None:
    drives = driver(both_loops())
    while drives.next_at_s < 180.0:
        between = drives.tick_now(observation(drives.next_at_s))
    assert between is not None
    assert of(between).decisions == {"load_scaling_decision": "no_change", "throughput_scaling_decision": "unset"}
    both = drives.tick_now(observation(180.0, 2, 3, seen=traffic(180.0, 7200)))
    assert both is not None
    assert of(both).decisions == {
        "load_scaling_decision": "scale_down_capped_by_throughput",
        "throughput_scaling_decision": "set_lower_bound",
    }
    assert of(both).otherwise is not None
    assert (of(both).otherwise.name, of(both).otherwise.needed) == ("throughput_lower_bound", 1)  # type: ignore[union-attr]
    alone = sized(sla(), 7200)
    assert of(alone).decisions == {"load_scaling_decision": "disabled", "throughput_scaling_decision": "scale"}


@pytest.mark.parametrize("num_req", [900, 4000, 7200, 20_000])
@pytest.mark.parametrize("ready", [1, 2, 4])
def test_the_requests_that_would_have_decided_otherwise_do(num_req: int, ready: int) -> None:
    """Fed back, the step is what was said; one request short of it, it still goes the way that it went."""
    decision = sized(sla(), num_req, ready, ready)
    for reason in decision.reasons:
        other = reason.otherwise
        if other is None or other.name != "predicted_num_req":
            continue
        short = other.needed + (1 if other.needed < num_req else -1)
        assert of(sized(sla(), other.needed, ready, ready), reason.component).step == other.step != reason.step
        still = of(sized(sla(), short, ready, ready), reason.component).step
        assert (still > 0, still < 0) == (reason.step > 0, reason.step < 0)


def test_a_target_that_cannot_be_kept_is_said() -> None:
    said = line(sized(sla(ttft_ms=20.0), 7200))
    assert "no batch keeps the target: sized for the fastest" in said

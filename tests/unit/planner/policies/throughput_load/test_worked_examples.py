"""The fifteen worked examples of Dynamo 1.6.1 and of its design, each in the mode to which it belongs.

Where ours decides otherwise because Dynamo's answer is a defect, the test says so (3, 14, 15).
"""

from __future__ import annotations

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.pass_model import Engine, Kind, limits_of, prefill_capacity
from dynamo_local.planner.values import Capabilities
from tests.fakes.planner.engines_seen import (
    LIMITS,
    MODELS,
    both_loops,
    decide,
    decode_engine,
    driver,
    load_loop,
    numbers,
    observation,
    replicas,
    rules,
    sized,
    sla,
    traffic,
)
from tests.fakes.planner.observations import DECODE, PREFILL, pool
from tests.fakes.planner.options import throughput_load_options


def test_1_requests_per_second_over_what_an_engine_takes() -> None:
    decision = sized(sla(), 7200)
    assert replicas(decision) == (2, 3)
    capacity = {r.component: r.numbers["engine_capacity_requests_per_second"] for r in decision.reasons}
    assert capacity == pytest.approx({PREFILL: 23.529, DECODE: 17.034}, abs=1e-3)
    assert rules(decision) == {PREFILL: "scale", DECODE: "scale"}


def test_2_a_hit_rate_discounts_prompts_and_not_the_cache() -> None:
    decision = sized(sla(), 7200, kv_hit_rate=0.5)
    assert replicas(decision) == (1, 3)
    assert numbers(decision, PREFILL)["engine_capacity_requests_per_second"] == pytest.approx(47.06, abs=0.01)


def test_3_an_unreachable_target_gives_no_more_capacity_than_a_reachable_one() -> None:
    """Dynamo: 20.0 per second at TTFT 60, and 23.53 at the unreachable 20. Ours: 20.0 at both."""
    engine = Engine(MODELS[Kind.PREFILL], limits_of(LIMITS))
    at_60 = prefill_capacity(engine, isl=2000, ttft_target_s=0.060)
    at_20 = prefill_capacity(engine, isl=2000, ttft_target_s=0.020)
    assert (at_60.rps, at_60.within) == (pytest.approx(20.0), True)
    assert (at_20.rps, at_20.within) == (pytest.approx(20.0), False)


def test_4_a_jump_of_eight_and_the_budget() -> None:
    decision = sized(sla(), 72_000)
    assert replicas(decision) == (8, 8)
    assert {r.component: r.numbers["predicted_replicas"] for r in decision.reasons} == {PREFILL: 17, DECODE: 24}


def test_5_down_to_the_floor_by_a_small_load_or_none() -> None:
    assert replicas(sized(sla(), 900, 6, 6)) == (1, 1)
    drives = driver(sla())
    drives.tick_now(observation(180.0, 3, 3, seen=traffic(180.0, 7200)))
    idle = drives.tick_now(observation(360.0, 3, 3, seen=traffic(360.0, 0)))
    assert replicas(idle) == (1, 1)


def test_5_before_any_request_nobody_knows_what_they_look_like() -> None:
    decision = sized(sla(), 0, 3, 3)
    assert replicas(decision) == (3, 3)
    assert set(rules(decision).values()) == {"model_not_ready"}


def test_6_all_engines_must_be_over_the_target() -> None:
    over = decide(load_loop(), 1, 1, queues=[30_000])
    assert (replicas(over), rules(over)[PREFILL]) == ((2, 1), "scale_up")
    assert numbers(over, PREFILL)["estimated_ttft_ms_min"] == pytest.approx(720.34)
    one_of_two = decide(load_loop(), 2, 1, queues=[30_000, 0])
    assert (replicas(one_of_two), rules(one_of_two)[PREFILL]) == ((2, 1), "no_change")


def test_7_two_short_queues_are_one_long_one() -> None:
    queues = [9_000, 9_000]
    refused = decide(load_loop(), 2, 1, queues=queues)
    assert (replicas(refused), rules(refused)[PREFILL]) == ((2, 1), "scale_down_refused_consolidation")
    assert numbers(refused, PREFILL)["waiting_ms_consolidated"] == pytest.approx(380.0)
    assert numbers(refused, PREFILL)["waiting_ms_consolidated_limit"] == pytest.approx(335.73, abs=0.01)
    flat = decide(load_loop(scale_down_rule="flat"), 2, 1, queues=queues)
    assert (replicas(flat), rules(flat)[PREFILL]) == ((1, 1), "scale_down")
    assert numbers(flat, PREFILL)["estimated_ttft_ms_max"] == pytest.approx(270.34)


def test_8_two_half_full_caches_are_one_slow_one() -> None:
    kvs = [80_000, 80_000]
    refused = decide(load_loop(), 1, 2, kvs=kvs)
    assert (replicas(refused), rules(refused)[DECODE]) == ((1, 2), "scale_down_refused_consolidation")
    assert numbers(refused, DECODE)["estimated_itl_ms_min"] == pytest.approx(13.6, abs=0.01)
    assert numbers(refused, DECODE)["estimated_itl_ms_consolidated"] == pytest.approx(22.0, abs=0.05)
    flat = decide(load_loop(scale_down_rule="flat"), 1, 2, kvs=kvs)
    assert (replicas(flat), rules(flat)[DECODE]) == ((1, 1), "scale_down")


@pytest.mark.parametrize(
    ("kv", "itl_ms", "expected", "rule"),
    [
        (30_000, 20.0, 1, "scale_down"),
        (160_000, 20.0, 3, "scale_up"),
        (110_000, 200.0, 2, "scale_down_refused_consolidation"),  # 220,000 tokens would not fit into the cache
    ],
)
def test_9_decode_by_itl_and_by_cache(kv: int, itl_ms: float, expected: int, rule: str) -> None:
    decision = decide(load_loop(itl_ms=itl_ms), 1, 2, kvs=[kv, kv])
    assert (replicas(decision), rules(decision)[DECODE]) == ((1, expected), rule)


def test_10_every_worker_must_be_seen_and_none_may_be_starting() -> None:
    missing = decide(load_loop(), 2, 1, queues=[30_000, None])
    assert (replicas(missing), rules(missing)) == (
        (2, 1),
        {PREFILL: "worker_count_mismatch", DECODE: "partner_not_ready"},
    )
    starting = decide(load_loop(), pool(PREFILL, 1, coming=1), 1, queues=[30_000])
    assert (replicas(starting), rules(starting)) == (
        (2, 1),
        {PREFILL: "scaling_in_progress", DECODE: "scaling_in_progress"},
    )


def test_11_a_start_is_taken_back_when_it_was_not_needed_twice() -> None:
    starting = pool(PREFILL, 1, coming=1)
    idle = driver(load_loop())
    first = idle.tick_now(observation(5.0, starting, 1))
    second = idle.tick_now(observation(10.0, starting, 1))
    assert (replicas(first), replicas(second)) == ((2, 1), (1, 1))
    assert rules(second)[PREFILL] == "scale_down"
    busy = driver(load_loop())
    for at_s in (5.0, 10.0, 15.0):
        decision = busy.tick_now(observation(at_s, starting, 1, queues=[30_000]))
        assert replicas(decision) == (2, 1)


@pytest.mark.parametrize(("kv", "expected"), [(100_000, (4, 4)), (5_000, (5, 3))])
def test_12_at_the_budget_there_are_only_whole_swaps(kv: int, expected: tuple[int, int]) -> None:
    options = load_loop(max_gpu_budget=8)
    decision = decide(options, 4, 4, queues=[30_000] * 4, kvs=[kv] * 4)
    assert replicas(decision) == expected
    if expected == (4, 4):
        assert rules(decision)[PREFILL] == "gpu_budget_guard_hold"


def test_13_the_last_gpu_goes_to_decode() -> None:
    decision = decide(load_loop(max_gpu_budget=8), 3, 4, queues=[30_000] * 3, kvs=[180_000] * 4)
    assert replicas(decision) == (3, 5)


@pytest.mark.parametrize("seen", [True, False], ids=["idle", "no metrics"])
def test_14_the_bound_is_reached_with_and_without_metrics(seen: bool) -> None:
    """Dynamo does nothing without them, and loses the predicted scale-up. Ours reaches 2P3D either way."""
    drives = driver(both_loops())
    known = None if seen else [None]
    while drives.next_at_s < 180.0:
        drives.tick_now(observation(drives.next_at_s, queues=known, kvs=known))
    decision = drives.tick_now(observation(180.0, queues=known, kvs=known, seen=traffic(180.0, 7200)))
    assert replicas(decision) == (2, 3)
    assert rules(decision) == {PREFILL: "set_lower_bound", DECODE: "set_lower_bound"}


def test_15_a_role_below_its_floor_gets_it_from_the_other() -> None:
    decision = decide(load_loop(prefill_min_endpoint=3, max_gpu_budget=8), 1, 6, kvs=[100_000] * 6)
    assert replicas(decision) == (3, 5)
    assert rules(decision) == {PREFILL: "gpu_budget_reconcile", DECODE: "gpu_budget_reconcile"}


def test_15_a_budget_below_one_worker_each_is_no_reason_to_have_none() -> None:
    """Dynamo: 0P0D. Ours: floors win."""
    assert replicas(decide(load_loop(max_gpu_budget=1), 1, 1)) == (1, 1)
    assert replicas(decide(load_loop(max_gpu_budget=1), 2, 2)) == (1, 1)


# --- static targets, by their table --------------------------------------------------------------


def static(target: str, **more: object) -> PlannerConfig:
    return throughput_load_options(optimization_target=target, max_gpu_budget=16, **more)


@pytest.mark.parametrize(
    ("target", "queues", "expected"),
    [
        ("throughput", [32_768, 0], 3),  # a whole context, of any
        ("throughput", [32_767, 0], 2),
        ("throughput", [3_276, 0], 1),  # below a tenth, of all
        ("throughput", [3_277, 0], 2),
        ("latency", [3_277, 0], 3),
        ("latency", [1, 0], 2),
        ("latency", [0, 0], 1),
    ],
)
def test_static_tables_of_prefill(target: str, queues: list[int], expected: int) -> None:
    assert replicas(decide(static(target), 2, 1, queues=queues))[0] == expected


@pytest.mark.parametrize(
    ("target", "kvs", "expected"),
    [
        ("throughput", [200_001, 0], 3),
        ("throughput", [200_000, 0], 2),
        ("throughput", [99_999, 0], 1),  # 2 to 1: below half a cache
        ("throughput", [100_000, 0], 2),
        ("latency", [80_001, 0], 3),
        ("latency", [19_999, 0], 1),
        ("latency", [20_000, 0], 2),
    ],
)
def test_static_tables_of_decode(target: str, kvs: list[int], expected: int) -> None:
    assert replicas(decide(static(target), 1, 2, kvs=kvs))[1] == expected


def test_thresholds_of_ones_own() -> None:
    options = static(
        "load",
        prefill_scale_up_queue_tokens=1000.0,
        prefill_scale_down_queue_tokens=100.0,
        decode_scale_up_kv_rate=50.0,
        decode_scale_down_kv_rate=10.0,
    )
    assert replicas(decide(options, 2, 2, queues=[1000, 0], kvs=[100_000, 0])) == (3, 3)
    assert replicas(decide(options, 2, 2, queues=[999, 0], kvs=[99_999, 0])) == (2, 2)
    assert replicas(decide(options, 2, 2, queues=[100, 0], kvs=[20_000, 0])) == (1, 1)


def test_a_static_target_without_the_limit_that_it_divides_by_holds() -> None:
    decision = decide(static("throughput"), 2, 2, limits=Capabilities())
    assert (replicas(decision), set(rules(decision).values())) == ((2, 2), {"insufficient_data"})


# --- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "queued", "expected"),
    [
        (30_000, 0, 1),  # on one engine 94 ms, with the prompts of both
        (600_000, 0, 3),  # ITL 108 ms
        (30_000, 40_000, 3),  # TTFT 0.9 s
        (0, 9_000, 1),
        (0, 11_000, 2),  # on one engine 464 ms of waiting, where 432 may be
    ],
)
def test_an_aggregated_graph_moves_by_prompts_and_by_answers(kv: int, queued: int, expected: int) -> None:
    engines = dict(decode_engine(f"2{n}", kv, 5.0, queued_prompt_tokens=queued) for n in range(2))
    options = load_loop(itl_ms=100.0, load_scaling_down_sensitivity=100)
    assert replicas(decide(options, None, 2, engines=engines)) == (None, expected)


def test_an_aggregated_engine_that_just_came_is_judged_with_its_part_of_the_prompts() -> None:
    """2000 prompt tokens in a pass, as the last 64 had, take 40 ms: too much for 30, though it has no request yet."""
    assert replicas(decide(load_loop(itl_ms=30.0), None, 2, kvs=[30_000, 0])) == (None, 3)


@pytest.mark.parametrize(("num_req", "expected"), [(900, 1), (2700, 2), (5400, 3)])
def test_an_aggregated_graph_is_sized_for_both(num_req: float, expected: int) -> None:
    """10.1 requests per second: 95 contexts fit, and each pass of 47 ms prefills for those that end in it."""
    decision = sized(sla(itl_ms=60.0), num_req, None, 1)
    assert replicas(decision) == (None, expected)
    assert numbers(decision, DECODE)["engine_capacity_requests_per_second"] == pytest.approx(10.1, abs=0.05)
    assert "sla_unreachable" not in numbers(decision, DECODE)


@pytest.mark.parametrize(("mode", "expected"), [("prefill", (2, None)), ("decode", (None, 3))])
def test_one_role_may_be_planned_alone(mode: str, expected: tuple[int | None, int | None]) -> None:
    assert replicas(sized(sla(mode=mode), 7200)) == expected

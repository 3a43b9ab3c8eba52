"""The decision log: its figures and scalars, also from decisions of earlier versions."""

from __future__ import annotations

import json
import math

import pytest

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.records import figures
from dynamo_local.planner.records import figures as scalars
from dynamo_local.planner.records.decision_log import (
    Aims,
    EngineLoads,
    aims_of,
    describe,
    engine_loads,
    from_line,
    parse,
)
from dynamo_local.planner.values import EngineSeen, Pool, Reading, Reason, Rule, Traffic, WorkerPools
from tests.fakes.planner.logged_lines import DECODE, POOLS, PREFILL, line
from tests.fakes.planner.options import load_options, sla_options, throughput_load_options

NEW = ("aims", "engines", "traffic", "prediction", "policy")
"""What lines of the first versions do not have."""


def old_line() -> dict[str, object]:
    """A hold of the load planner, as it was logged at first."""
    told = (Reason(PREFILL, 0, "floor", {}), Reason(DECODE, 0, "within", {}))
    found = line(told=told)
    found["inputs"] = {name: value for name, value in found["inputs"].items() if name not in NEW}
    for reason in found["decision"]["reasons"]:
        reason.pop("decisions"), reason.pop("why")
    return found


def test_a_window_gives_what_was_seen_what_is_expected_and_what_an_engine_takes() -> None:
    assert figures.window_figures(line()) == {
        "observed_requests_per_second": 4.0,
        "observed_input_sequence_tokens": 3000.0,
        "observed_output_sequence_tokens": 300.0,
        "observed_ttft_ms": 240.0,
        "observed_itl_ms": 9.0,
        "observed_request_duration_seconds": 3.0,
        "predicted_requests_per_second": 5.0,
        "predicted_input_sequence_tokens": 3100.0,
        "predicted_output_sequence_tokens": 310.0,
        "engine_prefill_capacity_requests_per_second": 2.5,
        "engine_decode_capacity_requests_per_second": 1.5,
    }


def test_replicas_targets_bounds_and_gpus() -> None:
    found = figures.fleet_figures(line(step=1))
    assert (found["num_decode_replicas"], found["capacity_decode_replicas"]) == (3, 4)
    assert (found["predicted_num_decode_replicas"], found["needed_decode_replicas"]) == (5, 3)
    assert (found["min_prefill_replicas"], found["bound_prefill_replicas"]) == (1, 2)
    assert (found["gpus_held"], found["max_gpu_budget"]) == (10, 12)
    assert (found["sla_target_ttft_ms"], found["sla_target_itl_ms"]) == (300, 10)
    assert "min_gpu_budget" not in found


def test_what_is_missing_is_absent_and_never_zero() -> None:
    found = figures.window_figures(line(traffic=Traffic(180.0, 180.0, num_req=0.0), prediction=None))
    assert found is not None
    assert found["observed_requests_per_second"] == 0.0  # silence is known
    assert not {name for name in found if name.endswith(("_ms", "_tokens", "_seconds")) or name.startswith("predicted")}
    blind = figures.window_figures(line(traffic=Missing("etcd is away"), prediction=None))
    assert blind is not None
    assert not any(name.startswith("observed") for name in blind)
    assert figures.window_figures(line(traffic=None, prediction=None)) is None  # it was not about traffic


def test_a_line_of_the_first_version_is_read() -> None:
    old = old_line()
    found = figures.all_figures(old)
    assert (found["num_prefill_replicas"], found["average_kv_load"]) == (2, 0.5)
    assert parse(old).inputs.aims == Aims()
    assert "holds (within)" in describe(old)


@pytest.mark.parametrize(
    ("policy", "rule", "step", "load", "throughput"),
    [
        ("load", "scale_up", 1, "scale_up", "disabled"),
        ("load", "take_back", 1, "scale_up", "disabled"),
        ("load", "budget", 0, "gpu_budget_guard_hold", "disabled"),
        ("load", "adjusting", 0, "scaling_in_progress", "disabled"),
        ("load", "within", 0, "no_change", "disabled"),
        ("sla", "scale", -2, "disabled", "scale"),
        ("sla", "min_endpoint", 0, "disabled", "no_change"),
        ("sla", "predict_failed", 0, "disabled", "predict_failed"),
    ],
)
def test_policies_without_dynamo_s_loops_say_their_rules_in_its_words(
    policy: str, rule: str, step: int, load: str, throughput: str
) -> None:
    told = (Reason(DECODE, step, rule, {}),)
    found = figures.scaling_decisions(line(policy=policy, told=told))
    assert found == {DECODE: {"load_scaling_decision": load, "throughput_scaling_decision": throughput}}


def test_the_calculator_s_capacity_is_told_in_requests() -> None:
    prefill = {"engine_tokens_per_s": 48_000.0, "next_isl": 3000.0, "p_correction": 0.5, "engines": 3.0}
    decode = {"engine_tokens_per_s": 4500.0, "next_osl": 300.0, "expected_ms": 9.0}
    told = (Reason(PREFILL, 0, "scale", prefill), Reason(DECODE, 0, "scale", decode))
    found = figures.all_figures(line(policy="sla", told=told))
    assert found["engine_prefill_capacity_requests_per_second"] == 32.0
    assert found["engine_decode_capacity_requests_per_second"] == 15.0
    assert (found["needed_prefill_replicas"], found["estimated_itl_ms"]) == (3.0, 9.0)


def test_a_number_that_is_none_is_absent() -> None:
    assert [figures.number(value) for value in (True, "3", None, math.nan, math.inf, {"reason": "x"})] == [None] * 6


def test_a_decision_is_told_with_what_was_seen_and_expected() -> None:
    assert describe(line(step=1)).splitlines() == [
        "seen: 4 requests/s, prompts of 3,000, answers of 300 tokens, TTFT 240 ms, ITL 9 ms; "
        "expected: 5 requests/s, prompts of 3,100, answers of 310 tokens; "
        "a worker takes: 2.5 requests/s (prefill), 1.5 requests/s (decode)",
        "PrefillWorker holds (no_change): so it is",
        "VllmWorker +1 (scale_up): so it is",
        "VllmWorker: carried out on dynamo_VllmWorker_3",
    ]
    assert describe(line(traffic=None, prediction=None, told=())) == ""


def test_engines_are_summed_by_component_and_silent_ones_left_out() -> None:
    def seen(worker: str, prompts: int, running: int) -> tuple[EngineId, EngineSeen]:
        scheduled, queued = Requests(sum_decode_kv_tokens=running), Requests(sum_prefill_tokens=prompts)
        last = ForwardPass(EngineId(worker), 1, 0.01, scheduled, queued)
        return last.engine, EngineSeen(DECODE, last=last)

    silent = EngineId("3"), EngineSeen(PREFILL)
    assert engine_loads(dict([seen("1", 100, 7), seen("2", 300, 5), silent])) == {
        DECODE: EngineLoads(2, 400, 300, 0, 0, 12, 7)
    }


def test_aims_are_those_of_the_policy() -> None:
    assert aims_of(load_options(max_gpu_budget=6), POOLS) == Aims(min_gpu_budget=1, max_gpu_budget=6)
    assert aims_of(sla_options(ttft_ms=300, itl_ms=20), POOLS) == Aims(300, 20, 1, 8, 180.0)
    assert aims_of(throughput_load_options(), POOLS) == Aims(max_gpu_budget=8)  # a static target has no latencies
    both = throughput_load_options(optimization_target="sla", ttft_ms=300, itl_ms=20)
    assert aims_of(both, POOLS) == Aims(300, 20, None, 8, 180.0)
    json.dumps(line()["inputs"]["aims"], allow_nan=False)


# --- old decisions
# Decision logs of before there were several policies can still be read.

POOL = {
    "component": "VllmWorker", "gpus_per_worker": 1, "ready": 1, "coming": 0, "waiting": 0, "deferred": 0, "leaving": 0,
    "cancellable": 0, "routed": 0, "gpus_held": 1, "gpus_leaving": 0, "gpus_lacking": 0, "added_at_s": 3.5,
}  # fmt: skip
OLD = {
    "wall_s": 1.7e9,
    "stimulus_id": "planner:7",
    "inputs": {
        "interval_began_s": 30.0, "readings": 30, "prefill_queue_size": None, "average_kv_load": 0.93,
        "num_queued_request": 0.5, "fleet": {"prefill": None, "decode": POOL, "pending": False},
    },
    "decision": {
        "now_s": 60.0,
        "targets": {"VllmWorker": 2},
        "reasons": [
            {
                "component": "VllmWorker", "step": 1, "rule": "scale_up",
                "numbers": {
                    "scale_down_threshold": 0.5, "scale_up_threshold": 0.9, "workers": 1, "workers_min": 1,
                    "gpus_per_worker": 1, "gpus_counted": 1, "max_gpu_budget": 8, "average_kv_load": 0.93,
                },
                "otherwise": {"name": "average_kv_load", "value": 0.93, "needed": 0.9, "step": 0},
                "deferred": False,
            }
        ],
        "next_tick_at": 90.0,
        "notes": [],
    },
    "outcomes": {"VllmWorker": {"outcome": "committed", "workers": ["dynamo_VllmWorker_1"]}},
}  # fmt: skip


def test_a_line_of_before_is_the_load_planners() -> None:
    record = from_line(json.dumps(OLD))
    assert (record.inputs.policy, record.inputs.traffic, record.decision.acts) == ("load", None, (("VllmWorker", 1),))


def test_it_is_explained_as_then() -> None:
    said = describe({"seq": 7, **OLD})
    assert said.startswith("VllmWorker +1 (scale_up): KV load 0.93 > 0.9 with 1 of 8 GPUs held or promised")
    assert said.endswith("VllmWorker: carried out on dynamo_VllmWorker_1")


# --- planner scalars
# Which scalars a reading and a decision give, and that what is missing gives none.

FLEET = WorkerPools(
    prefill=Pool("PrefillWorker", gpus_per_worker=1, ready=1, coming=1, gpus_held=2),
    decode=Pool("VllmWorker", gpus_per_worker=2, ready=2, leaving=1, gpus_held=6),
)
AGGREGATED = WorkerPools(prefill=None, decode=Pool("VllmWorker", gpus_per_worker=1, ready=3, gpus_held=3))


def _reading(queue: int | Missing | None, *loads: Load | Missing) -> Reading:
    return Reading(12.0, queue, {f"dynamo_VllmWorker_{n}": load for n, load in enumerate(loads)})


def test_a_reading_gives_queue_mean_load_waiting_workers_and_gpus() -> None:
    busy = Load(gpu_cache_usage_perc=0.8, num_requests_waiting=3)
    idle = Load(gpu_cache_usage_perc=0.2, num_requests_waiting=1)
    assert scalars.of_reading(_reading(4, busy, idle), FLEET) == {
        "prefill_queue_size": 4,
        "average_kv_load": 0.5,
        "num_queued_request": 4,
        "num_prefill_workers": 1,
        "num_decode_workers": 2,
        "num_gpu": 8,
    }


def test_what_is_missing_gives_no_point() -> None:
    points = scalars.of_reading(_reading(Missing("nats timeout"), Missing("stale"), Missing("stale")), FLEET)
    assert points.keys() == {"num_prefill_workers", "num_decode_workers", "num_gpu"}
    assert scalars.of_reading(_reading(0), FLEET)["prefill_queue_size"] == 0  # an empty queue is not a missing one


def test_the_mean_is_of_the_workers_that_answered_and_the_sum_needs_all() -> None:
    points = scalars.of_reading(_reading(0, Load(gpu_cache_usage_perc=0.6), Missing("stale")), FLEET)
    assert points["average_kv_load"] == 0.6
    assert "num_queued_request" not in points


def test_an_aggregated_graph_has_no_queue_and_no_prefill_workers() -> None:
    points = scalars.of_reading(_reading(None, Load()), AGGREGATED)
    assert "prefill_queue_size" not in points
    assert (points["num_prefill_workers"], points["num_decode_workers"], points["num_gpu"]) == (0, 3, 3)


def test_a_decision_gives_the_step_of_each_component() -> None:
    down, up = Reason("PrefillWorker", -1, Rule.SCALE_DOWN, {}), Reason("VllmWorker", 1, Rule.SCALE_UP, {})
    assert scalars.of_decision([down, up], FLEET) == {"prefill_scaling_action": -1, "decode_scaling_action": 1}
    hold = Reason("VllmWorker", 0, Rule.WITHIN, {})
    assert scalars.of_decision([hold], AGGREGATED) == {"decode_scaling_action": 0}


def test_a_load_that_is_no_number_is_no_sample() -> None:
    points = scalars.of_reading(_reading(0, Load(gpu_cache_usage_perc=Missing("not told")), Load()), FLEET)
    assert points["average_kv_load"] == 0.0
    assert "num_queued_request" not in points


def test_an_up_that_waited_for_a_gpu_is_one_step_not_two() -> None:
    planned = Reason("VllmWorker", 1, Rule.SCALE_UP, {}, deferred=True)
    assert scalars.of_decision([planned], FLEET) == {"decode_scaling_action": 1}
    assert scalars.of_decision([Reason("VllmWorker", 1, Rule.GPU_FREED, {})], FLEET) == {}

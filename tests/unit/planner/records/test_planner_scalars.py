"""Which scalars a reading and a decision give, and that what is missing gives none."""

from __future__ import annotations

from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.records import figures as scalars
from dynamo_local.planner.values import Pool, Reading, Reason, Rule, WorkerPools

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

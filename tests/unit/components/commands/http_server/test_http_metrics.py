"""vLLM's and SGLang's metrics as loads: what is not there is Missing, and idle is only what is known to be idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.components.commands import metrics as http_metrics
from dynamo_local.components.commands.metrics import (
    QUIET_S,
    OwnRequests,
    ServerNumbers,
    in_flight,
    load_of,
    read,
    served_of,
)
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.core.served import BOUNDS_S
from dynamo_local.core.types import Load, Missing

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 50.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 4.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 0.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="m"} 200.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 200.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 200.0
"""
SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.5
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="m"} 0.1
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 1000.0
"""
UNKNOWN = Missing("not asked")


def numbers(text: str) -> ServerNumbers:
    return read(Metrics(text))


def test_vllms_metrics_as_a_load() -> None:
    own = OwnRequests(streams=3, remaining_tokens=77)
    assert load_of(numbers(VLLM), own, UNKNOWN) == Load(
        request_active_slots=3,
        num_requests_waiting=2,
        gpu_cache_usage_perc=0.25,
        kv_total_blocks=400,
        kv_active_blocks=100,
        gpu_prefix_cache_hit_rate=0.25,
        remaining_tokens=77,
        itl_ms=None,
    )


def test_vllms_counts_are_those_of_what_it_served() -> None:
    assert served_of(Metrics(VLLM)) == {}, "without requests nothing is known"
    text = (
        VLLM
        + """vllm:request_success_total{engine="0",finished_reason="stop"} 7.0
vllm:request_success_total{engine="0",finished_reason="length"} 2.0
"""
    )
    found = served_of(Metrics(text))
    gaps = {BOUNDS_S[int(name.removeprefix("itl."))] for name in found if name.startswith("itl.")}
    assert (found["requests"], found["tokens"]) == (9.0, 900.0)
    assert 0.01 < min(gaps) < max(gaps) < 0.029


def test_sglangs_metrics_as_a_load() -> None:
    assert load_of(numbers(SGLANG), OwnRequests(), UNKNOWN) == Load(
        request_active_slots=4,
        num_requests_waiting=1,
        gpu_cache_usage_perc=0.5,
        kv_total_blocks=1000,
        kv_active_blocks=500,
        gpu_prefix_cache_hit_rate=0.1,
    )


def test_the_old_name_of_the_cache_use_is_read_too() -> None:
    """vLLM before 0.11."""
    assert numbers(VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")).kv_usage == 0.25


def test_engines_behind_one_server_are_counted_together_and_their_shares_averaged() -> None:
    second = VLLM.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    both = "\n".join(line for line in (VLLM + second).splitlines() if not line.startswith("#"))
    found = numbers(both)
    assert (found.running, found.waiting, found.kv_usage, found.kv_total_blocks) == (6, 4, 0.5, 800)


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting"])
def test_a_server_that_does_not_count_has_our_own_requests(name: str) -> None:
    found = load_of(numbers(VLLM.replace(name, "something_else")), OwnRequests(streams=7), UNKNOWN)
    assert (found.request_active_slots, found.num_requests_waiting, found.gpu_cache_usage_perc) == (7, 0, 0.25)


def test_a_kv_use_that_is_not_told_is_missing_and_says_what_is_not_there() -> None:
    found = load_of(numbers(VLLM.replace("kv_cache_usage_perc", "something_else")), OwnRequests(), UNKNOWN)
    assert isinstance(found.gpu_cache_usage_perc, Missing)
    assert "kv_cache_usage_perc" in found.gpu_cache_usage_perc.reason


def test_an_empty_exposition_is_not_idle() -> None:
    found = load_of(numbers(""), OwnRequests(streams=2), UNKNOWN)
    assert (found.request_active_slots, isinstance(found.gpu_cache_usage_perc, Missing)) == (2, True)
    assert in_flight(numbers(""), OwnRequests(streams=2), 0.0, hands_over=False) == 2


def test_the_latency_is_that_of_the_time_between_two_scrapes() -> None:
    before = numbers(VLLM)
    assert before.itl == http_metrics.Latency(4.0, 200.0)
    now = replace(before, itl=http_metrics.Latency(5.0, 250.0))
    load = load_of(now, OwnRequests(), before)
    assert isinstance(load, Load)
    assert load.itl_ms == pytest.approx(20.0)


def test_a_server_that_began_anew_has_no_latency_yet() -> None:
    later = replace(numbers(VLLM), itl=http_metrics.Latency(900.0, 9000.0))
    load = load_of(numbers(VLLM), OwnRequests(), later)
    assert isinstance(load, Load)
    assert load.itl_ms is None


def test_in_flight_is_what_the_server_says_or_what_we_have_there() -> None:
    told = numbers(VLLM)
    assert in_flight(told, OwnRequests(streams=1), 0.0, hands_over=False) == 5
    assert in_flight(told, OwnRequests(streams=9), 0.0, hands_over=False) == 9
    assert in_flight(Missing("no metrics URL"), OwnRequests(streams=1), 0.0, hands_over=False) == 1


def test_gauges_that_stand_still_are_the_last_word_of_an_idle_engine() -> None:
    """vLLM keeps `num_requests_running` at what it was when the last request was aborted: no drain waits for that."""
    told = numbers(VLLM)
    assert in_flight(told, OwnRequests(), QUIET_S - 0.1, hands_over=False) == 5
    assert in_flight(told, OwnRequests(), QUIET_S, hands_over=False) == 0
    assert in_flight(told, OwnRequests(streams=1), QUIET_S, hands_over=False) == 1


def test_a_prefill_server_is_busy_while_it_keeps_kv_to_be_pulled() -> None:
    told = replace(numbers(VLLM), running=0, waiting=0)
    assert in_flight(told, OwnRequests(), 0.0, hands_over=True) == 1
    assert in_flight(told, OwnRequests(), 0.0, hands_over=False) == 0
    assert in_flight(replace(told, kv_usage=0.0), OwnRequests(), 0.0, hands_over=True) == 0


def test_a_gauge_that_was_never_set_says_nothing() -> None:
    """Some clients expose NaN for it; as a number it would make all comparisons false."""
    metrics = Metrics("# TYPE use gauge\nuse NaN\n# TYPE other gauge\nother 1.5\n")
    assert (metrics.first("use"), metrics.sum("use"), metrics.first("use", "other")) == (None, None, 1.5)

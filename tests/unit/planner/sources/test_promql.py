"""Tests what Prometheus is asked, and what its answers mean."""

from __future__ import annotations

import math

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.prometheus import Series, queries, traffic_of
from dynamo_local.planner.values import Traffic

OURS = {"model": "Llama", "dynamo_namespace": "dynamo-blue"}


def one(value: float, **labels: str) -> tuple[Series, ...]:
    return (Series({**OURS, **labels}, value),)


FULL = {
    "started": one(30.0),
    "started_at": one(990.0),
    "ttft_s_sum": one(6.0),
    "ttft_s_count": one(24.0),
    "isl_sum": one(60_000.0),
    "isl_count": one(30.0),
    "hit_rate_sum": one(12.0),
    "hit_rate_count": one(24.0),
    "accepted": one(50.0),
    "drafts": one(100.0),
}


def told(answers: dict[str, tuple[Series, ...]], model: str | None = "llama") -> Traffic | Missing:
    return traffic_of(answers, model=model, namespace="dynamo-blue", window_s=60.0, server_s=1000.0, now_s=50.0)


def known(answers: dict[str, tuple[Series, ...]], model: str | None = "llama") -> Traffic:
    traffic = told(answers, model)
    assert isinstance(traffic, Traffic), traffic
    return traffic


def test_the_queries_are_dynamos() -> None:
    asked = queries("frontend", 180.0)
    assert asked["started"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_frontend_requests_started_total[180000ms]))"
    )
    assert asked["ttft_s_sum"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_frontend_time_to_first_token_seconds_sum[180000ms]))"
    )
    assert queries("router", 2.5)["ended"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_component_router_requests_total[2500ms]))"
    )


def test_a_window_with_everything() -> None:
    traffic = known(FULL)
    assert (traffic.at_s, traffic.duration_s, traffic.num_req) == (40.0, 60.0, 30.0)
    assert (traffic.ttft_ms, traffic.isl) == (250.0, 2000.0)
    assert (traffic.kv_hit_rate, traffic.accept_length) == (0.5, 1.5)
    assert isinstance(traffic.osl, Missing)


def test_what_nobody_counts_is_unknown_and_what_is_counted_as_0_is_silence() -> None:
    missing = told({})
    assert isinstance(missing, Missing)
    assert "no two scrapes" in missing.reason
    quiet = known({**FULL, "started": one(0.0), "ttft_s_sum": one(0.0), "ttft_s_count": one(0.0)})
    assert quiet.num_req == 0.0
    assert isinstance(quiet.ttft_ms, Missing)


def test_where_requests_are_counted_at_their_end_that_is_taken() -> None:
    answers = {"ended": one(9.0), "ended_at": one(1000.0)}
    assert known(answers).num_req == 9.0


def test_what_is_not_scraped_any_more_is_unknown() -> None:
    assert isinstance(told({**FULL, "started_at": ()}), Missing)


@pytest.mark.parametrize("stranger", [{"model": "other"}, {"dynamo_namespace": "elsewhere"}], ids=str)
def test_another_model_or_namespace_does_not_count(stranger: dict[str, str]) -> None:
    both = {**FULL, "started": (*one(30.0), *one(1000.0, **stranger))}
    assert known(both).num_req == 30.0
    assert isinstance(told({name: one(5.0, **stranger) for name in FULL}), Missing)


def test_names_differ_by_case_and_by_dashes_and_may_be_absent() -> None:
    series = (Series({"model": "LLAMA", "dynamo_namespace": "dynamo_blue"}, 1.0), Series({}, 2.0))
    assert known({**FULL, "started": series}).num_req == 3.0
    assert known({**FULL, "started": one(4.0, model="other")}, model=None).num_req == 4.0


def test_a_number_that_is_none_is_not_there() -> None:
    assert isinstance(told({**FULL, "started": one(math.nan)}), Missing)
    assert isinstance(known({**FULL, "ttft_s_sum": one(math.inf)}).ttft_ms, Missing)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"drafts": (), "sglang:spec_accept_length": one(3.5)}, 3.5),
        ({"drafts": one(0.0), "trtllm_spec_decode_acceptance_length": one(2.0)}, 2.0),
    ],
    ids=["sglang", "trtllm"],
)
def test_other_engines_tell_the_accept_length_itself(answers: dict[str, tuple[Series, ...]], expected: float) -> None:
    assert known({**FULL, **answers}).accept_length == expected

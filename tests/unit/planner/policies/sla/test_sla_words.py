"""Decisions of the SLA planner in words, and what it would have taken to decide otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.planner.policies.explain import explain, explain_reason
from dynamo_local.planner.values import ComponentTarget, Counterfactual
from tests.fakes.planner.observations import DECODE, PREFILL
from tests.fakes.planner.sla_worlds import decided, observation, policy, reason_of, traffic


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

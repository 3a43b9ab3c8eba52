"""The calculator of Dynamo's SLA planner."""

from __future__ import annotations

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.sla_sizing import Corrections, corrected, decode_need, prefill_need
from tests.fakes.planner.observations import DECODE, PREFILL
from tests.fakes.planner.sla_worlds import (
    H200,
    INTERVAL_S,
    decided,
    observation,
    policy,
    reason_of,
    targets_of,
    traffic,
)

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

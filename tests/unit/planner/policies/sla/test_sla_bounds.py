"""Floors, budget and the longest step; which of them decided."""

from __future__ import annotations

import pytest

from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.policies.sla_sizing import SlaRule
from tests.fakes.planner.observations import DECODE, PREFILL, pool
from tests.fakes.planner.sla_worlds import decided, observation, policy, reason_of, targets_of, traffic

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

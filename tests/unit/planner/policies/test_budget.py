"""Floors and the GPU budget, for wishes of any kind."""

from __future__ import annotations

import math

import pytest

from dynamo_local.planner.policies.budget import Claim, Fit, fitting, granted

BELOW, HOLD, WANTED = Fit.RECONCILED, Fit.GUARD_HOLD, Fit.AS_WANTED


def counts(*wishes: Claim, gpus_max: float = 8, gpus_min: int = 0) -> list[int]:
    return [one.replicas for one in granted(wishes, gpus_max=gpus_max, gpus_min=gpus_min)]


def fits(*wishes: Claim, gpus_max: float = 8, gpus_min: int = 0) -> list[Fit]:
    return [one.fit for one in granted(wishes, gpus_max=gpus_max, gpus_min=gpus_min)]


@pytest.mark.parametrize(
    ("wanted", "expected"), [((6, 6), [4, 4]), ((4, 5), [3, 5]), ((1, 2), [1, 2]), ((20, 1), [7, 1]), ((1, 20), [1, 7])]
)
def test_a_cut_in_proportion(wanted: tuple[int, int], expected: list[int]) -> None:
    assert fitting(wanted, (1, 1), (1, 1), 8) == expected


def test_what_a_cut_leaves_over_goes_to_prefill() -> None:
    assert fitting((5, 2), (1, 1), (1, 4), 8) == [4, 1]


def test_no_role_is_cut_for_the_other_unless_it_wants_less_itself() -> None:
    assert counts(Claim(6, 6, 1, 1), Claim(2, 3, 1, 1)) == [6, 2]
    assert fits(Claim(6, 6, 1, 1), Claim(2, 3, 1, 1)) == [WANTED, HOLD]
    assert counts(Claim(6, 5, 1, 1), Claim(2, 3, 1, 1)) == [5, 3]


def test_a_floor_is_reached_at_once_and_from_the_other_role_if_need_be() -> None:
    assert counts(Claim(0, 0, 1, 1), Claim(8, 8, 1, 1)) == [1, 7]
    assert fits(Claim(0, 0, 1, 1), Claim(8, 8, 1, 1)) == [BELOW, BELOW]
    assert counts(Claim(0, 0, 2, 1), Claim(1, 1, 1, 1)) == [2, 1]


def test_above_a_budget_that_was_lowered_both_give_way() -> None:
    assert counts(Claim(6, 6, 1, 1), Claim(6, 6, 1, 1)) == [4, 4]
    assert fits(Claim(6, 6, 1, 1), Claim(6, 6, 1, 1)) == [BELOW, BELOW]


def test_no_reduction_goes_below_the_least_budget() -> None:
    assert counts(Claim(2, 1, 1, 1), Claim(2, 1, 1, 1), gpus_min=3) == [2, 1]
    assert counts(Claim(2, 1, 1, 1), Claim(2, 2, 1, 1), gpus_min=4) == [2, 2]
    assert fits(Claim(2, 1, 1, 1), Claim(2, 2, 1, 1), gpus_min=4) == [HOLD, WANTED]
    assert counts(Claim(2, 1, 1, 1), Claim(2, 3, 1, 1), gpus_min=4) == [1, 3]


def test_below_the_least_budget_the_smaller_role_grows() -> None:
    assert counts(Claim(1, 1, 1, 1), Claim(1, 1, 1, 1), gpus_min=4) == [2, 2]
    assert fits(Claim(1, 1, 1, 1), Claim(1, 1, 1, 1), gpus_min=4) == [BELOW, BELOW]
    assert counts(Claim(1, 1, 1, 2), Claim(1, 1, 1, 2), gpus_min=8, gpus_max=7) == [2, 1]


def test_no_budget() -> None:
    assert counts(Claim(1, 100, 1, 4), gpus_max=math.inf) == [100]
    assert counts(Claim(1, 0, 0, 4), gpus_max=math.inf) == [0]


def test_workers_without_a_gpu_cost_nothing() -> None:
    assert counts(Claim(1, 50, 1, 0), Claim(1, 9, 1, 1)) == [50, 8]

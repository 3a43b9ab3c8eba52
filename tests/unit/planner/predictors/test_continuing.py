"""When a predictor is not asked, and what stands in where it fails: no forecast is lost, and none is nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from dynamo_local.planner.predictors import Constant, Continued, continued

Answers = Callable[[Sequence[float], int], Sequence[float]]


@dataclass(frozen=True)
class Told:
    """A predictor that does as it is told."""

    answers: Answers
    min_points: int = 2

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        return self.answers(series, steps)


def never(series: Sequence[float], steps: int) -> Sequence[float]:
    raise AssertionError(f"asked for {steps} after {series}")


def raises(error: Exception) -> Answers:
    def forecast(series: Sequence[float], steps: int) -> Sequence[float]:
        raise error

    return forecast


@pytest.mark.parametrize(
    ("series", "expected"),
    [([], 0.0), ([7.0], 7.0), ([5.0, 7.0], 7.0), ([4.0, 4.0, 4.0], 4.0), ([0.0, 0.0, 0.0], 0.0)],
    ids=["nothing", "one", "too few", "all equal", "all zero"],
)
def test_it_is_not_asked_where_there_is_nothing_to_fit(series: list[float], expected: float) -> None:
    assert continued(Told(never, min_points=3), series, 2) == Continued((expected, expected))


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (raises(ValueError("singular\nmatrix")), "ValueError: singular matrix"),
        (raises(ZeroDivisionError()), "ZeroDivisionError"),
        (raises(ModuleNotFoundError("No module named 'statsforecast'")), "No module named 'statsforecast'"),
        (lambda series, steps: [math.nan] * steps, "2 finite values were expected, not [nan, nan]"),
        (lambda series, steps: [math.inf] * steps, "2 finite values"),
        (lambda series, steps: [1.0], "2 finite values"),
    ],
)
def test_where_a_fit_fails_the_last_value_stands_in_and_the_reason_is_said(answers: Answers, why: str) -> None:
    """Dynamo says nothing, and drops the points that its model had not seen yet."""
    told = continued(Told(answers), [1.0, 9.0], 2)
    assert told.values == (9.0, 9.0)
    assert told.failed is not None
    assert why in told.failed


def test_after_a_failure_the_next_forecast_sees_every_point() -> None:
    seen: list[list[float]] = []

    def flaky(series: Sequence[float], steps: int) -> Sequence[float]:
        seen.append(list(series))
        if len(seen) == 1:
            raise ValueError
        return [sum(series)] * steps

    predictor = Told(flaky)
    assert continued(predictor, [1.0, 2.0], 1).failed is not None
    assert continued(predictor, [1.0, 2.0, 3.0], 1) == Continued((6.0,))


def test_a_negative_value_is_none_at_all() -> None:
    assert continued(Told(lambda series, steps: [-3.0, 2.0]), [1.0, 2.0], 2) == Continued((0.0, 2.0))


def test_with_log1p_the_predictor_sees_logarithms_and_its_values_are_taken_back() -> None:

    def straight(series: Sequence[float], steps: int) -> Sequence[float]:
        return [series[-1] + (series[-1] - series[-2]) * step for step in range(1, steps + 1)]

    told = continued(Told(straight), [0.0, 1.0, 3.0, 7.0], 2, log1p=True)
    assert told.values == pytest.approx((15.0, 31.0))


def test_a_logarithm_too_large_to_be_taken_back_is_a_failed_fit() -> None:
    told = continued(Told(lambda series, steps: [1e6]), [1.0, 2.0], 1, log1p=True)
    assert told.values == (2.0,)
    assert told.failed is not None


def test_constant_repeats_the_last_value() -> None:
    assert continued(Constant(), [3.0, 8.0], 3) == Continued((8.0, 8.0, 8.0))

"""The Kalman filter's values, as Dynamo's filter gives them for the same series (planning-facts, section 2)."""

from __future__ import annotations

import pytest

from dynamo_local.planner.predictors import Kalman, continued

RISING = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]


def next_value(series: list[float], kalman: Kalman | None = None) -> float:
    return continued(kalman or Kalman(), series, 1).values[0]


def test_a_series_that_rises_steadily_is_followed_from_the_fifth_value_on() -> None:
    assert [next_value(RISING[:points]) for points in range(1, 8)] == pytest.approx(
        [10, 20, 30, 40, 59.95, 69.97, 79.98], abs=0.005
    )


def test_a_sudden_silence_is_followed_at_once() -> None:
    assert next_value([10.0] * 5 + [0.0]) == pytest.approx(1.7, abs=0.05)


def test_several_windows_ahead_the_trend_goes_on_and_never_below_zero() -> None:
    one, two, three = continued(Kalman(), RISING, 3).values
    assert two - one == pytest.approx(three - two) == pytest.approx(10, abs=0.05)
    assert continued(Kalman(), RISING[::-1], 9).values[-1] == 0.0


def test_it_waits_for_as_many_points_as_it_is_told() -> None:
    assert next_value(RISING[:3], Kalman(min_points=3)) == pytest.approx(40, abs=1)
    assert next_value(RISING[:6], Kalman(min_points=7)) == 60.0


def test_a_noisy_measurement_is_believed_less() -> None:
    jump = [10.0, 10.0, 10.0, 10.0, 10.0, 30.0]
    assert next_value(jump, Kalman(r=1000.0)) < next_value(jump) < next_value(jump, Kalman(r=0.1))

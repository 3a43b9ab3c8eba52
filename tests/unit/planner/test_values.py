"""Tests what a planner remembers of the traffic: idle windows are known, unknown ones are not idle."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.values import ROUNDINGS, Forecasts, Prediction, Series, Traffic, Window, boundary

EMPTY = Series(window_s=180.0)
GONE = Missing("Prometheus does not answer")


def traffic(num_req: float | Missing, isl: float | Missing = GONE, osl: float | Missing = GONE, **more: Any) -> Traffic:
    return Traffic(at_s=0.0, duration_s=more.pop("duration_s", 180.0), num_req=num_req, isl=isl, osl=osl, **more)


def after(*windows: Traffic | Missing | None, start: Series = EMPTY) -> Series:
    for window in windows:
        start = start.after(window)
    return start


def test_windows_are_kept_in_their_order() -> None:
    series = after(traffic(5, 300, 20), traffic(7, 310, 25))
    assert series.windows == (Window(5, 300, 20), Window(7, 310, 25))
    assert series.columns == ((5, 7), (300, 310), (20, 25))


def test_leading_zeros_are_skipped_and_later_ones_kept() -> None:
    series = after(traffic(0), traffic(0), traffic(5, 300, 20), traffic(0), traffic(0))
    assert series.columns[0] == (5, 0, 0)


def test_an_idle_window_has_no_requests_and_the_lengths_of_the_one_before() -> None:
    """Dynamo's frontend turns a mean of nothing into 0; a 0 here would forecast prompts of no length."""
    series = after(traffic(5, 300, 20), traffic(0), traffic(0, 0, 0))
    assert series.columns == ((5, 0, 0), (300, 300, 300), (20, 20, 20))


@pytest.mark.parametrize("unknown", [None, GONE, traffic(GONE, 300, 20), traffic(math.nan, 300, 20), traffic(-1, 3, 2)])
def test_a_window_in_which_nobody_counted_adds_nothing(unknown: Traffic | Missing | None) -> None:
    """It is not idle: an outage of Prometheus would scale everything down."""
    series = after(traffic(5, 300, 20), unknown)
    assert series.windows == (Window(5, 300, 20),)


@pytest.mark.parametrize("isl", [GONE, math.nan, 0.0])
def test_a_length_that_is_not_known_is_carried(isl: float | Missing) -> None:
    """No prompt is empty: Dynamo's Prometheus source says 0 where it has no value."""
    assert after(traffic(5, 300, 20), traffic(6, isl, 30)).windows[-1] == Window(6, 300, 30)


def test_lengths_that_were_never_known_are_no_series_of_zeros() -> None:
    series = after(traffic(5), traffic(6), traffic(7, 300, GONE))
    assert series.columns == ((5, 6, 7), (300,), ())


def test_after_a_warm_up_leading_zeros_are_skipped_anew() -> None:
    warm = EMPTY.warmed_up([Window(4, 100, 10), Window(0, 100, 10), Window(6, 120, 12)])
    series = after(traffic(0), traffic(0), traffic(9, 200, 20), traffic(0), start=warm)
    assert series.columns == ((4, 0, 6, 9, 0), (100, 100, 120, 200, 200), (10, 10, 12, 20, 20))


def test_the_oldest_windows_are_forgotten() -> None:
    series = after(*(traffic(count, 300, 20) for count in range(1, 8)), start=Series(window_s=180.0, windows_max=3))
    assert series.columns[0] == (5, 6, 7)
    assert Series(180.0, windows_max=2).warmed_up([Window(n, 1, 1) for n in range(5)]).columns[0] == (3, 4)


def test_a_count_over_another_time_is_scaled_to_the_window() -> None:
    assert after(traffic(10, 300, 20, duration_s=200.0)).windows == (Window(9, 300, 20),)
    assert after(traffic(10, 300, 20, duration_s=0.0)).windows == ()


def test_hit_rate_and_accept_length_are_the_last_ones_known() -> None:
    assert (EMPTY.kv_hit_rate, EMPTY.accept_length) == (None, None)
    seen = after(traffic(5, 3, 2, kv_hit_rate=0.4, accept_length=1.8), traffic(5, 3, 2))
    assert (seen.kv_hit_rate, seen.accept_length) == (0.4, 1.8)
    nonsense = after(traffic(5, 3, 2, kv_hit_rate=1.5, accept_length=0.2), start=seen)
    assert (nonsense.kv_hit_rate, nonsense.accept_length) == (0.4, 1.8)
    unknown_count = after(traffic(GONE, kv_hit_rate=0.6), start=seen)
    assert unknown_count.kv_hit_rate == 0.6


def test_a_prediction_is_made_of_all_three_forecasts() -> None:
    series = after(traffic(5, 300, 20, kv_hit_rate=0.4))
    forecasts = Forecasts(((6.0, 7.0), (310.0, 320.0), (21.0, 22.0)))
    assert series.prediction(forecasts) == Prediction(6.0, 310.0, 21.0, 0.4, None, "builtin_load_predict")
    assert series.prediction(forecasts, step=2) == Prediction(7.0, 320.0, 22.0, 0.4, None, "builtin_load_predict")


def test_half_a_prediction_is_none() -> None:
    assert EMPTY.prediction(GONE) == GONE
    assert EMPTY.prediction(Forecasts(((6.0,), GONE, (21.0,)))) == Missing(f"isl: {GONE.reason}")


@pytest.mark.parametrize("off", [-3, 0, 3])
def test_the_boundary_of_a_rounded_formula_is_found_among_its_neighbours(off: int) -> None:
    exact = near = 0.1
    for _ in range(abs(off)):
        near = math.nextafter(near, math.copysign(math.inf, off))
    assert boundary(near, lambda value: value <= exact) == (exact, math.nextafter(exact, math.inf))


def test_a_boundary_that_is_far_away_is_not_searched_for_long() -> None:
    asked: list[float] = []
    boundary(1.0, lambda value: bool(asked.append(value)))
    assert len(asked) <= 2 * ROUNDINGS + 2

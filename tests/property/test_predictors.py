"""Tests what holds of every forecast, whatever the series."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.types import Missing
from dynamo_local.planner.predictors import answer
from dynamo_local.planner.values import ForecastTask, Series, Traffic

NUMBERS = st.floats(min_value=0.0, max_value=1e308, allow_nan=False)
SERIES = st.lists(st.one_of(st.just(0.0), st.floats(0.0, 1e6), NUMBERS), max_size=40).map(tuple)
ANYTHING = st.one_of(st.floats(), st.just(Missing("not had")))


@given(
    st.sampled_from(["constant", "kalman"]),
    st.tuples(SERIES, SERIES, SERIES),
    st.integers(1, 20),
    st.booleans(),
)
def test_forecasts_are_finite_never_negative_and_the_same_each_time(
    predictor: str, series: tuple[tuple[float, ...], ...], steps: int, log1p: bool
) -> None:
    task = ForecastTask(predictor, series, steps, options=(("log1p", log1p),))
    told = answer(task)
    assert len(told.values) == len(series)
    for values in told.values:
        assert not isinstance(values, Missing)
        assert len(values) == steps
        assert all(math.isfinite(value) and value >= 0 for value in values)
    assert answer(task) == told


@given(st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING, ANYTHING, st.floats(0.0, 1000.0)), max_size=30))
def test_whatever_was_measured_the_series_can_be_forecast(
    seen: list[tuple[float | Missing, float | Missing, float | Missing, float | Missing, float]],
) -> None:
    series = Series(window_s=10.0, windows_max=20)
    for num_req, isl, osl, hits, duration_s in seen:
        series = series.after(Traffic(0.0, duration_s, num_req, isl, osl, kv_hit_rate=hits))
    assert all(len(column) <= 20 for column in series.columns)
    told = answer(ForecastTask("kalman", series.columns))
    assert not any(isinstance(values, Missing) for values in told.values)

"""Which predictor is asked for, with which numbers: wrong ones are refused before anything runs."""

from __future__ import annotations

import math

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from dynamo_local.planner import predictors as module
from dynamo_local.planner.predictors import (
    Kalman,
    Prophet,
    answer,
    check_installed,
    forecast_task,
    is_light,
    predictor_of,
    windows_max,
)
from dynamo_local.planner.values import Forecasts, ForecastTask, Series, Window
from tests.fakes.planner.options import sla_options

RISING = (10.0, 20.0, 30.0, 40.0, 50.0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there: set[str] = set()
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in there else None)
    return there


@pytest.mark.parametrize(("name", "library"), [("arima", "statsforecast"), ("prophet", "prophet")])
def test_without_the_extra_the_refusal_says_how_to_install_it(name: str, library: str, installed: set[str]) -> None:
    with pytest.raises(ConfigError, match=rf"load-predictor {name} needs {library}, .*\.\[predictors\]"):
        check_installed(sla_options(load_predictor=name))
    installed.add(library)
    check_installed(sla_options(load_predictor=name))


@pytest.mark.parametrize("name", ["constant", "kalman"])
def test_our_own_need_no_library(name: str, installed: set[str]) -> None:
    check_installed(sla_options(load_predictor=name))
    assert is_light(name)


def test_a_task_asks_for_the_predictor_that_was_chosen(installed: set[str]) -> None:
    installed.update(("statsforecast", "prophet"))
    series = Series(window_s=60.0).warmed_up([Window(3.0, 100.0, 20.0)])
    numbers = {"kalman_q_level": 2.0, "kalman_q_trend": 0.5, "kalman_r": 7.0, "kalman_min_points": 3}
    kalman = forecast_task(sla_options(load_predictor="kalman", load_predictor_log1p=True, **numbers), series, 2)
    assert kalman.series == ((3.0,), (100.0,), (20.0,))
    assert kalman.steps == 2
    assert predictor_of(kalman) == (Kalman(2.0, 0.5, 7.0, 3), True)
    prophet = forecast_task(sla_options(load_predictor="prophet", prophet_window_size=90), series)
    assert predictor_of(prophet) == (Prophet(60.0, 90), False)


def test_prophet_alone_may_look_back_further_than_the_usual_history(installed: set[str]) -> None:
    """Thousands of windows in `kalman` would hold the arbiter up."""
    installed.add("prophet")
    assert windows_max(sla_options(load_predictor="prophet", prophet_window_size=960)) == 960
    assert windows_max(sla_options(load_predictor="kalman", prophet_window_size=960)) == windows_max(
        sla_options(load_predictor="prophet")
    )


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (ForecastTask("arma", (RISING,)), "there is no predictor 'arma'"),
        (ForecastTask("kalman", (RISING,), options=(("speed", 1.0),)), "kalman has no option 'speed'"),
        (ForecastTask("kalman", (RISING,), steps=0), "0 windows ahead"),
        (ForecastTask("kalman", ((1.0, math.nan),)), "value 2 of 2 is nan"),
        (ForecastTask("kalman", ((-1.0, 2.0),)), "value 1 of 2 is -1"),
    ],
)
def test_a_task_that_cannot_be_done_is_missing_with_the_reason(task: ForecastTask, words: str) -> None:
    (value,) = answer(task).values
    assert isinstance(value, Missing)
    assert words in value.reason


def test_one_bad_series_leaves_the_others() -> None:
    bad, good = answer(ForecastTask("constant", ((math.inf,), RISING), steps=2)).values
    assert isinstance(bad, Missing)
    assert good == (50.0, 50.0)


def test_a_failed_fit_is_told_in_the_notes() -> None:
    told = answer(ForecastTask("kalman", (RISING, (1e308, 0.0, 1e308, 0.0, 1e308))))
    assert told.values[1] == (1e308,)
    assert len(told.notes) == 1
    assert "kalman failed for series 2, the last value stands in" in told.notes[0]


def test_the_answer_is_one_series_for_each() -> None:
    assert answer(ForecastTask("constant", ((), (2.0,)), steps=2)) == Forecasts(((0.0, 0.0), (2.0, 2.0)))

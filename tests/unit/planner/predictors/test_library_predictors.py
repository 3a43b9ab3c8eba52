"""`arima` and `prophet` on their real libraries, where the extra `predictors` is installed."""

from __future__ import annotations

import math
import statistics
import sys

import pytest

from dynamo_local.planner.predictors import Arima, Constant, Kalman, Predictor, Prophet, continued

SINE = [100 + 80 * math.sin(2 * math.pi * number / 20) for number in range(60)]
LIBRARY = {"arima": "statsforecast", "prophet": "prophet"}


@pytest.fixture(params=["arima", "prophet"])
def predictor(request: pytest.FixtureRequest) -> Predictor:
    """Each of the two."""
    pytest.importorskip(LIBRARY[request.param], reason="the extra predictors is not installed")
    return Arima() if request.param == "arima" else Prophet(window_s=180.0)


def error(predictor: Predictor, known: range) -> float:
    """The mean absolute error one window ahead on the sine, of which so many windows each were known."""
    return statistics.fmean(abs(continued(predictor, SINE[:count], 1).values[0] - SINE[count]) for count in known)


def test_a_straight_line_goes_on(predictor: Predictor) -> None:
    told = continued(predictor, [100.0 + 10 * number for number in range(30)], 3)
    assert told.failed is None
    assert told.values == pytest.approx((400, 410, 420), rel=0.03)


def test_the_same_series_gives_the_same_values(predictor: Predictor) -> None:
    bumpy = [50.0 + (number * 37 % 23) for number in range(40)]
    assert continued(predictor, bumpy, 4) == continued(predictor, bumpy, 4)


@pytest.mark.full
def test_a_falling_load_is_never_expected_below_zero(predictor: Predictor) -> None:
    told = continued(predictor, [100.0 - 10 * number for number in range(10)], 8)
    assert told.failed is None
    assert min(told.values) == 0.0


@pytest.mark.full
def test_five_points_are_enough(predictor: Predictor) -> None:
    told = continued(predictor, [10.0, 12.0, 11.0, 13.0, 12.0], 1)
    assert told.failed is None
    assert 5 < told.values[0] < 20


@pytest.mark.full
def test_arima_follows_a_sine_better_than_the_last_value_does_and_the_filter_worse() -> None:
    """Dynamo's figures for 100 ± 80 with a period of 20: 8.2, 15.8 and 37.5."""
    pytest.importorskip("statsforecast", reason="the extra predictors is not installed")
    some, all_of_a_period = range(40, 60, 4), range(40, 60)
    assert error(Arima(), some) < 0.6 * error(Constant(), some)
    assert error(Constant(), all_of_a_period) == pytest.approx(15.8, abs=0.3)
    assert error(Kalman(), all_of_a_period) > 1.5 * error(Constant(), all_of_a_period)


@pytest.mark.parametrize("name", ["arima", "prophet"])
def test_a_library_that_is_gone_is_a_failed_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("statsforecast.models", "prophet"):
        monkeypatch.setitem(sys.modules, module, None)
    told = continued(Arima() if name == "arima" else Prophet(180.0), [1.0, 2.0, 1.0, 3.0, 2.0], 1)
    assert told.values == (2.0,)
    assert told.failed is not None
    assert "import" in told.failed.lower()


def test_prophet_looks_at_its_last_windows_only() -> None:
    pytest.importorskip("prophet", reason="the extra predictors is not installed")
    long_ago, lately = [900.0, 20.0, 400.0] * 10, [10.0 + number for number in range(20)]
    short = Prophet(window_s=60.0, window_size=20)
    assert continued(short, long_ago + lately, 2) == continued(short, lately, 2)

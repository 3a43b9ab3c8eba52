"""Which predictor, with which numbers: checked once, and handed on as the plain options of a `ForecastTask`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Protocol

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError, how_to_install
from dynamo_local.planner.values import WINDOWS_MAX, Forecasts, ForecastTask, Series

# --- protocol
# The interface of predictors.


class Predictor(Protocol):
    """Continues a series. Pure: the same series gives the same values, whatever was asked before."""

    @property
    def min_points(self) -> int:
        """With fewer points it is not asked."""
        ...

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        """The next `steps` values, 1 or more of them.

        The series has `min_points` values or more, oldest first, all finite, 0 or more, and not all equal. Whatever
        this raises or returns, `continuing.continued` makes values of it that can be used.
        """
        ...


# --- constant
# The next windows are as the last one.


@dataclass(frozen=True, slots=True)
class Constant:
    """See the module."""

    min_points: int = 1

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        return [series[-1]] * steps


# --- kalman
# A Kalman filter for a level and its trend, with Dynamo's model and defaults.
#
# The state is (level, trend); from one window to the next the trend is added to the level. Only the level is
# measured.
# The first value is the level to begin with; each later one corrects what was predicted for it.

VARIANCE_AT_FIRST = 1000.0
"""Variance of level and trend before the first value."""


@dataclass(frozen=True, slots=True)
class Kalman:
    """`q_level` and `q_trend` are the variances by which level and trend change in a window. `r` is the variance of a
    measurement. The unit is the square of the series' unit (with `log1p`, of its logarithm)."""

    q_level: float = 1.0
    q_trend: float = 0.1
    r: float = 10.0
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        level, trend = series[0], 0.0
        # The covariance is [[a, b], [b, d]].
        a, b, d = VARIANCE_AT_FIRST, 0.0, VARIANCE_AT_FIRST
        for value in series[1:]:
            level, a, b, d = level + trend, a + 2 * b + d + self.q_level, b + d, d + self.q_trend
            gain_level, gain_trend = a / (a + self.r), b / (a + self.r)
            off = value - level
            level, trend = level + gain_level * off, trend + gain_trend * off
            a, b, d = a * (1 - gain_level), b * (1 - gain_level), d - gain_trend * b
        return [level + trend * step for step in range(1, steps + 1)]


# --- arima
# ARIMA without seasons, its order chosen anew for each forecast (Hyndman and Khandakar's search, by statsforecast).
#
# Dynamo keeps the order of its first fit and hands later points to that model one by one; a point whose update fails
# is
# lost to it. Here every forecast sees the whole series.


@dataclass(frozen=True, slots=True)
class Arima:
    """`logs`: try the logarithms of 1 + x as well, if the order found has neither an AR nor a MA term. Such a series is
    a random walk at best. This is Dynamo's rule; a series of logarithms does not need it."""

    logs: bool = True
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        values, has_terms = _fitted(series, steps)
        if has_terms or not self.logs:
            return values
        values, _ = _fitted([math.log1p(value) for value in series], steps)
        return [math.expm1(value) for value in values]


def _fitted(series: Sequence[float], steps: int) -> tuple[list[float], bool]:
    """The values, and whether the order found has an AR or an MA term."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that did not converge: the next candidate is tried
        import numpy as np
        from statsforecast.models import AutoARIMA

        model = AutoARIMA(season_length=1).fit(np.asarray(series, dtype=float))
        p, q, *_ = model.model_["arma"]
        return [float(value) for value in model.predict(h=steps)["mean"]], bool(p or q)


# --- prophet
# Prophet: a trend with bends, and the seasons that its library switches on once it sees two of their periods.
#
# Fitted anew for each forecast, to the last `window_size` windows. They are dated from 2024-01-01 on, one after the
# other: a series knows no time of day. With 50 windows of 180 s, which are Dynamo's defaults, all seasons stay off; a
# day
# is seen from 960 such windows on.

BEGINS = "2024-01-01"


@dataclass(frozen=True, slots=True)
class Prophet:
    """`window_s` is the time from one value to the next."""

    window_s: float
    window_size: int = 50
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        known = list(series[-self.window_size :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pandas
            import prophet

            apart = pandas.Timedelta(seconds=self.window_s)
            times = pandas.date_range(BEGINS, periods=len(known) + steps, freq=apart)
            model = prophet.Prophet(uncertainty_samples=0)  # the mean alone: nothing is drawn by chance
            model.fit(pandas.DataFrame({"ds": times[: len(known)], "y": known}))
            reported = model.predict(pandas.DataFrame({"ds": times[len(known) :]}))
        return [float(value) for value in reported["yhat"]]


EXTRA = "predictors"
LIBRARIES: Mapping[str, str] = MappingProxyType({"arima": "statsforecast", "prophet": "prophet"})
"""The library that a predictor imports, of the extra `predictors`. The others are our own, and take microseconds."""
NAMES = ("constant", "kalman", "arima", "prophet")


def check_installed(options: PlannerConfig) -> None:
    """Raise `ConfigError` if the chosen predictor needs a library that is not installed."""
    library = LIBRARIES.get(options.load_predictor)
    if library is not None and find_spec(library) is None:
        raise ConfigError(
            f"load-predictor {options.load_predictor} needs {library}, of the extra {EXTRA!r}: "
            f"{how_to_install(EXTRA)}, or choose constant or kalman"
        )


def windows_max(options: PlannerConfig) -> int:
    """The windows that a series must remember for the chosen predictor."""
    return max(WINDOWS_MAX, options.prophet_window_size) if options.load_predictor == "prophet" else WINDOWS_MAX


def forecast_task(options: PlannerConfig, series: Series, steps: int = 1) -> ForecastTask:
    """The task of the chosen predictor: continue the columns of the series by `steps` windows."""
    own: Mapping[str, dict[str, float | str | bool]] = {
        "kalman": {
            "q_level": options.kalman_q_level,
            "q_trend": options.kalman_q_trend,
            "r": options.kalman_r,
            "min_points": options.kalman_min_points,
        },
        "prophet": {"window_size": options.prophet_window_size},
    }
    numbers = {"log1p": options.load_predictor_log1p, **own.get(options.load_predictor, {})}
    return ForecastTask(options.load_predictor, series.columns, steps, series.window_s, tuple(numbers.items()))


def is_light(name: str) -> bool:
    """Whether it is a predictor of our own: it needs no library and no process, 600 windows take a millisecond at most.
    The queueing model is no predictor."""
    return name in NAMES and name not in LIBRARIES


def predictor_of(task: ForecastTask) -> tuple[Predictor, bool]:
    """The predictor that a task asks for, and whether it is to see logarithms. Raises `ConfigError`."""
    left = dict(task.options)

    def take(name: str, usual: float) -> float:
        return float(left.pop(name, usual))

    predictor: Predictor
    log1p = bool(take("log1p", False))
    match task.predictor:
        case "constant":
            predictor = Constant()
        case "kalman":
            usual = Kalman()
            predictor = Kalman(
                q_level=take("q_level", usual.q_level),
                q_trend=take("q_trend", usual.q_trend),
                r=take("r", usual.r),
                min_points=int(take("min_points", usual.min_points)),
            )
        case "arima":
            predictor = Arima(logs=not log1p)
        case "prophet":
            predictor = Prophet(task.window_s, int(take("window_size", Prophet(task.window_s).window_size)))
        case unknown:
            raise ConfigError(f"there is no predictor {unknown!r}; there are: {', '.join(NAMES)}")
    if left:
        raise ConfigError(f"the predictor {task.predictor} has no option {min(left)!r}")
    return predictor, log1p


# --- continuing
# Around a predictor: when it is not called, its substitute if it fails, and the range of its values.

_REASON_MAX = 200


@dataclass(frozen=True, slots=True)
class Continued:
    """Finite values, 0 or more. `failed`: the predictor did, for this reason, and the last value stands in."""

    values: tuple[float, ...]
    failed: str | None = None


def continued(predictor: Predictor, series: Sequence[float], steps: int, *, log1p: bool = False) -> Continued:
    """The next `steps` values of a series of finite values, 0 or more each, oldest first.

    With fewer points than the predictor needs: the last value, and 0 where there is none. Where all are equal: that
    value. `log1p` continues log(1 + x) in place of x, so that a day that grows by shares is followed as well as one
    that grows by numbers.
    """
    last = series[-1] if series else 0.0
    if len(series) < predictor.min_points or all(value == last for value in series):
        return Continued((last,) * steps)
    try:
        values = _forecast(predictor, series, steps, log1p)
    except Exception as error:  # any library's: a planner must not stop for want of a forecast
        return Continued((last,) * steps, _reported(error))
    if len(values) != steps or not all(map(math.isfinite, values)):
        return Continued((last,) * steps, f"{steps} finite values were expected, not {_shown(str(values))}")
    return Continued(tuple(max(0.0, value) for value in values))


def _forecast(predictor: Predictor, series: Sequence[float], steps: int, log1p: bool) -> list[float]:
    if not log1p:
        return [float(value) for value in predictor.forecast(series, steps)]
    return [math.expm1(value) for value in predictor.forecast([math.log1p(value) for value in series], steps)]


def _reported(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _shown(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _shown(text: str) -> str:
    return text if len(text) <= _REASON_MAX else f"{text[:_REASON_MAX]}…"


# --- answering
# A `ForecastTask` answered, here and now. With `arima` or `prophet` that takes up to seconds: see `forecasting`.


def answer(task: ForecastTask) -> Forecasts:
    """Every series continued. A fit that fails is told in `notes`; a task that cannot be done is `Missing` for each."""
    try:
        predictor, log1p = predictor_of(task)
    except ConfigError as error:
        return Forecasts((Missing(str(error)),) * len(task.series))
    values: list[tuple[float, ...] | Missing] = []
    notes: list[str] = []
    for number, series in enumerate(task.series, start=1):
        why = _unusable(series, task.steps)
        if why is not None:
            values.append(Missing(why))
            continue
        reported = continued(predictor, series, task.steps, log1p=log1p)
        values.append(reported.values)
        if reported.failed is not None:
            notes.append(f"{task.predictor} failed for series {number}, the last value stands in: {reported.failed}")
    return Forecasts(tuple(values), tuple(notes))


def _unusable(series: Sequence[float], steps: int) -> str | None:
    if steps < 1:
        return f"{steps} windows ahead were asked for; 1 is the least"
    for number, value in enumerate(series, start=1):
        if not (math.isfinite(value) and value >= 0):
            return f"value {number} of {len(series)} is {value:g}: no finite number of 0 or more"
    return None

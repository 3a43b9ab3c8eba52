"""Which predictor, with which numbers: checked once, and handed on as the plain options of a `ForecastTask`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

from dynamo_local.core.extras import how_to_install
from dynamo_local.errors import ConfigError
from dynamo_local.planner.predictors.arima import Arima
from dynamo_local.planner.predictors.constant import Constant
from dynamo_local.planner.predictors.kalman import Kalman
from dynamo_local.planner.predictors.prophet import Prophet
from dynamo_local.planner.predictors.protocol import Predictor
from dynamo_local.planner.values.forecasts import ForecastTask
from dynamo_local.planner.values.series import WINDOWS_MAX, Series

EXTRA = "predictors"
LIBRARIES: Mapping[str, str] = MappingProxyType({"arima": "statsforecast", "prophet": "prophet"})
"""What a predictor imports, of the extra `predictors`. The others are our own, and take microseconds."""
NAMES = ("constant", "kalman", "arima", "prophet")

_BOUNDS = (
    ("kalman_q_level", 0.0, math.inf),
    ("kalman_q_trend", 0.0, math.inf),
    ("kalman_r", 1e-9, math.inf),
    ("kalman_min_points", 1, WINDOWS_MAX),
    ("prophet_window_size", 5, 10_000),
)
"""Options that are numbers, each with its least and its greatest value."""


@dataclass(frozen=True, slots=True)
class PredictorOptions:
    """Under Dynamo's names, with its defaults (but for `load_predictor`, which needs no extra here).

    Raises `ConfigError` that names the option, also where the extra that a predictor needs is not installed.
    """

    load_predictor: str = "constant"
    load_predictor_log1p: bool = False
    prophet_window_size: int = 50
    kalman_q_level: float = 1.0
    kalman_q_trend: float = 0.1
    kalman_r: float = 10.0
    kalman_min_points: int = 5

    def __post_init__(self) -> None:
        if self.load_predictor not in NAMES:
            raise ConfigError(f"load-predictor {self.load_predictor!r} is none of {', '.join(NAMES)}")
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                words = f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"
                raise ConfigError(f"{name.replace('_', '-')} must be {words}, not {value:g}")
        library = LIBRARIES.get(self.load_predictor)
        if library is not None and find_spec(library) is None:
            raise ConfigError(
                f"load-predictor {self.load_predictor} needs {library}, of the extra {EXTRA!r}: "
                f"{how_to_install(EXTRA)}, or choose constant or kalman"
            )

    @property
    def windows_max(self) -> int:
        """How many windows a series must remember for it."""
        return max(WINDOWS_MAX, self.prophet_window_size) if self.load_predictor == "prophet" else WINDOWS_MAX

    def task(self, series: Series, steps: int = 1) -> ForecastTask:
        """What is to be asked to continue the series' columns by `steps` windows."""
        own: Mapping[str, dict[str, float | str | bool]] = {
            "kalman": {
                "q_level": self.kalman_q_level,
                "q_trend": self.kalman_q_trend,
                "r": self.kalman_r,
                "min_points": self.kalman_min_points,
            },
            "prophet": {"window_size": self.prophet_window_size},
        }
        options = {"log1p": self.load_predictor_log1p, **own.get(self.load_predictor, {})}
        return ForecastTask(self.load_predictor, series.columns, steps, series.window_s, tuple(options.items()))


def is_light(name: str) -> bool:
    """Whether it is a predictor of our own: it needs no library and no process, 600 windows take a millisecond at most.
    What is no predictor at all (the queueing twin) is none of them."""
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

"""What surrounds a predictor: when it is not asked, what stands in where it fails, and what its values may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.planner.predictors.protocol import Predictor

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
        return Continued((last,) * steps, _told(error))
    if len(values) != steps or not all(map(math.isfinite, values)):
        return Continued((last,) * steps, f"{steps} finite values were expected, not {_shown(str(values))}")
    return Continued(tuple(max(0.0, value) for value in values))


def _forecast(predictor: Predictor, series: Sequence[float], steps: int, log1p: bool) -> list[float]:
    if not log1p:
        return [float(value) for value in predictor.forecast(series, steps)]
    return [math.expm1(value) for value in predictor.forecast([math.log1p(value) for value in series], steps)]


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _shown(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _shown(text: str) -> str:
    return text if len(text) <= _REASON_MAX else f"{text[:_REASON_MAX]}…"

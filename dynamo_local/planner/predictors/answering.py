"""A `ForecastTask` answered, here and now. With `arima` or `prophet` that takes up to seconds: see `forecasting`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynamo_local.core.types import Missing
from dynamo_local.errors import ConfigError
from dynamo_local.planner.predictors.continuing import continued
from dynamo_local.planner.predictors.options import predictor_of
from dynamo_local.planner.values.forecasts import Forecasts, ForecastTask


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
        told = continued(predictor, series, task.steps, log1p=log1p)
        values.append(told.values)
        if told.failed is not None:
            notes.append(f"{task.predictor} failed for series {number}, the last value stands in: {told.failed}")
    return Forecasts(tuple(values), tuple(notes))


def _unusable(series: Sequence[float], steps: int) -> str | None:
    if steps < 1:
        return f"{steps} windows ahead were asked for; 1 is the least"
    for number, value in enumerate(series, start=1):
        if not (math.isfinite(value) and value >= 0):
            return f"value {number} of {len(series)} is {value:g}: no finite number of 0 or more"
    return None

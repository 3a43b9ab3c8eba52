"""Any `ForecastTask` answered, here and now: a series continued, or the queueing twin asked."""

from __future__ import annotations

from dynamo_local.planner.predictors import answering as predictors
from dynamo_local.planner.queueing import task as queueing
from dynamo_local.planner.values.forecasts import Forecasts, ForecastTask


def answer(task: ForecastTask) -> Forecasts:
    """See `predictors.answering.answer` and `queueing.task.answer`."""
    return queueing.answer(task) if task.predictor == queueing.NAME else predictors.answer(task)

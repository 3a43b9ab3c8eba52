"""Answers any `ForecastTask` in the caller's thread: continues a series, or runs the queueing model."""

from __future__ import annotations

from dynamo_local.core.types import Missing
from dynamo_local.planner import predictors
from dynamo_local.planner import queueing_task as queueing
from dynamo_local.planner.forecasting.process import ForecastProcess
from dynamo_local.planner.predictors import is_light
from dynamo_local.planner.values import Forecasts, ForecastTask


def answer(task: ForecastTask) -> Forecasts:
    """See `predictors.answering.answer` and `queueing.task.answer`."""
    return queueing.answer(task) if task.predictor == queueing.NAME else predictors.answer(task)


# --- runners
# Two `planner.sources.Forecaster`: the arbiter forecasts in a process of its own, the simulator inline.

DEADLINE_S = 60.0
"""For one forecast, where the windows are not shorter: the first one of a process has seconds of imports before it."""


class InlineForecaster:
    """Answers in the caller's thread: for the simulator, whose time stands still meanwhile. The same task has the
    same answer as elsewhere."""

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        return answer(task)

    async def close(self) -> None:
        return


class ArbiterForecaster:
    """For the arbiter's loop: fits in a process of their own, and what takes a millisecond at most at once."""

    def __init__(self) -> None:
        self._process = ForecastProcess()

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        return answer(task) if is_light(task.predictor) else await self._process.run(task, deadline_s)

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

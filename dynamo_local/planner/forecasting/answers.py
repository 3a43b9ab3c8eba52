"""Any `ForecastTask` answered, here and now: a series continued, or the queueing twin asked."""

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
# Who runs a forecast (`planner.sources.Forecaster`): the arbiter off its loop, the twin here and now.

DEADLINE_S = 60.0
"""For one forecast, where the windows are not shorter: the first one of a process has seconds of imports before it."""


class InlineForecaster:
    """In the caller's thread, whatever it takes: for the twin, whose time stands still meanwhile. The same task has the
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

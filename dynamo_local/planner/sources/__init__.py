"""Where a planner's values come from: what the arbiter, or the twin, has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.forecasts import Forecasts, ForecastTask
from dynamo_local.planner.values.passes import Capabilities, Engines
from dynamo_local.planner.values.requests import Requests
from dynamo_local.planner.values.traffic import Traffic


class TrafficSource(Protocol):
    """What the clients did."""

    async def traffic(self, window_s: float) -> Traffic | Missing:
        """The window of so many seconds that ends now. May raise `DynamoError`."""
        ...


class RequestSource(Protocol):
    """The clients' requests one by one."""

    async def requests(self, window_s: float) -> Requests | Missing:
        """Those of the last so many seconds. `Missing` where they are only counted together. May raise
        `DynamoError`."""
        ...


class PassSource(Protocol):
    """The forward passes of the engines."""

    async def passes(self) -> Engines:
        """One entry for each rank of each ready worker, with the passes since the last call of this. A worker that
        does not answer is `Missing` there; raises nothing."""
        ...

    def capabilities(self) -> Mapping[str, Capabilities]:
        """The limits of the engines, by component."""
        ...


class Forecaster(Protocol):
    """Continues series: `planner.forecasting` in a process of its own, or in the twin inline."""

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        """The answer, or why there was none within `deadline_s` seconds. Never raises for a task."""
        ...


class NoForecaster:
    """Where nobody can forecast."""

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        """See `Forecaster`."""
        return Missing(f"there is nobody to ask for a {task.predictor} forecast")

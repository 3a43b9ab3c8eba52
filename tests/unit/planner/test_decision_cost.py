"""Tests what one decision costs with as many workers and windows as a host can have, without fits."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner import queueing_task as queueing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.values import Ended, Forecasts, ForecastTask, Requests
from tests.fakes.planner.busy_hosts import BOTH_LOOPS, WORKERS, busy_pull
from tests.fakes.planner.options import load_options, sla_options, slo_options

WINDOWS = 600
DECISIONS = 20
"""So many are measured."""
LEARNING = 3
"""Windows with passes before the ones that are measured: enough for as many samples as a model keeps."""
MEDIAN_MAX_MS = {"load": 2.0, "sla": 3.0, "slo": 5.0, "throughput-load": 5.0}
"""The last one's includes what it learns from 4,096 passes that came since the last pull."""
YARDSTICK_MS = 13.0
"""What `yardstick_ms` is on a 2.8 GHz Xeon core. A slower machine may take longer in the same proportion."""
OPTIONS = [
    load_options(adjustment_interval=30.0, metric_pulling_interval=30.0, max_gpu_budget=WORKERS),
    sla_options(throughput_adjustment_interval_seconds=30.0, max_gpu_budget=WORKERS),
    slo_options(max_gpu_budget=WORKERS),
    BOTH_LOOPS,
]


def answered(at_s: float, window_s: float, rate: float) -> Requests:
    """The requests of a window one by one."""
    count = round(rate * window_s)
    began = tuple(at_s - window_s + window_s * (n + 0.5) / count for n in range(count))
    ended = tuple(Ended(each, 500 + n * 37 % 5000, 20 + n * 13 % 400, 0.15, 0.009) for n, each in enumerate(began))
    return Requests(at_s - window_s, at_s, began, ended)


class Elsewhere:
    """Forecasts at once, in this process. In the arbiter another process computes them."""

    def __init__(self) -> None:
        self._inline = InlineForecaster()

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        if task.predictor != queueing.NAME:
            return await self._inline.run(task, deadline_s)
        *columns, rates = task.series
        shares = tuple(min(1.0, n / (task.steps // 2)) for n in range(task.steps + 1))
        return Forecasts((shares,) * (2 * len(rates) * len(columns) // 3))


def yardstick_ms() -> float:
    """A loop of plain Python, on this machine and now."""

    def once() -> float:
        began_s, total = time.thread_time(), 0
        for n in range(200_000):
            total += n * n % 7
        return (time.thread_time() - began_s) * 1000

    return statistics.median(once() for _ in range(9))


@pytest.mark.timing
@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=pytest.mark.full if each.policy == "slo" else (), id=each.policy) for each in OPTIONS],
)
def test_a_decision_takes_a_few_milliseconds(options: PlannerConfig) -> None:
    """The arbiter decides on its own loop, where everything else waits meanwhile."""
    driver = PolicyDriver(policy_of(options), 0.0, forecaster=Elsewhere())
    took_ms = []
    windows = tick = 0
    while len(took_ms) < DECISIONS:
        needs = driver.needs
        windows += needs.traffic_window_s is not None or not needs.passes
        heard = needs if windows > WINDOWS - LEARNING else replace(needs, passes=False)
        seen = busy_pull(driver.next_at_s, tick, heard)
        if needs.requests and needs.traffic_window_s is not None:
            seen = replace(seen, requests=answered(seen.at_s, needs.traffic_window_s, 300.0 + tick % 40))
        tick += 1
        began_s = time.thread_time()
        decision = driver.tick_now(seen)
        if decision is not None and windows > WINDOWS:
            took_ms.append((time.thread_time() - began_s) * 1000)
    assert statistics.median(took_ms) < MEDIAN_MAX_MS[options.policy] * max(1.0, yardstick_ms() / YARDSTICK_MS)

"""The cost of one decision of a planner, with its reasons, for 64 workers.

`load` gets an interval of 30 readings, the others a window of traffic. `throughput-load` also gets 64 passes of each
engine since the last pull.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Report, at_most
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster, answer
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S
from dynamo_local.planner.values import Forecasts, ForecastTask, IntervalObservation, Pool, Reading, WorkerPools
from tests.fakes.planner.busy_hosts import BOTH_LOOPS, REQUESTS_PER_S, WORKERS, busy_pull
from tests.fakes.planner.options import load_options, sla_options, slo_options

READINGS = 30
TICK_US, PULL_US, POLICY_MS = 100.0, 1000.0, 5.0
WARM_UP = 6

SLO_CORE_PERCENT = 2.0
SLO = slo_options(ttft_ms=200.0, itl_ms=10.0, max_gpu_budget=WORKERS)
SLA = sla_options(throughput_adjustment_interval_seconds=30.0, max_gpu_budget=WORKERS)


def run(short: bool) -> Report:
    """Best of many calls in each round: what the code needs, not what else ran."""
    report = Report("planner_tick")
    rounds, calls = (5, 200) if short else (15, 2000)
    for name, budget, up in (("hold for the budget", 96, 0.9), ("both up", 256, 0.4)):
        policy = LoadPolicy(
            load_options(max_gpu_budget=budget, decode_kv_scale_up_threshold=up, decode_kv_scale_down_threshold=0.3)
        )
        tick = partial(policy.on_tick, _observation())
        samples = [min(_timed_us(tick) for _ in range(calls)) for _ in range(rounds)]
        report.add(f"tick, {name}", "us", samples, at_most(TICK_US))
    loads = _observation().readings[0].loads
    take_in = partial(Reading, 1.0, 3, loads)
    samples = [min(_timed_us(take_in) for _ in range(calls)) for _ in range(rounds)]
    report.add("taking one reading in", "us", samples, at_most(PULL_US))
    for options in (SLA, BOTH_LOOPS):
        samples = [_policy_ms(options, calls=6 if short else 30) for _ in range(rounds)]
        report.add(f"decision, {options.policy}", "ms", samples, at_most(POLICY_MS))
    loop_ms, forecast_ms = _slo_ms(ticks=20 if short else 120)
    report.add("decision, slo: in the loop", "ms", loop_ms, at_most(POLICY_MS))
    interval_ms = INTERVAL_S * 1000
    both = [100 * (loop + forecast) / interval_ms for loop, forecast in zip(loop_ms, forecast_ms, strict=True)]
    report.add(
        "decisions, slo: with the process of forecasts, mean",
        "% core",
        [statistics.fmean(both)],
        at_most(SLO_CORE_PERCENT),
    )
    report.notes.append(f"slo: {REQUESTS_PER_S:g} requests/s, and half of that more and less within ten minutes")
    report.notes.append(
        f"{WORKERS} workers, {READINGS} readings, random loads; each sample is the best of {calls} calls"
    )
    return report


def _policy_ms(options: PlannerConfig, *, calls: int) -> float:
    """The median of so many decisions at the end of a window of traffic (both loops are due), in CPU time."""
    driver, took_ms, tick = PolicyDriver(policy_of(options), 0.0, forecaster=InlineForecaster()), list[float](), 0
    while len(took_ms) < calls:
        seen, windows = busy_pull(driver.next_at_s, tick, driver.needs), driver.needs.traffic_window_s is not None
        tick += 1
        began_s = time.thread_time()
        decision = driver.tick_now(seen)
        if windows and decision is not None and tick > WARM_UP:
            took_ms.append((time.thread_time() - began_s) * 1e3)
    return statistics.median(took_ms)


class _Aside:
    """Answers at once, and says what that took: in the arbiter another process does it."""

    def __init__(self) -> None:
        self.took_s = 0.0

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        began_s = time.thread_time()
        try:
            return answer(task)
        finally:
            self.took_s += time.thread_time() - began_s

    async def close(self) -> None:
        return


def _slo_ms(*, ticks: int) -> tuple[list[float], list[float]]:
    """CPU of so many decisions of `slo` on a busy host whose load swings: in the loop, and of the queueing model."""
    aside = _Aside()
    driver = PolicyDriver(policy_of(SLO), 0.0, forecaster=aside)
    loop_ms, forecast_ms = list[float](), list[float]()
    for tick in range(WARM_UP + ticks):
        seen = busy_pull(driver.next_at_s, tick, driver.needs)
        aside.took_s, began_s = 0.0, time.thread_time()
        driver.tick_now(seen)
        took_s = time.thread_time() - began_s
        if tick >= WARM_UP:
            loop_ms.append((took_s - aside.took_s) * 1e3)
            forecast_ms.append(aside.took_s * 1e3)
    return loop_ms, forecast_ms


def _observation() -> IntervalObservation:
    chance = random.Random(1)
    readings = tuple(
        Reading(
            float(n),
            chance.randint(0, 9),
            {f"worker_{k}": Load(gpu_cache_usage_perc=chance.random()) for k in range(WORKERS)},
        )
        for n in range(READINGS)
    )
    prefill = Pool("PrefillWorker", 1, WORKERS // 2, gpus_held=WORKERS // 2)
    decode = Pool("VllmWorker", 1, WORKERS, gpus_held=WORKERS, added_at_s=-1000.0)
    return IntervalObservation(30.0, 0.0, readings, WorkerPools(prefill, decode))


def _timed_us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6

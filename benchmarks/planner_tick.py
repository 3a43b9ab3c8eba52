"""What one decision of the load planner costs, with its reasons: 64 workers, an interval of 30 readings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Report, at_most
from dynamo_local.core.types import Load
from dynamo_local.planner.policies.load import LoadOptions, LoadPolicy
from dynamo_local.planner.values.decisions import Observation
from dynamo_local.planner.values.pools import Pool, WorkerPools
from dynamo_local.planner.values.readings import Reading

WORKERS, READINGS = 64, 30
TICK_US, PULL_US = 100.0, 1000.0


def run(short: bool) -> Report:
    """Best of many calls in each round: what the code needs, not what else ran."""
    report = Report("planner_tick")
    rounds, calls = (5, 200) if short else (15, 2000)
    for name, budget, up in (("hold for the budget", 96, 0.9), ("both up", 256, 0.4)):
        policy = LoadPolicy(
            LoadOptions(max_gpu_budget=budget, decode_kv_scale_up_threshold=up, decode_kv_scale_down_threshold=0.3)
        )
        tick = partial(policy.on_tick, _observation())
        samples = [min(_timed_us(tick) for _ in range(calls)) for _ in range(rounds)]
        report.add(f"tick, {name}", "us", samples, at_most(TICK_US))
    loads = _observation().readings[0].loads
    take_in = partial(Reading, 1.0, 3, loads)
    samples = [min(_timed_us(take_in) for _ in range(calls)) for _ in range(rounds)]
    report.add("taking one reading in", "us", samples, at_most(PULL_US))
    report.notes.append(
        f"{WORKERS} workers, {READINGS} readings, random loads; each sample is the best of {calls} calls"
    )
    return report


def _observation() -> Observation:
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
    return Observation(30.0, 0.0, readings, WorkerPools(prefill, decode))


def _timed_us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6

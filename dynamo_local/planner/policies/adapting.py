"""Intervals and leads that follow how long scaling really takes (`adaptive-intervals`)."""

from __future__ import annotations

import math

from dynamo_local.planner.values.pools import WorkerPools


def start_up_s(pools: WorkerPools) -> float:
    """The longest start-up of a role; 0 where none was seen yet."""
    return max((pool.start_up_s or 0.0 for pool in pools.all), default=0.0)


def adapted_interval_s(interval_s: float, pools: WorkerPools) -> float:
    """Not shorter than what a start or a drain takes: the next decision then sees what became of the last."""
    drains = (pool.drain_s or 0.0 for pool in pools.all)
    return max(interval_s, start_up_s(pools), *drains)


def steps_ahead(interval_s: float, pools: WorkerPools) -> int:
    """Windows to forecast: the last of them begins when a worker that is started now serves."""
    return 1 + math.ceil(start_up_s(pools) / interval_s - 1e-9)

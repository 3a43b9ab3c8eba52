"""The fewest workers of a component, from a number of GPUs. Pure."""

from __future__ import annotations


def floor_workers(min_gpu_budget: int, gpus_per_worker: int) -> int:
    """The fewest workers that hold `min_gpu_budget` GPUs; never below one."""
    return max(1, -(-min_gpu_budget // max(1, gpus_per_worker)))

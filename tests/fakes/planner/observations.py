"""Shows what a load planner sees, in a line each: `observe(2, 2, queue=[0, 0], kv=[0.3, 0.3])`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.values import IntervalObservation, Pool, Reading, WorkerPools

PREFILL, DECODE = "PrefillWorker", "VllmWorker"

NOT_HAD = Missing("nats timeout")

INTERVAL_S = 30.0


def pool(component: str, ready: int, gpus: int = 1, **more: Any) -> Pool:
    """So many that serve, with their GPUs, and one GPU set for each that leaves or starts; `more` overrules."""
    holding = ready + more.get("leaving", 0) + more.get("coming", 0) - more.get("waiting", 0)
    counted = {
        "gpus_held": gpus * holding,
        "gpus_leaving": gpus * more.get("leaving", 0),
        "gpus_lacking": gpus * (more.get("waiting", 0) - more.get("deferred", 0)),
    }
    return Pool(component, gpus, ready, **(counted | more))


def worker_pools(
    prefill: int | Pool | None, decode: int | Pool, *, prefill_gpus: int = 1, decode_gpus: int = 1
) -> WorkerPools:
    """Both components by their number of ready workers, or as pools of their own."""
    return WorkerPools(
        pool(PREFILL, prefill, prefill_gpus) if isinstance(prefill, int) else prefill,
        pool(DECODE, decode, decode_gpus) if isinstance(decode, int) else decode,
    )


def reading(
    at_s: float, queue: float | Missing | None, kv: float | Load | Missing | None, workers: int = 1, waiting: int = 0
) -> Reading:
    """One pull: every decode worker is loaded alike. `kv` None: nobody was there to ask."""
    load = Load(gpu_cache_usage_perc=kv, num_requests_waiting=waiting) if isinstance(kv, int | float) else kv
    return Reading(at_s, queue, {} if load is None else {f"dynamo_{DECODE}_{n}": load for n in range(workers)})


def readings(
    queue: Sequence[float | Missing | None], kv: Sequence[float | Load | Missing | None], *, waiting: int = 0
) -> tuple[Reading, ...]:
    """One for each pair of samples, a second apart. The shorter list goes on with what could not be had."""
    count = max(len(queue), len(kv))
    depths = [*queue, *[NOT_HAD] * (count - len(queue))]
    loads = [*kv, *[NOT_HAD] * (count - len(kv))]
    return tuple(reading(n + 1.0, q, k, waiting=waiting) for n, (q, k) in enumerate(zip(depths, loads, strict=True)))


def observe(
    prefill: int | Pool | None,
    decode: int | Pool,
    *,
    queue: Sequence[float | Missing] = (),
    kv: Sequence[float | Load | Missing | None] = (),
    added_intervals_ago: float | None = None,
    **gpus: int,
) -> IntervalObservation:
    """An interval of 30 s that ended now. `prefill` None: an aggregated graph."""
    seen = worker_pools(prefill, decode, **gpus)
    depths: Sequence[float | Missing | None] = [None] * len(kv) if prefill is None else queue
    began_s = 10 * INTERVAL_S
    if added_intervals_ago is not None:
        added_at_s = began_s + INTERVAL_S * (1 - added_intervals_ago)
        seen = replace(seen, decode=replace(seen.decode, added_at_s=added_at_s))
    return IntervalObservation(began_s + INTERVAL_S, began_s, readings(depths, kv), seen)

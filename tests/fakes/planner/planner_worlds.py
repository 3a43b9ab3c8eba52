"""Hypothesis strategies of what a load planner may see, and changes of one number of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.values import IntervalObservation, Pool, Reading, WorkerPools
from tests.fakes.planner.observations import DECODE, INTERVAL_S, NOT_HAD, PREFILL
from tests.fakes.planner.options import load_options

missing = st.just(NOT_HAD)
depths = st.integers(0, 12) | st.floats(0, 12, allow_subnormal=False)
fractions = st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0]) | st.floats(0, 1, allow_subnormal=False)


@st.composite
def pools(draw: st.DrawFn, component: str, *, adjusting: bool = False) -> Pool:
    """Counts that agree with each other."""
    gpus, ready = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    waiting, leaving = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    starting = draw(st.integers(0, 1)) if adjusting else 0
    deferred = draw(st.integers(0, min(1, waiting)))
    return Pool(
        component,
        gpus,
        ready,
        coming=starting + waiting,
        waiting=waiting,
        deferred=deferred,
        leaving=leaving,
        cancellable=draw(st.integers(0, leaving)),
        routed=draw(st.integers(0, leaving)) if adjusting else 0,
        gpus_held=gpus * (ready + starting + leaving),
        gpus_leaving=gpus * leaving,
        gpus_lacking=gpus * (waiting - deferred),
        added_at_s=draw(st.none() | st.floats(0, 330, allow_subnormal=False)),
    )


@st.composite
def observations(draw: st.DrawFn, *, adjusting: bool = False) -> IntervalObservation:
    """An interval of up to six pulls. Half of the graphs are aggregated."""
    prefill = draw(st.none() | pools(PREFILL, adjusting=adjusting))
    decode = draw(pools(DECODE, adjusting=adjusting))
    pulls = []
    for n in range(draw(st.integers(0, 6))):
        queue: Any = None if prefill is None else draw(missing | depths | depths)
        loads = {}
        for worker in range(decode.ready):
            kv = draw(missing | fractions | fractions)
            waiting = draw(st.integers(0, 3))
            loads[f"d{worker}"] = (
                kv if isinstance(kv, Missing) else Load(1, gpu_cache_usage_perc=kv, num_requests_waiting=waiting)
            )
        pulls.append(Reading(300.0 + n, queue, loads))
    return IntervalObservation(300.0 + INTERVAL_S, 300.0, tuple(pulls), WorkerPools(prefill, decode))


@st.composite
def options(draw: st.DrawFn) -> PlannerConfig:
    """Thresholds and budgets that `config` lets through."""
    kv = sorted(draw(st.tuples(fractions, fractions).filter(lambda pair: pair[0] != pair[1])))
    queue = sorted(draw(st.tuples(depths, depths).filter(lambda pair: pair[0] != pair[1])))
    budget = draw(st.integers(1, 24))
    return load_options(
        max_gpu_budget=budget,
        min_gpu_budget=draw(st.integers(1, min(budget, 6))),
        decode_kv_scale_down_threshold=float(kv[0]),
        decode_kv_scale_up_threshold=float(kv[1]),
        prefill_queue_scale_down_threshold=float(queue[0]),
        prefill_queue_scale_up_threshold=float(queue[1]),
        decode_kv_per_waiting_request=draw(st.sampled_from([0.0, 0.02])),
    )


def short_of(needed: float, value: float) -> float:
    """One step from what was needed back towards what is: the next float, or one of what is counted."""
    if isinstance(needed, int):
        return needed - 1 if needed > value else needed + 1
    return math.nextafter(needed, value)


def with_number(
    seen: IntervalObservation, given: PlannerConfig, component: str, name: str, value: float
) -> tuple[IntervalObservation, PlannerConfig]:
    """The same world with one number of one component changed."""
    if name in ("max_gpu_budget", "min_gpu_budget"):
        return seen, given.model_copy(update={name: int(value)})
    if name == "since_added_s":
        pools = replace(seen.pools, decode=replace(seen.pools.decode, added_at_s=0.0))
        return replace(seen, interval_began_s=value, now_s=value + INTERVAL_S, pools=pools), given
    if name in ("workers", "workers_waiting"):
        pool = next(pool for pool in seen.pools.all if pool.component == component)
        return replace(seen, pools=_with_pool(seen.pools, _with_count(pool, name, int(value)))), given
    return replace(seen, readings=_with_samples(seen.readings, name, value)), given


def _with_pool(pools: WorkerPools, pool: Pool) -> WorkerPools:
    return replace(pools, **{"decode" if pool.component == DECODE else "prefill": pool})


def _with_count(pool: Pool, name: str, count: int) -> Pool:
    if name == "workers":
        more = count - pool.capacity
        return replace(pool, ready=pool.ready + more, gpus_held=pool.gpus_held + more * pool.gpus_per_worker)
    return replace(
        pool,
        coming=pool.coming - pool.waiting + count,
        waiting=count,
        deferred=min(pool.deferred, count),
        gpus_lacking=min(pool.gpus_lacking, count * pool.gpus_per_worker),
    )


def _with_samples(pulls: tuple[Reading, ...], name: str, value: float) -> tuple[Reading, ...]:
    had = [observation for observation in pulls if not isinstance(observation.queue, Missing)]

    def changed(observation: Reading) -> Reading:
        if name == "average_kv_load":
            loads = {
                worker: load if isinstance(load, Missing) else Load(gpu_cache_usage_perc=value)
                for worker, load in observation.loads.items()
            }
            return replace(observation, loads=loads)
        every = name == "prefill_queue_size" and not isinstance(observation.queue, Missing)
        return (
            replace(observation, queue=value)
            if every or (had and observation is had[-1] and name == "prefill_queue_last")
            else observation
        )

    return tuple(changed(observation) for observation in pulls)

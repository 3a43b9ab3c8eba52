"""Shows what a planner sees of a host with as many workers as it can have."""

from __future__ import annotations

import math
import random

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.passes import Requests as PassRequests
from dynamo_local.planner.values import Capabilities, Ended, EngineSeen, Needs, Observation, Requests, Traffic
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.planner.observations import DECODE, PREFILL, pool, reading, worker_pools
from tests.fakes.planner.options import throughput_load_options

WORKERS = 64
"""Half of them prefill."""
REQUESTS_PER_S = 200.0
PASSES = 64
"""Of each engine, since the last pull."""
LIMITS = Capabilities(8192, 256, 1_000_000, 131_072)
BOTH_LOOPS = throughput_load_options(
    optimization_target="sla",
    enable_load_scaling=True,
    load_predictor="constant",
    profile_results_dir=DEFAULT_PROFILE,
    throughput_adjustment_interval_seconds=30.0,
    load_adjustment_interval_seconds=5.0,
    max_gpu_budget=WORKERS,
)


def busy_pull(at_s: float, tick: int, needs: Needs) -> Observation:
    """What the workers, and their clients, did since the last pull: as much of it as is wanted."""
    pools = worker_pools(pool(PREFILL, WORKERS // 2), pool(DECODE, WORKERS // 2))
    engines = {}
    for n in range(WORKERS if needs.passes else 0):
        engine, prefill = EngineId(str(n)), n < WORKERS // 2
        seen = tuple(_pass(engine, at_s, tick, k, prefill=prefill) for k in range(PASSES))
        engines[engine] = EngineSeen(PREFILL if prefill else DECODE, seen, seen[-1])
    window_s = needs.traffic_window_s
    traffic = None
    if window_s is not None:
        traffic = Traffic(at_s, window_s, 300.0 + tick % 40, 3000.0, 200.0, 120.0, 9.0, 2.0, 0.2, 1.0)
    limits = {PREFILL: LIMITS, DECODE: LIMITS}
    requests = _requests(at_s, window_s) if needs.requests and window_s is not None else None
    return Observation(reading(at_s, 1, 0.7, WORKERS // 2), pools, traffic, engines, limits, requests=requests)


def _requests(at_s: float, window_s: float) -> Requests:
    """Those of a window, one by one: lengths of all kinds, and a rate that swings by half within ten minutes."""
    rng, since_s = random.Random(at_s), at_s - window_s
    rate = REQUESTS_PER_S * (1 + 0.5 * math.sin(2 * math.pi * at_s / 600))
    began = sorted(rng.uniform(since_s, at_s) for _ in range(round(rate * window_s)))
    ended = tuple(
        Ended(end_s, int(rng.lognormvariate(7.8, 0.7)) + 1, int(rng.lognormvariate(5.5, 0.7)) + 1, 0.1, 0.008)
        for end_s in began
    )
    return Requests(since_s, at_s, tuple(began), ended)


def _pass(engine: EngineId, at_s: float, tick: int, number: int, *, prefill: bool) -> ForwardPass:
    more = (tick * 7 + number * 13) % 50
    if prefill:
        scheduled = PassRequests(num_prefill_requests=1, sum_prefill_tokens=500 + 40 * more)
    else:
        scheduled = PassRequests(num_decode_requests=4 + more, sum_decode_kv_tokens=(4 + more) * 3000)
    return ForwardPass(engine, tick * PASSES + number, 0.01 + 0.0004 * more, scheduled, at_s=at_s)

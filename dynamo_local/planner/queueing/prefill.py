"""Prompts that wait for prefill workers: who has the first token in time. Pure."""

from __future__ import annotations

from heapq import heapreplace

from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine


def prefill_share(demand: Demand, rate: float, workers: int, engine: Engine, ttft_s: float, after_s: float) -> float:
    """Share of the prompts that are done, and `after_s` later have a token, within `ttft_s` seconds."""
    allowed_s = ttft_s - after_s
    times = demand.times(rate)
    if not engine.options.turns:
        return _shared(times, demand.isl, workers, engine, allowed_s)
    kept = 0
    for first in range(min(workers, len(times))):
        kept += _alone(times[first::workers], demand.isl[first::workers], engine, allowed_s)
    return kept / len(times)


def _shared(times: list[float], isl: tuple[int, ...], workers: int, engine: Engine, allowed_s: float) -> float:
    """One queue, one prompt at a time on each worker."""
    free = [0.0] * workers
    kept = 0
    for at_s, tokens in zip(times, isl, strict=True):
        done_s = max(at_s, free[0]) + engine.prompt_s(tokens)
        heapreplace(free, done_s)
        kept += done_s - at_s <= allowed_s
    return kept / len(times)


def _alone(times: list[float], isl: tuple[int, ...], engine: Engine, allowed_s: float) -> int:
    """One worker with a queue of its own, whose passes take prompts, and parts of them, in their order."""
    if not engine.options.batches:
        free_s, kept = 0.0, 0
        for at_s, tokens in zip(times, isl, strict=True):
            free_s = max(at_s, free_s) + engine.prompt_s(tokens)
            kept += free_s - at_s <= allowed_s
        return kept
    limit = engine.options.batched_tokens
    kept, now_s, index, left = 0, 0.0, 0, 0
    while index < len(times):
        left = left or isl[index]
        now_s = max(now_s, times[index])
        room, done = limit, []
        while index < len(times) and room and times[index] <= now_s:
            left = left or isl[index]
            part = min(left, room)
            room, left = room - part, left - part
            if not left:
                done.append(index)
                index += 1
        now_s += engine.pass_s(limit - room)
        kept += sum(now_s - times[each] <= allowed_s for each in done)
    return kept

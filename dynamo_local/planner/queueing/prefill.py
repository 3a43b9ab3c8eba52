"""Prompts that wait for prefill workers: when each is done, and who has the first token in time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine


def prefill_share(demand: Demand, rate: float, workers: int, engine: Engine, ttft_s: float, after_s: float) -> float:
    """Share of the prompts that are done, and `after_s` later have a token, within `ttft_s` seconds."""
    times = demand.times(rate)
    return within(times, done_at(times, demand.isl, workers, engine), ttft_s - after_s)


def within(times: Sequence[float], done: Sequence[float], allowed_s: float) -> float:
    """Share of those that were done so soon."""
    return sum(done_s - at_s <= allowed_s for at_s, done_s in zip(times, done, strict=True)) / len(times)


def done_at(times: list[float], isl: tuple[int, ...], workers: int, engine: Engine) -> list[float]:
    """When each of these prompts, which come at those times (seconds, ascending), is done."""
    if not engine.options.turns:
        return _shared(times, engine.prompts_s(isl), workers)
    done = [0.0] * len(times)
    for first in range(min(workers, len(times))):
        done[first::workers] = _alone(times[first::workers], isl[first::workers], engine)
    return done


def _shared(times: list[float], took_s: Sequence[float], workers: int) -> list[float]:
    """One queue, one prompt at a time on each worker. `took_s`: what each takes."""
    free = [0.0] * workers
    done = []
    for at_s, prompt_s in zip(times, took_s, strict=True):
        free_s = free[0]
        done_s = (at_s if at_s > free_s else free_s) + prompt_s
        heapreplace(free, done_s)
        done.append(done_s)
    return done


def _alone(times: list[float], isl: tuple[int, ...], engine: Engine) -> list[float]:
    """One worker with a queue of its own, whose passes take prompts, and parts of them, in their order."""
    if not engine.options.batches:
        return _shared(times, engine.prompts_s(isl), 1)
    limit = engine.options.batched_tokens
    done: list[float] = []
    now_s, index, left = 0.0, 0, 0
    while index < len(times):
        left = left or isl[index]
        now_s = max(now_s, times[index])
        room, ended = limit, 0
        while index < len(times) and room and times[index] <= now_s:
            left = left or isl[index]
            part = min(left, room)
            room, left = room - part, left - part
            if not left:
                ended += 1
                index += 1
        now_s += engine.pass_s(limit - room)
        done += [now_s] * ended
    return done

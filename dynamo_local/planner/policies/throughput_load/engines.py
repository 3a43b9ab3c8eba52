"""What is known of each engine between two decisions of the load loop, from its forward-pass metrics.

A snapshot every five seconds says little: an engine whose queue was long a moment ago is not idle. So a decision to go
up is made from what is now, one to go down from the most since the last decision, and from the time spent in passes.

A heartbeat says that no pass ended for a second. One that tells of requests is believed: that is an engine in a long
pass. One that tells of none, after a pass that left a queue, is not: as far as can be told the engine hangs. It keeps
its role from going down, and is no reason to go up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.passes import NONE, EngineId, Engines, EngineSeen, ForwardPass, Requests

PASSES_LOOKED_AT = 8
"""Of an engine and pull, evenly spread: enough to see a queue, few enough for 64 workers with thousands of passes."""

MAX_AGE_INTERVALS = 3
"""A last pass older than this many load intervals says nothing of now."""


_WALL_TIME_S = attrgetter("wall_time_s")


class EngineLoad(NamedTuple):
    """What waits and runs in an engine."""

    queued_prefill_tokens: float = 0
    decode_requests: float = 0
    decode_kv_tokens: float = 0


IDLE = EngineLoad()


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """`now` is None where nothing is known of it. `most`: of each number since the last decision. `busy_s`: in passes
    since then."""

    component: str
    now: EngineLoad | None
    most: EngineLoad = IDLE
    busy_s: float = 0.0
    hung: bool = False
    last_pass: ForwardPass | None = None


Watches = Mapping[EngineId, EngineWatch]


def watched(watches: Watches, engines: Engines, *, now_s: float, max_age_s: float) -> dict[EngineId, EngineWatch]:
    """After one more pull; engines that are not in it are forgotten."""
    return {engine: _watch(watches.get(engine), seen, now_s - max_age_s) for engine, seen in engines.items()}


def begun_anew(watches: Watches) -> dict[EngineId, EngineWatch]:
    """After a decision: what is most is what is now, and no time has been spent."""
    return {
        engine: EngineWatch(one.component, one.now, one.now or IDLE, 0.0, one.hung, one.last_pass)
        for engine, one in watches.items()
    }


def spread(passes: tuple[ForwardPass, ...], count: int) -> tuple[ForwardPass, ...]:
    """At most so many of them, evenly spread, the newest included."""
    step = -(-len(passes) // count)
    return passes if step <= 1 else passes[::-step][::-1]


def _watch(before: EngineWatch | None, seen: EngineSeen, oldest_s: float) -> EngineWatch:
    if before is None:
        before = EngineWatch(seen.component, None)
    last, passes = seen.last, seen.passes
    last_pass = before.last_pass
    if passes:
        last_pass = passes[-1]
    elif not isinstance(last, Missing) and not last.heartbeat:
        last_pass = last
    now, hung = _now(last, last_pass, oldest_s)
    most = _most(before.most if now is None else _larger(before.most, now), spread(passes, PASSES_LOOKED_AT))
    return EngineWatch(seen.component, now, most, before.busy_s + _busy_s(passes, before.last_pass), hung, last_pass)


def _busy_s(passes: tuple[ForwardPass, ...], before: ForwardPass | None) -> float:
    """Time in passes; those that were left out (their numbers say how many) took as long as those that were told."""
    if not passes:
        return 0.0
    first = passes[0].counter_id - 1 if before is None else before.counter_id
    return sum(map(_WALL_TIME_S, passes)) * max(1.0, (passes[-1].counter_id - first) / len(passes))


def _now(last: ForwardPass | Missing, last_pass: ForwardPass | None, oldest_s: float) -> tuple[EngineLoad | None, bool]:
    if isinstance(last, Missing) or last.at_s < oldest_s:
        return None, False
    if not last.heartbeat or last.queued != NONE or last.scheduled != NONE:
        return _load(last), False
    if last_pass is not None and _waiting(last_pass.queued):
        return _load(last_pass), True
    return IDLE, False


def _waiting(queued: Requests) -> bool:
    return queued.sum_prefill_tokens > 0 or queued.num_prefill_requests > 0 or queued.num_decode_requests > 0


def _load(one: ForwardPass) -> EngineLoad:
    scheduled, queued = one.scheduled, one.queued
    return EngineLoad(
        queued.sum_prefill_tokens,
        scheduled.num_decode_requests + queued.num_decode_requests,
        scheduled.sum_decode_kv_tokens + queued.sum_decode_kv_tokens,
    )


def _most(load: EngineLoad, passes: tuple[ForwardPass, ...]) -> EngineLoad:
    """Of each number the largest. (Written out: it is done for a thousand passes in a tick.)"""
    tokens, requests, kv = load
    for one in passes:
        scheduled, queued = one.scheduled, one.queued
        if queued.sum_prefill_tokens > tokens:
            tokens = queued.sum_prefill_tokens
        if (count := scheduled.num_decode_requests + queued.num_decode_requests) > requests:
            requests = count
        if (held := scheduled.sum_decode_kv_tokens + queued.sum_decode_kv_tokens) > kv:
            kv = held
    return EngineLoad(tokens, requests, kv)


def _larger(one: EngineLoad, other: EngineLoad) -> EngineLoad:
    return EngineLoad(*map(max, one, other))

"""Who goes when a scale-down names nobody. Values in, an order out; the same fleet always gives the same answer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from dynamo_local.core.life.fleet import Worker
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import BadTarget


class VictimPolicy(enum.StrEnum):
    """How a ready worker is chosen."""

    HIGHEST_SUFFIX = "highest-suffix"
    """The predecessor's, and the default: the newest name goes first, the unsuffixed one last."""
    LEAST_LOADED = "least-loaded"
    """The soonest gone: fewest remaining tokens, then fewest requests (running and waiting)."""
    COLDEST = "coldest"
    """The least prefix cache lost, see `cache_at_stake`."""


def parse_policy(text: str | None) -> VictimPolicy:
    """The policy of that name, the default for None. Raises `BadTarget` that lists the policies."""
    if text is None:
        return VictimPolicy.HIGHEST_SUFFIX
    try:
        return VictimPolicy(text)
    except ValueError:
        known = ", ".join(VictimPolicy)
        raise BadTarget(f"victim policy {text!r} is not known; there are: {known}") from None


def victims(workers: Iterable[Worker], policy: VictimPolicy) -> tuple[Worker, ...]:
    """Ready workers, the first to go first. Ties go by the highest suffix.

    A worker whose load is missing goes after all whose load is known: nobody can say that it is idle.
    """
    return tuple(sorted(workers, key=lambda worker: (*_COSTS[policy](worker.load), -worker.n)))


def arrivals(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Workers on their way, the first to be taken back first: the furthest from serving, then the highest suffix."""
    return tuple(sorted(workers, key=lambda worker: (TRAITS[worker.state].take_back or 0, -worker.n)))


def cache_at_stake(load: Load) -> float:
    """Blocks of prefix cache that are of use: `gpu_prefix_cache_hit_rate × kv_total_blocks`.

    An estimate from what workers publish: the share of prompt tokens found in the cache, times its size.
    Not `× kv_active_blocks`: those are the blocks that running requests hold, and an idle worker with a warm cache
    has none (cached blocks that nobody uses count as free, in vLLM and in our engine).
    """
    return load.gpu_prefix_cache_hit_rate * load.kv_total_blocks


Cost = tuple[bool, float, float]
"""`(its load is missing, what would be lost, and by that)`; the smallest goes first."""

_UNKNOWN: Cost = (True, 0.0, 0.0)


def _nothing(load: Load | Missing) -> Cost:
    return False, 0.0, 0.0


def _work_left(load: Load | Missing) -> Cost:
    if isinstance(load, Missing):
        return _UNKNOWN
    return False, load.remaining_tokens, load.request_active_slots + load.num_requests_waiting


def _cache_lost(load: Load | Missing) -> Cost:
    return _UNKNOWN if isinstance(load, Missing) else (False, cache_at_stake(load), load.kv_active_blocks)


_COSTS: dict[VictimPolicy, Callable[[Load | Missing], Cost]] = {
    VictimPolicy.HIGHEST_SUFFIX: _nothing,
    VictimPolicy.LEAST_LOADED: _work_left,
    VictimPolicy.COLDEST: _cache_lost,
}

"""Loads of single workers, for the policy `load`: from their engines' passes, where those are heard.

A decode worker's KV use is the KV of its scheduled and queued requests, as a share of what its card says it has. What
waits for a prefill waits in the prefill engines themselves: there is no queue beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynamo_local.clock import NowClock
from dynamo_local.core.types import Load, Missing
from dynamo_local.in_cluster.hearing import HeardPasses
from dynamo_local.planner.pulling import Sampled
from dynamo_local.planner.values.passes import EngineSeen
from dynamo_local.planner.values.pools import WorkerPools


class LoadsOfPasses:
    """`pulling.LoadSource` and `pulling.QueueSource`. `ready` are the names by which its loads are known."""

    def __init__(self, heard: HeardPasses, pools: Callable[[], WorkerPools], clock: NowClock) -> None:
        self._heard = heard
        self._pools = pools
        self._clock = clock

    def ready(self) -> tuple[str, ...]:
        """Decode workers that serve, also those that were not heard."""
        return tuple(self._of(self._pools().decode.component))

    async def loads(self) -> dict[str, Sampled[Load]]:
        """Of those that were heard of late."""
        decode = self._pools().decode.component
        limits = self._heard.capabilities().get(decode)
        max_kv = None if limits is None else limits.max_kv_tokens
        now_s = self._clock.now_s()
        found = {name: _load(engines, max_kv) for name, engines in self._of(decode).items()}
        return {name: Sampled(load, now_s) for name, load in found.items() if load is not None}

    async def depth(self) -> Sampled[int] | Missing:
        """Requests in the queues of all prefill engines; missing where one of them was not heard."""
        prefill = self._pools().prefill
        if prefill is None:
            return Missing("the graph has no prefill component")
        waiting = 0
        for engines in self._of(prefill.component).values():
            for engine in engines:
                if isinstance(engine.last, Missing):
                    return engine.last
                waiting += engine.last.queued.num_prefill_requests
        return Sampled(waiting, self._clock.now_s())

    def _of(self, component: str) -> dict[str, list[EngineSeen]]:
        """The engines of a component, by worker."""
        found: dict[str, list[EngineSeen]] = {}
        for engine, seen in self._heard.seen().items():
            if seen.component == component:
                found.setdefault(engine.worker_id, []).append(seen)
        return found


def _load(engines: Iterable[EngineSeen], max_kv: int | None) -> Load | None:
    """Of one worker; its ranks share nothing, so the mean of their KV use counts. None where one was not heard."""
    kv = running = waiting = ranks = 0
    for engine in engines:
        if isinstance(engine.last, Missing):
            return None
        now, queued = engine.last.scheduled, engine.last.queued
        kv += now.sum_decode_kv_tokens + queued.sum_decode_kv_tokens
        running += now.num_decode_requests + now.num_prefill_requests
        waiting += queued.num_prefill_requests + queued.num_decode_requests
        ranks += 1
    usage: float | Missing = Missing("its card does not say how much KV it has")
    if max_kv:
        usage = min(1.0, kv / (max_kv * ranks))
    return Load(request_active_slots=running, num_requests_waiting=waiting, gpu_cache_usage_perc=usage)

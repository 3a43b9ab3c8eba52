"""The workers of a graph on Kubernetes, counted for a planner. No pods are looked at: the operator counts them.

A replica that is not ready starts, or pends for want of a device; the operator does not say which. One that is on its
way for longer than starts take, or than `PENDING_AFTER_S` where none was seen yet, counts as waiting: it holds nothing
up, and above all no scale-down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from dynamo_local.core.types import Role
from dynamo_local.planner.connectors.kubernetes.values import Component, Counts, Seen
from dynamo_local.planner.values.pools import Pool, WorkerPools

NO_DECODE = Pool("(no decode component)", gpus_per_worker=0, ready=0)
"""Of a graph whose prefill workers alone are planned, and which has no others."""

PENDING_AFTER_S = 120.0
SLOW_START = 2.0
"""A start that takes so many times what starts take pends."""
KEPT = 5


@dataclass(slots=True)
class _Times:
    added_at_s: float | None = None
    coming_since_s: float | None = None
    leaving_since_s: float | None = None
    ready: int = 0
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class Counting:
    """Remembers since when what is on its way, or leaves, does so. Times are the planner's."""

    def __init__(self, pending_after_s: float = PENDING_AFTER_S) -> None:
        self._pending_after_s = pending_after_s
        self._times: dict[str, _Times] = {}

    def saw(self, seen: Seen, now_s: float) -> None:
        """The graph, looked at now."""
        for one in seen.workers:
            times, counts, wanted = self._of(one), one.counts or Counts(), seen.wanted(one)
            ready = min(counts.ready or 0, wanted)
            if ready > times.ready:
                times.added_at_s = now_s
                if times.coming_since_s is not None:
                    times.starts.append(now_s - times.coming_since_s)
                times.coming_since_s = now_s if ready < wanted else None
            elif ready < wanted:
                times.coming_since_s = now_s if times.coming_since_s is None else times.coming_since_s
            else:
                times.coming_since_s = None
            leaves = counts.replicas > wanted
            times.leaving_since_s = (times.leaving_since_s or now_s) if leaves else None
            times.ready = ready

    def pools(self, seen: Seen, gpus: Mapping[str, int], now_s: float) -> WorkerPools:
        """As last seen. `gpus` is what a replica of each component holds."""
        prefill = None if seen.prefill is None else self._pool(seen, seen.prefill, gpus, now_s)
        decodes = any(one.role is not Role.PREFILL for one in seen.workers)
        decode = self._pool(seen, seen.decode, gpus, now_s) if decodes else NO_DECODE
        return WorkerPools(prefill, decode, pending=seen.hindrance is not None)

    def _of(self, one: Component) -> _Times:
        return self._times.setdefault(one.name, _Times())

    def _pool(self, seen: Seen, one: Component, gpus: Mapping[str, int], now_s: float) -> Pool:
        times, counts, wanted, size = self._of(one), one.counts or Counts(), seen.wanted(one), gpus[one.name]
        ready = min(counts.ready or 0, wanted)
        coming, leaving = wanted - ready, max(0, counts.replicas - wanted)
        start_s = median(times.starts) if times.starts else None
        patience_s = self._pending_after_s if start_s is None else max(SLOW_START * start_s, 10.0)
        since_s = times.coming_since_s
        stuck = since_s is not None and now_s - since_s > patience_s
        return Pool(
            component=one.name,
            gpus_per_worker=size,
            ready=ready,
            coming=coming,
            waiting=coming if stuck else 0,
            leaving=leaving,
            gpus_held=size * max(counts.replicas, ready),
            gpus_leaving=size * leaving,
            gpus_lacking=size * max(0, wanted - max(counts.replicas, ready)),
            added_at_s=times.added_at_s if ready else None,
            coming_since_s=since_s if coming else None,
            leaving_since_s=times.leaving_since_s,
            start_up_s=start_s,
        )


def drifted(seen: Seen) -> tuple[str, ...]:
    """Components whose workload somebody scaled under the operator (#4420), in words."""
    if seen.not_ready is not None or seen.state != "successful":
        return ()
    return tuple(
        f"{one.name} has {one.counts.replicas} replicas, and {seen.name} asks for {seen.wanted(one)}: somebody has "
        f"changed the workload itself, which the operator does not take back; change {seen.name} instead"
        for one in seen.planned
        if one.counts is not None and one.counts.replicas != seen.wanted(one)
    )


def gpus_of(seen: Seen, given: Mapping[Role, int | None]) -> dict[str, int]:
    """What a replica of each component of workers holds: as the graph says, else as the options do (`given`)."""
    return {one.name: one.gpus if one.gpus is not None else given_for(one, given) or 0 for one in seen.workers}


def given_for(one: Component, given: Mapping[Role, int | None]) -> int | None:
    """The option for its role."""
    return given.get(Role.PREFILL if one.role is Role.PREFILL else Role.DECODE)

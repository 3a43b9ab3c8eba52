"""How long scaling really takes: from a worker's start until it serves, and from its drain until it is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import WorkerState
from dynamo_local.planner.values import Pool, WorkerPools

KEPT = 5
"""So many of the last ones count, by their median: one that was slow for a reason of its own changes little."""


class ScalingTimes:
    """The times of one fleet. A drain that was taken back, or a start that failed, does not count.

    `known` is the start-up time of earlier runs (None: unknown). It counts until this run has observed a start.
    `lead_times` are the seconds of each way to one more worker (`core.lead_times.OptionKind`).
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        known: Callable[[str], float | None] = lambda component: None,
        lead_times: Callable[[str], Mapping[str, float]] = lambda component: {},
    ) -> None:
        self._known = known
        self._lead_times = lead_times
        self._now_s = now_s
        self._began: dict[str, float] = {}
        self._starts: dict[str, deque[float]] = {}
        self._drains: dict[str, deque[float]] = {}

    def reported(self, pools: WorkerPools) -> WorkerPools:
        """The pools with the times of their components; None where none is known."""
        prefill = None if pools.prefill is None else self._pool(pools.prefill)
        return replace(pools, prefill=prefill, decode=self._pool(pools.decode))

    def start_up_s(self, component: str) -> float | None:
        """The start-up time of this run, or of earlier ones. None: unknown."""
        seen_s = _median(self._starts, component)
        return self._known(component) if seen_s is None else seen_s

    def _pool(self, pool: Pool) -> Pool:
        return replace(
            pool,
            start_up_s=self.start_up_s(pool.component),
            drain_s=_median(self._drains, pool.component),
            lead_times=self._lead_times(pool.component),
        )

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Note it, if a start or a drain begins or ends with it."""
        before, after = transition.before, transition.after
        if before is after:
            return
        name, component, now_s = transition.name, transition.component, self._now_s()
        began_s = self._began.pop(name, None)
        if after is WorkerState.STARTING or (after is WorkerState.DRAINING and before is WorkerState.READY):
            self._began[name] = now_s
        elif began_s is None:
            return
        elif before is WorkerState.STARTING and TRAITS[after].serves:
            self._starts.setdefault(component, deque(maxlen=KEPT)).append(now_s - began_s)
        elif before is WorkerState.DRAINING and after is WorkerState.EXITED:
            self._drains.setdefault(component, deque(maxlen=KEPT)).append(now_s - began_s)
        elif after is WorkerState.DRAIN_TIMED_OUT:
            self._began[name] = began_s
        elif before is WorkerState.DRAIN_TIMED_OUT:
            self._drains.setdefault(component, deque(maxlen=KEPT)).append(now_s - began_s)


def _median(found: Mapping[str, deque[float]], component: str) -> float | None:
    return median(found[component]) if component in found else None

"""The share of requests that kept both targets, of a run: the last minute, hour and day, and all of it.

Frontends count finished requests by outcome (`components.http_metrics`) and report the counters beside their load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.arbiter.metrics import PREFIX
from dynamo_local.core.traffic import KEPT, OUTCOMES, TARGET_PREFIX

WINDOWS_S: Mapping[str, float] = {"minute": 60.0, "hour": 3600.0, "day": 86400.0}
TOTAL = "total"
STEPS = 60
"""A window is exact to one of so many parts. So many sums are kept for each window."""

Counted = Counter[str]


class KeptTargets:
    """The outcomes of a run's requests. A frontend that was counted before this run saw it adds to the total alone."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, float]] = {}
        self._total: Counted = Counter()
        self._sums: dict[str, deque[tuple[float, Counted]]] = {name: deque() for name in WINDOWS_S}
        self._targets: dict[str, float] = {}

    def heard(self, reported: Mapping[str, Mapping[str, float]], now_s: float) -> None:
        """Add what the workers' counters say since the last call, by watcher name."""
        for worker, counters in reported.items():
            found = {name: counters[key] for name in OUTCOMES if (key := f"{TARGET_PREFIX}{name}") in counters}
            if not found:
                continue
            self._targets = {
                name: counters[key] for name in ("ttft_ms", "itl_ms") if (key := f"{TARGET_PREFIX}{name}") in counters
            }
            before = self._before.get(worker)
            if before is None:
                for _, counted in (pair for sums in self._sums.values() for pair in sums):
                    counted.update({name: int(value) for name, value in found.items()})
            elif any(found.get(name, 0.0) < value for name, value in before.items()):
                before = {}  # another process, which counts from 0
            more = {name: int(value - (before or {}).get(name, 0.0)) for name, value in found.items()}
            self._total.update(more)
            self._before[worker] = found
        for name, sums in self._sums.items():
            window_s = WINDOWS_S[name]
            if self._targets and (not sums or now_s - sums[-1][0] >= window_s / STEPS):
                sums.append((now_s, Counter(self._total)))
            while len(sums) > 1 and sums[1][0] <= now_s - window_s:
                sums.popleft()

    def status(self) -> dict[str, Any] | None:
        """`targets` in `dynamo status --json`. None: no frontend has targets."""
        if not self._targets:
            return None
        found = {name: _share(self._total - sums[0][1]) for name, sums in self._sums.items() if sums}
        targets = {name: self._targets.get(name) for name in ("ttft_ms", "itl_ms")}
        return {**targets, **found, TOTAL: _share(self._total)}

    def outcomes(self) -> Mapping[str, int]:
        """All requests of the run by outcome. Empty without targets."""
        return {name: self._total[name] for name in OUTCOMES} if self._targets else {}


def _share(counted: Counted) -> dict[str, Any]:
    """`share` is 0..1, and None where no request ended."""
    requests = counted.total()
    missed = {name: counted[name] for name in OUTCOMES if name != KEPT and counted[name]}
    share = counted[KEPT] / requests if requests else None
    return {"requests": requests, "kept": counted[KEPT], "share": share, "missed": missed}


class TargetMetrics(Collector):
    """The outcomes on `/metrics`. Without targets, or without requests in a window, there is no sample."""

    def __init__(self, registry: CollectorRegistry, kept: Callable[[], KeptTargets] = KeptTargets) -> None:
        self._kept = kept
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return _families(KeptTargets())

    def collect(self) -> Iterator[Metric]:
        return _families(self._kept())


def _families(kept: KeptTargets) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        f"{PREFIX}_target_requests",
        "Requests that ended, by outcome: kept (both targets), or the part of a request that missed one",
        labels=["outcome"],
    )
    for outcome, count in kept.outcomes().items():
        requests.add_metric([outcome], count)
    yield requests
    shares = GaugeMetricFamily(f"{PREFIX}_kept_targets", "Share of requests that kept both targets", labels=["window"])
    for window, found in (kept.status() or {}).items():
        if isinstance(found, dict) and found["share"] is not None:
            shares.add_metric([window], found["share"])
    yield shares

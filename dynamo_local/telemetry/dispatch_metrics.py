"""How workers dispatch requests, on `/metrics` and in words: where prompts were prefilled and why, how well estimates
held, what was put behind others or refused.

Workers count (`components.prefilling.counts`, `components.prefill_worker`) and tell `NAME`, `NAME.WAY` or
`NAME.WAY.WHY` beside their load. A name that is not known here, of a worker of another version, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.core.life.fleet import Fleet

PREFIX = "dynamo_dispatch"
_WORKER = ("component", "worker")


@dataclass(frozen=True, slots=True)
class _Family:
    """A counter of workers under another name, `labels` for what stands behind the name's dots."""

    name: str
    what: str
    labels: tuple[str, ...] = ()
    gauge: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "prefills": _Family(
        "prefills",
        "Decisions where to prefill, by way (local, remote) and why; came_back is a remote one that was done here "
        "after all",
        ("way", "why"),
    ),
    "fallbacks": _Family("fallbacks", "Decisions that slo was to make, and the seed's rule made"),
    "refused": _Family("refused", "Requests that a worker refused because too many wait there (429 if all do)"),
    "deferred": _Family("deferred", "Prefills put behind all others, because they cannot keep their target any more"),
    "late_prefills": _Family("late_prefills", "Prefills that were pulled from behind all others"),
    "first_tokens": _Family("first_tokens", "First tokens that came as was decided, by way", ("way",)),
    "first_token_estimated_s": _Family(
        "first_token_estimated_seconds", "Sum of the times to first token that were estimated, by way", ("way",)
    ),
    "first_token_seen_s": _Family(
        "first_token_seen_seconds", "Sum of the times to first token that came of it, by way", ("way",)
    ),
    "first_token_error_s": _Family(
        "first_token_error_seconds", "Sum of the distances between the two, by way", ("way",)
    ),
    "correction": _Family(
        "correction", "By what estimates are multiplied, from what was seen: local, remote, itl", ("of",), gauge=True
    ),
}


@dataclass(frozen=True, slots=True)
class Told:
    """The counters of one worker."""

    component: str
    worker: str
    counters: Mapping[str, float]


def dispatch_now(told: Mapping[str, Mapping[str, float]], fleet: Fleet) -> tuple[Told, ...]:
    """Those of the workers that there are."""
    return tuple(
        Told(fleet.workers[name].component, name, counters) for name, counters in told.items() if name in fleet.workers
    )


class DispatchMetrics(Collector):
    """Registered as the collector of its families. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], tuple[Told, ...]] = tuple) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """All families, without samples."""
        return _families(())

    def collect(self) -> Iterator[Metric]:
        """With what workers told last."""
        return _families(self._now())


def _families(told: tuple[Told, ...]) -> Iterator[Metric]:
    for key, family in _FAMILIES.items():
        kind: Any = GaugeMetricFamily if family.gauge else CounterMetricFamily
        metric = kind(f"{PREFIX}_{family.name}", family.what, labels=[*_WORKER, *family.labels])
        for each in told:
            for name, value in each.counters.items():
                head, *values = name.split(".")
                if head == key and len(values) == len(family.labels):
                    metric.add_metric([each.component, each.worker, *values], value)
        yield metric

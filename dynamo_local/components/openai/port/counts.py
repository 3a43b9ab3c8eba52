"""The metrics of several processes as one page: what Prometheus reads on a port that they share.

Whoever is scraped adds up what all of them tell. A sum must never fall, or `rate()` takes it for a restart and counts
everything again: so what a process told last is kept beside it, counts on when the process is gone, and is what its
successor of the same name begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dynamo_local.components.http_metrics import PREFIX

NOW = frozenset({f"{PREFIX}_inflight_requests", f"{PREFIX}_queued_requests"})
"""Families that say what is, not what was: of a process that is gone they say nothing."""

Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True):
    """One metric: its samples' values by sample name and labels, in the page's order."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, Labels, float]]


Counts = list[Family]


def counts_of(registry: CollectorRegistry) -> Counts:
    """What the registry's page would tell."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, tuple(sample.labels.items()), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def ended(counts: Counts) -> Counts:
    """What still counts once the process is gone."""
    return [family for family in counts if family.name not in NOW]


def added(many: Iterable[Counts]) -> Counts:
    """The sums."""
    families: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for counts in many:
        for family in counts:
            _, sums = families.setdefault(family.name, (family, {}))
            for name, labels, value in family.samples:
                sums[name, labels] = sums.get((name, labels), 0.0) + value
    return [
        Family(family.name, family.kind, family.text, [(*key, value) for key, value in sums.items()])
        for family, sums in families.values()
    ]


def page(counts: Counts) -> bytes:
    """In the text format."""
    registry = CollectorRegistry()
    registry.register(_Told(counts))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for family in self._counts:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric

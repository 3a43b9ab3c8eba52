"""Lead times and spares on `/metrics`. What was never measured has no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.core.lead_times import LeadTimes
from dynamo_local.telemetry.metrics import PREFIX


@dataclass(frozen=True, slots=True)
class LeadsNow:
    """What is known at a scrape. `spares` by engine and state."""

    leads: LeadTimes = field(default_factory=LeadTimes)
    spares: Mapping[tuple[str, str], int] = field(default_factory=dict)


class LeadMetrics(Collector):
    """Registered as the collector of its families. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], LeadsNow] = LeadsNow) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """All families, without samples."""
        return _families(LeadsNow())

    def collect(self) -> Iterator[Metric]:
        """With what is known now."""
        return _families(self._now())


def _families(now: LeadsNow) -> Iterator[Metric]:
    leads = GaugeMetricFamily(
        f"{PREFIX}_lead_seconds",
        "From a decision until the worker served, by the way it came about; of this host's latest",
        labels=["component", "rung", "statistic"],
    )
    kept = GaugeMetricFamily(
        f"{PREFIX}_lead_samples", "How many leads those statistics are of", labels=["component", "rung"]
    )
    for component, rung, _, lead in now.leads.rows():
        for statistic, value in (("last", lead.last_s), ("median", lead.median_s), ("p90", lead.p90_s)):
            leads.add_metric([component, rung, statistic], value)
        kept.add_metric([component, rung], lead.count)
    yield leads
    yield kept
    spares = GaugeMetricFamily(f"{PREFIX}_spares", "Processes of which workers can be made", labels=["engine", "state"])
    for (engine, state), count in now.spares.items():
        spares.add_metric([engine, state], count)
    yield spares

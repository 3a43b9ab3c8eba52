"""The planner's plugins on `/metrics`, under Dynamo's names. A plugin's samples go with it.

One name departs: Dynamo's `tick_lag_seconds` is `plugin_tick_lag_seconds` here: the planner's own ticks have had that
name for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.planner.pipeline.circuit import GAUGE
from dynamo_local.planner.plugins.counting import BOUNDS_S, COUNTERS, HISTOGRAMS, Counters
from dynamo_local.planner.plugins.registry import PluginRow
from dynamo_local.telemetry.planner_gauges import PREFIX

TOLD = {
    "plugin_evaluations_total": "Calls of a plugin, by what it answered",
    "plugin_held_over_total": "Ticks in which a plugin's last answer stood, because it was not due",
    "reject_short_circuited_total": "Ticks that a plugin ended by rejecting",
    "tick_skipped_total": "Ticks in which a plugin was not due",
    "tick_requires_unsatisfied_total": "Ticks in which a plugin was not asked, because what it requires was not there",
    "reconcile_clamped_total": "Targets that a bound of a plugin changed while proposals were reconciled",
    "constrain_capped_total": "Targets that a plugin capped",
    "tick_timeout_total": "Ticks in which plugins together took too long",
    "plugin_latency_seconds": "How long a plugin took to answer",
    "tick_duration_seconds": "How long the plugins of a tick took together",
    "plugin_circuit_state": "0: the plugin is asked; 1: it is left alone after failures; 0.5: it is tried again",
    "plugin_cache_age_seconds": "How old a plugin's answer is that still stands",
    "plugin_tick_lag_seconds": "By how much a plugin was asked late",
    "plugin_override_active": "1 for the kinds of targets that a plugin's last answer had",
}


@dataclass(frozen=True, slots=True)
class PluginsNow:
    """The plugins at a scrape, and what was counted of them."""

    rows: tuple[PluginRow, ...] = ()
    counters: Counters = field(default_factory=Counters)


class PluginMetrics(Collector):
    """Registered as the collector of its families. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], PluginsNow] = PluginsNow) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """All families, without samples."""
        return _families(PluginsNow())

    def collect(self) -> Iterator[Metric]:
        """With what is known now."""
        return _families(self._now())


def _families(now: PluginsNow) -> Iterator[Metric]:
    for name, labels in COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}_{name.removesuffix('_total')}", TOLD[name], labels=labels)
        for values, total in now.counters.totals[name].items():
            counter.add_metric(values, total)
        yield counter
    for name, labels in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=labels)
        for values, took in now.counters.durations[name].items():
            bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
            histogram.add_metric(values, list(zip(bounds, accumulate(took.buckets), strict=True)), took.sum_s)
        yield histogram
    yield from _of_rows(now.rows)


def _of_rows(rows: tuple[PluginRow, ...]) -> Iterator[Metric]:
    circuit, age, lag = (
        GaugeMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=["plugin_id"])
        for name in ("plugin_circuit_state", "plugin_cache_age_seconds", "plugin_tick_lag_seconds")
    )
    name = "plugin_override_active"
    active = GaugeMetricFamily(f"{PREFIX}_{name}", TOLD[name], labels=["plugin_id", "stage", "override_type"])
    for row in rows:
        circuit.add_metric([row.plugin_id], GAUGE[row.circuit_state])
        lag.add_metric([row.plugin_id], row.tick_lag_seconds)
        if row.cache_age_seconds is not None:
            age.add_metric([row.plugin_id], row.cache_age_seconds)
        for kind in row.override_types:
            active.add_metric([row.plugin_id, row.plugin_type, kind], 1.0)
    yield from (circuit, age, lag, active)

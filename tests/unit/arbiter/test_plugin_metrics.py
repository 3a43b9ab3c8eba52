"""Plugins on `/metrics`: counters, durations and circuits under Dynamo's names, gone with the plugin."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.planner_metrics import TOLD, PluginMetrics, PluginsNow
from dynamo_local.planner.plugins.registration import CircuitState
from dynamo_local.planner.plugins.registry import COUNTERS, HISTOGRAMS, Counters, PluginRow
from tests.tools.scraped import Samples, by_label, samples

ROW = PluginRow(
    plugin_id="office",
    plugin_type="propose",
    priority=5,
    version="1",
    protocol_version="1.0",
    transport="grpc",
    endpoint="unix:///x",
    origin="gateway",
    circuit_state=CircuitState.HALF_OPEN,
    evaluations_total=3,
    last_call_seconds_ago=1.0,
    cache_age_seconds=None,
    tick_lag_seconds=0.25,
    override_types=("SET",),
    trouble=None,
)


def scraped(counters: Counters, *rows: PluginRow) -> Samples:
    """The page's samples."""
    registry = CollectorRegistry()
    PluginMetrics(registry, lambda: PluginsNow(rows, counters))
    return samples(generate_latest(registry).decode())


def test_what_was_counted_is_shown_with_its_labels() -> None:
    counters = Counters()
    for result in ("accept", "accept", "error"):
        counters.add("plugin_evaluations_total", "office", "propose", result)
    counters.add("tick_timeout_total")
    found = scraped(counters)
    assert by_label(found, "dynamo_planner_plugin_evaluations_total") == {
        ("office", "accept", "propose"): 2,  # a page has labels in the order of their names
        ("office", "error", "propose"): 1,
    }
    assert found["dynamo_planner_tick_timeout_total", ()] == 1


def test_durations_are_cumulated_up_to_each_bound() -> None:
    counters = Counters()
    for seconds in (0.0005, 0.02, 60.0):
        counters.took("tick_duration_seconds", seconds)
    found = scraped(counters)
    name = "dynamo_planner_tick_duration_seconds"
    assert [found[f"{name}_bucket", (bound,)] for bound in ("0.001", "0.025", "30", "+Inf")] == [1, 2, 2, 3]
    assert (found[f"{name}_count", ()], round(found[f"{name}_sum", ()], 4)) == (3, 60.0205)


def test_a_plugin_s_state_is_shown_and_a_cache_that_it_has_not_is_absent() -> None:
    found = scraped(Counters(), ROW)
    assert found["dynamo_planner_plugin_circuit_state", ("office",)] == 0.5
    assert found["dynamo_planner_plugin_tick_lag_seconds", ("office",)] == 0.25
    assert by_label(found, "dynamo_planner_plugin_override_active") != {}
    assert ("dynamo_planner_plugin_cache_age_seconds", ("office",)) not in found


def test_a_plugin_that_left_has_no_samples() -> None:
    counters = Counters()
    counters.add("plugin_evaluations_total", "office", "propose", "accept")
    counters.took("plugin_latency_seconds", 0.1, "office", "propose")
    counters.forget("office")
    assert scraped(counters) == {}


def test_every_counter_and_histogram_is_told_of() -> None:
    assert {*COUNTERS, *HISTOGRAMS} <= set(TOLD)

"""How workers dispatch requests, on `/metrics`: by worker, way and reason, and nothing that is not known."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.metrics import DispatchMetrics, WorkerCounters
from dynamo_local.components.remote_prefill import DispatchCounts
from dynamo_local.core.routing.estimates import Targets, Timing, Why
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.profile.interpolation import FixedModel
from tests.tools.scraped import Samples, by_label, samples


def scraped(*told: WorkerCounters) -> Samples:
    """The page's samples."""
    registry = CollectorRegistry()
    DispatchMetrics(registry, lambda: told)
    return samples(generate_latest(registry).decode())


def test_all_that_a_decode_worker_tells_has_a_family() -> None:
    counts = DispatchCounts(side=DecodeSide(Timing(FixedModel(0.1, 10.0, 100_000)), Targets(2.0, 0.05)))
    counts.decided(remote=True, why=Why.FEWER_MISSES)
    counts.decided(remote=False, why=Why.QUEUE_UNKNOWN, fallback=True)
    counts.came_back()
    reported = counts.status()
    found = scraped(WorkerCounters("VllmWorker", "dynamo_VllmWorker", reported))
    assert len(found) == len(reported)
    assert by_label(found, "dynamo_dispatch_prefills_total") == {
        ("VllmWorker", "remote", "fewer_misses", "dynamo_VllmWorker"): 1,
        ("VllmWorker", "local", "queue_unknown", "dynamo_VllmWorker"): 1,
        ("VllmWorker", "local", "came_back", "dynamo_VllmWorker"): 1,
    }
    assert by_label(found, "dynamo_dispatch_fallbacks_total") == {("VllmWorker", "dynamo_VllmWorker"): 1}


def test_what_a_prefill_worker_tells_is_shown_beside_it() -> None:
    counters = {"deferred": 3.0, "late_prefills": 2.0}
    found = scraped(WorkerCounters("PrefillWorker", "dynamo_PrefillWorker", counters))
    assert by_label(found, "dynamo_dispatch_deferred_total") == {("PrefillWorker", "dynamo_PrefillWorker"): 3}
    assert by_label(found, "dynamo_dispatch_late_prefills_total") == {("PrefillWorker", "dynamo_PrefillWorker"): 2}


def test_counters_of_another_version_are_left_out() -> None:
    assert scraped(WorkerCounters("W", "w", {"novel": 1.0, "prefills": 2.0, "refused.more": 3.0})) == {}

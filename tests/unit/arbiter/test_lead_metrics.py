"""Lead times and spares as `/metrics` shows them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.lead_times import LeadTimeMetrics, LeadTimesNow
from dynamo_local.core.lead_times import LeadTimes, Rung


def test_each_rung_that_was_measured_has_its_statistics_and_no_other_a_sample() -> None:
    """This run's and this host's together; what was never measured is absent, not 0 (lesson 14)."""
    leads = LeadTimes(host={"VllmWorker": {Rung.COLD: [30.0, 50.0]}})
    for seconds in (0.2, 0.1, 0.3):
        leads = leads.noted(Rung.FLIP_TO_DECODE, "VllmWorker", seconds)
    leads = leads.noted(Rung.COLD, "VllmWorker", 40.0)
    registry = CollectorRegistry()
    LeadTimeMetrics(registry, lambda: LeadTimesNow(leads, {("vllm", "warm"): 2}))

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"dynamo_arbiter_{name}", labels)

    def lead(rung: str, statistic: str) -> float | None:
        return sample("lead_seconds", component="VllmWorker", rung=rung, statistic=statistic)

    assert [lead("flip_to_decode", each) for each in ("last", "median", "p90")] == [0.3, 0.2, 0.3]
    assert [lead("cold", each) for each in ("last", "median", "p90")] == [40.0, 40.0, 50.0]
    assert sample("lead_samples", component="VllmWorker", rung="cold") == 3
    assert sample("spares", engine="vllm", state="warm") == 2
    assert lead("wake_1", "median") is None
    assert b"flip_to_prefill" not in generate_latest(registry)


def test_the_families_are_there_before_anything_was_measured() -> None:
    registry = CollectorRegistry()
    LeadTimeMetrics(registry)
    assert b"# TYPE dynamo_arbiter_lead_seconds gauge" in generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LeadTimeMetrics(registry)

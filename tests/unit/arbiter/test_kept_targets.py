"""The share of requests that kept both targets: why others missed, windows, frontends that come and go, words."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from dynamo_local.arbiter.kept_targets import KeptTargets, TargetMetrics
from dynamo_local.core.traffic import Phases, kept_words, outcome_of

TARGETS = {"targets.ttft_ms": 500.0, "targets.itl_ms": 20.0}


def told(**outcomes: float) -> dict[str, float]:
    """A frontend's counters."""
    return TARGETS | {f"targets.{name}": value for name, value in outcomes.items()}


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "phases", "outcome"),
    [
        (0.4, 0.01, None, "kept"),
        (0.4, None, None, "kept"),
        (0.4, 0.03, None, "decoded"),
        (0.9, 0.03, None, "unknown"),
        (0.9, 0.01, Phases(0.1, 0.1), "waited"),
        (0.9, 0.03, Phases(0.6, 0.1), "prefilled"),
        (0.9, 0.01, Phases(0.1, 0.7), "handed_off"),
    ],
)
def test_the_longest_part_of_a_late_first_token_is_why_it_missed(
    ttft_s: float, itl_s: float | None, phases: Phases | None, outcome: str
) -> None:
    assert outcome_of(ttft_s, itl_s, (0.5, 0.02), phases) == outcome
    assert outcome_of(ttft_s, itl_s, (None, None), phases) == "kept"


def test_windows_forget_and_the_total_does_not() -> None:
    kept = KeptTargets()
    kept.heard({"f": told(kept=0)}, 0.0)
    for at_s in range(1, 121):
        kept.heard({"f": told(kept=at_s, waited=min(at_s, 30))}, float(at_s))
    found = kept.status()
    assert found is not None
    assert found["minute"] == {"requests": 60, "kept": 60, "share": 1.0, "missed": {}}
    assert found["total"] == {"requests": 150, "kept": 120, "share": 0.8, "missed": {"waited": 30}}
    assert (found["hour"], found["ttft_ms"], found["itl_ms"]) == (found["total"], 500.0, 20.0)


def test_a_share_of_no_requests_is_unknown() -> None:
    kept = KeptTargets()
    assert kept.status() is None
    assert list(kept_words(kept.status())) == []
    kept.heard({"f": told(kept=0)}, 0.0)
    found = kept.status()
    assert found is not None
    assert found["total"]["share"] is None
    assert list(kept_words(found)) == ["kept both targets: no request has ended yet"]


def test_an_adopted_frontend_counts_in_the_total_alone_and_a_restarted_one_from_0() -> None:
    kept = KeptTargets()
    kept.heard({"f": told(kept=100)}, 0.0)
    kept.heard({"f": told(kept=101), "late": told(kept=50, failed=50)}, 2.0)
    kept.heard({"f": told(kept=3), "late": told(kept=50, failed=51)}, 4.0)
    found = kept.status()
    assert found is not None
    assert found["minute"] == {"requests": 5, "kept": 4, "share": 0.8, "missed": {"failed": 1}}
    assert found["total"]["requests"] == 205
    (words,) = kept_words(found)
    assert words.startswith("kept both targets: 80.00 % of 5 requests in the last minute, ")
    assert words.endswith("75.12 % of 205 requests in all; of those that missed, 51 failed")


def test_memory_is_bounded() -> None:
    kept = KeptTargets()
    for at_s in range(0, 200_000, 5):
        kept.heard({"f": told(kept=at_s)}, float(at_s))
    assert all(len(sums) <= 62 for sums in kept._sums.values())


def test_metrics_have_no_sample_without_targets() -> None:
    registry, kept = CollectorRegistry(), KeptTargets()
    TargetMetrics(registry, lambda: kept)
    assert registry.get_sample_value("dynamo_arbiter_target_requests_total", {"outcome": "kept"}) is None
    kept.heard({"f": told(kept=0, waited=0)}, 0.0)
    kept.heard({"f": told(kept=3, waited=1)}, 1.0)
    assert registry.get_sample_value("dynamo_arbiter_target_requests_total", {"outcome": "waited"}) == 1
    assert registry.get_sample_value("dynamo_arbiter_kept_targets", {"window": "minute"}) == 0.75

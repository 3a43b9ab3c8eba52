"""The last minute of each component: counted by workers, heard once a second, shown as rates and percentiles."""

from __future__ import annotations

import pytest

from dynamo_local.core.served import BOUNDS_S, MAX_COUNTERS, LastMinute, Served, rebinned

A, B = ("Decode", "ns_Decode"), ("Decode", "ns_Decode_1")


def serve(served: Served, ttft_s: float = 0.2, gap_s: float = 0.01, tokens: int = 11) -> Served:
    """One more request."""
    served.first(ttft_s, 1)
    for _ in range(tokens - 1):
        served.more(gap_s, 1)
    served.ended()
    return served


def test_rates_and_percentiles_are_of_the_last_minute_and_of_all_workers() -> None:
    minute, first, second = LastMinute(), Served(), Served()
    for at_s in range(121):
        slow = at_s > 60  # the first minute's latencies are forgotten
        serve(first, 0.2 if slow else 9.0)
        serve(second, 0.2 if at_s % 5 else 4.0, 0.01 if at_s % 5 else 0.1)
        minute.heard({A: first.counters(), B: second.counters()}, float(at_s))
    found = minute.figures("Decode", 120.5)
    assert found is not None
    assert (found["seconds"], found["requests_per_s"], found["tokens_per_s"]) == (60.0, 2.0, 22.0)
    assert found["ttft_ms"] == {"p50": pytest.approx(200, rel=0.08), "p95": pytest.approx(4000, rel=0.13)}
    assert found["itl_ms"] == {"p50": pytest.approx(10, rel=0.08), "p95": pytest.approx(100, rel=0.13)}


def test_tokens_that_come_together_share_the_time_between() -> None:
    minute, served = LastMinute(), Served()
    minute.heard({A: served.counters()}, 0.0)
    served.first(0.1, 1)
    served.more(0.4, 8)
    minute.heard({A: served.counters()}, 1.0)
    found = minute.figures("Decode", 1.0)
    assert found is not None
    assert found["itl_ms"]["p50"] == pytest.approx(50, rel=0.13)


def test_what_is_not_known_is_none_and_what_is_idle_is_zero() -> None:
    minute, served = LastMinute(), Served()
    assert minute.figures("Decode", 0.0) is None
    minute.heard({A: serve(served).counters()}, 0.0)
    assert minute.figures("Decode", 0.0) is None, "requests from before this arbiter have no rate"
    minute.heard({A: served.counters()}, 1.0)
    idle = minute.figures("Decode", 1.0)
    nothing = {"p50": None, "p95": None}
    rates = {"seconds": 1.0, "requests_per_s": 0.0, "tokens_per_s": 0.0}
    assert idle == {**rates, "ttft_ms": nothing, "itl_ms": nothing}
    assert minute.figures("Decode", 10.0) is None, "it is silent"
    assert minute.figures("Other", 1.0) is None


def test_a_restarted_worker_counts_from_zero_and_a_new_one_brings_no_past() -> None:
    minute, served = LastMinute(), serve(serve(Served()))
    minute.heard({A: served.counters()}, 0.0)
    minute.heard({A: serve(Served()).counters(), B: served.counters()}, 10.0)
    found = minute.figures("Decode", 10.0)
    assert found is not None
    assert found["requests_per_s"] == 0.1


def test_memory_is_bounded() -> None:
    served = Served()
    for bound_s in (0.0, *BOUNDS_S, 1e6):
        served.first(bound_s, 1)
        served.more(bound_s, 1)
    assert len(served.counters()) == MAX_COUNTERS


def test_histograms_of_other_programs_keep_their_percentiles_as_far_as_they_tell() -> None:
    minute = LastMinute()
    minute.heard({A: {"requests": 0, "tokens": 0}}, 0.0)
    buckets = [(0.1, 0.0), (0.25, 90.0), (0.5, 100.0), (float("inf"), 100.0)]
    minute.heard({A: {"requests": 100, "tokens": 0, **rebinned("ttft", buckets)}}, 1.0)
    found = minute.figures("Decode", 1.0)
    assert found is not None
    assert 100 <= found["ttft_ms"]["p50"] <= 250 <= found["ttft_ms"]["p95"] <= 500.1

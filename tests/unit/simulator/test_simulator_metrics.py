"""Metrics of small runs that can be added up by hand."""

from __future__ import annotations

import pytest

from dynamo_local.simulator.fleet import FleetPoint, RoleCount
from dynamo_local.simulator.metrics import gpu_seconds, measure, percentile, spread
from dynamo_local.simulator.options import Slo
from tests.fakes.planner.twins import options, requests, run


def test_one_request_on_an_aggregated_worker() -> None:
    """100 tokens of prompt take 10 ms, the two tokens after the first 10 ms each: done after 30 ms on one GPU."""
    found = measure(run(options(0, 1), requests((0.0, 100, 3))), Slo())
    assert (found.requests, found.completed, found.dropped) == (1, 1, 0)
    assert found.ttft_ms.mean == pytest.approx(10.0)
    assert found.itl_ms.p99 == pytest.approx(10.0)
    assert found.duration_s == pytest.approx(0.03)
    assert found.goodput_rps == pytest.approx(1 / 0.03)
    assert found.gpu_hours == pytest.approx(0.03 / 3600)
    assert (found.scale_actions, found.remote_prefills, found.output_tokens) == (0, 0, 3)


def test_one_request_through_a_prefill_worker() -> None:
    """Prefill there (10 ms), a hand-over of 5 ms, one decode pass for the last prompt token: first token at 25 ms."""
    twin = options(1, 1, sim={"kv_transfer_latency_s": 0.005})
    found = measure(run(twin, requests((0.0, 100, 3))), Slo())
    assert found.ttft_ms.mean == pytest.approx(25.0)
    assert found.itl_ms.mean == pytest.approx(10.0)
    assert found.duration_s == pytest.approx(0.045)
    assert found.gpu_hours == pytest.approx(2 * 0.045 / 3600)
    assert found.remote_prefills == 1


def test_attainment_is_a_share_of_all_requests_dropped_ones_too() -> None:
    """One in time, one late because it waits its turn, one that fits no model: a third."""
    twin = options(0, 1, sim={"max_num_seqs": 1, "max_model_len": 500})
    run_ = run(twin, requests((0.0, 100, 3), (0.0, 100, 3), (0.0, 499, 2)))
    found = measure(run_, Slo(ttft_ms=20.0))
    assert (found.completed, found.dropped) == (2, 1)
    assert run_.jobs[2].dropped == "longer than max_model_len"
    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput_rps == pytest.approx(1 / found.duration_s)


def test_attainment_needs_both_targets_of_the_request_itself() -> None:
    """Each request's own mean gap counts; a request of one token has none, and so holds any ITL target."""
    trace = requests((0.0, 100, 11), (0.05, 500, 2), (1.0, 100, 1))
    run_ = run(options(0, 1), trace)
    gaps_ms = [None if job.itl_s is None else job.itl_s * 1000 for job in run_.jobs]
    # The second's prompt (50 ms) shares a pass with a token of the first: ten gaps of 10 ms and 50 more.
    assert gaps_ms == [pytest.approx(15.0), pytest.approx(10.0), None]
    assert measure(run_, Slo(itl_ms=12.0)).attainment == pytest.approx(2 / 3)
    assert measure(run_, Slo(itl_ms=15.1)).attainment == 1.0
    assert measure(run_, Slo(ttft_ms=9.0, itl_ms=99.0)).attainment == 0.0
    assert measure(run_, Slo()).attainment == 1.0


def test_gpu_seconds_count_from_the_first_arrival_to_the_last_completion() -> None:
    none = RoleCount()
    points = [FleetPoint(at_s, none, none, held) for at_s, held in ((0.0, 2), (10.0, 5), (15.0, 3), (50.0, 8))]
    assert gpu_seconds(points, 20.0) == 10 * 2 + 5 * 5 + 5 * 3
    assert gpu_seconds(points, 12.0) == 10 * 2 + 2 * 5
    assert gpu_seconds([], 12.0) == 0.0


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    found = spread([4.0, 1.0, 2.0])
    assert (found.mean, found.p50, found.p99) == (pytest.approx(7 / 3), 2.0, 4.0)
    assert spread([]).mean is None

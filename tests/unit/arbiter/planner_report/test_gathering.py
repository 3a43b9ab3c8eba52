"""A log of any length becomes few points; GPU-hours, forecasts and targets are counted over all decisions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dynamo_local.arbiter.planner_report_data import POINTS_MAX, Point, ReportData, collect
from dynamo_local.planner.values import Prediction, Traffic
from tests.fakes.planner.logged_lines import BEGAN_S, DECODE, PREFILL, WINDOW_S, line


def window(number: int, came: float, expected: float, **options: Any) -> dict[str, Any]:
    """A window in which so many requests came, and the forecast that was made at its end."""
    traffic = Traffic(number * WINDOW_S, WINDOW_S, num_req=came, isl=100.0, osl=10.0, ttft_ms=came)
    return line(number, traffic=traffic, prediction=Prediction(expected, 100.0, 10.0), **options)


def point(number: int, **figures: float) -> Point:
    """One decision."""
    return Point(BEGAN_S + number, 1, dict(figures), Counter(dict.fromkeys(figures, 1)), number / 3600)


def test_a_forecast_is_compared_with_the_window_that_it_was_made_for() -> None:
    found = collect([window(1, 180, 360), window(2, 180, 360), window(3, 540, 360)])
    error = found.errors["requests_per_second"]
    assert (error.windows, error.mean, error.bias) == (2, 1.0, 0.0)  # 2 expected, 1 came; 2 expected, 3 came
    assert error.share == pytest.approx(0.5)
    assert [one.figures.get("forecast_requests_per_second") for one in found.points] == [None, 2.0, 2.0]


def test_a_window_that_nobody_observed_is_not_compared() -> None:
    found = collect([window(1, 180, 360), window(3, 180, 360)])
    assert "requests_per_second" not in found.errors


def test_windows_within_their_targets_are_counted() -> None:
    found = collect([window(1, 300, 1), window(2, 301, 1), line(3, traffic=None)])
    assert (found.attained["ttft_ms"].within, found.attained["ttft_ms"].windows) == (1, 2)
    assert found.attained["itl_ms"].windows == 0


def test_gpu_hours_leave_out_the_time_in_which_nobody_planned() -> None:
    found = collect([line(1), line(2), line(100), line(101)])
    assert found.looked_s == 2 * WINDOW_S
    assert found.gpu_hours == pytest.approx(10 * 2 * WINDOW_S / 3600)


def test_steps_outcomes_and_rules_are_counted_and_strange_lines_left_out() -> None:
    found = collect([line(1, step=1), {"seq": 2, "inputs": {}}, {**line(3), "decision": None}, line(4)])
    assert (found.decisions, found.changed, dict(found.steps)) == (2, 1, {"committed": 1})
    assert found.rules == {(PREFILL, "no_change"): 2, (DECODE, "scale_up"): 1, (DECODE, "no_change"): 1}


@pytest.mark.parametrize("count", [1, POINTS_MAX - 1, POINTS_MAX, POINTS_MAX + 1, 10_007])
def test_points_are_few_and_stand_for_as_many_decisions_each(count: int) -> None:
    found = ReportData()
    for number in range(count):
        found.add(point(number, observed_ttft_ms=float(number), num_decode_replicas=number))
    assert len(found.points) <= POINTS_MAX
    assert sum(one.decisions for one in found.points) == count
    assert {one.decisions for one in found.points[:-1]} <= {found.per_point}
    assert found.points[-1].figures["num_decode_replicas"] == count - 1  # as the last of them has it
    mean = sum(one.figures["observed_ttft_ms"] * one.decisions for one in found.points) / count
    assert mean == pytest.approx((count - 1) / 2)


def test_a_mean_is_of_the_decisions_that_knew_it() -> None:
    both = point(1, observed_ttft_ms=10.0).joined(point(2)).joined(point(3, observed_ttft_ms=40.0))
    assert both.figures["observed_ttft_ms"] == 25.0

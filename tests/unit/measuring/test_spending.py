"""The budget is for all that a measurement does: what a slow start takes, the rest must do without."""

from __future__ import annotations

import pytest

from dynamo_local.measuring.profile import spending


def test_a_quarter_of_an_hour_is_not_exceeded_by_engines_that_take_long_to_start():
    """vLLM on a busy host: 100 s to start, and as long again for each role's one more worker. It was five minutes over
    its budget."""
    spent = spending(900.0, 100.0, [100.0, 90.0])
    assert spent.points_s + spent.trace_s + spent.actions_s == pytest.approx(800.0)
    assert spent.actions_s == 220.0
    assert spent.trace_s == pytest.approx(580.0 / 3)


def test_without_actions_two_thirds_are_for_the_points():
    assert spending(240.0, 0.0, ()).points_s == pytest.approx(160.0)
    assert spending(3600.0, 0.0, ()).trace_s == 300.0


@pytest.mark.parametrize("started_s", [16.0, 30.0, 500.0])
def test_a_start_longer_than_half_of_the_budget_leaves_the_other_half(started_s: float) -> None:
    spent = spending(30.0, started_s, [500.0])
    assert spent.points_s + spent.trace_s + spent.actions_s == pytest.approx(max(15.0, 30.0 - started_s))
    assert spent.points_s > spent.trace_s > 0.0
    assert spent.actions_s <= 5.0 + 1e-9

"""When a plugin is due, and what stands in between."""

from __future__ import annotations

import pytest

from dynamo_local.planner.plugins import registration as scheduling
from dynamo_local.planner.plugins.registration import Turn
from dynamo_local.planner.stages import Answer, HoldPolicy, Nothing, PluginSpec, Predicted, Stage
from dynamo_local.planner.values import Accept, ComponentTarget, Override, Prediction, Reject

EVERY_TICK = PluginSpec("a", Stage.PROPOSE)
MINUTE = PluginSpec("a", Stage.PROPOSE, interval_s=60.0)
HOLDS = PluginSpec("a", Stage.PROPOSE, interval_s=60.0, hold_policy=HoldPolicy.HOLD_LAST)
SEVEN = Override((ComponentTarget("decode", 7),), final=True)


def test_it_fires_first_one_whole_interval_after_its_registration() -> None:
    turn = scheduling.registered(100.0, 0.0, 0.0)
    assert next(now for now in range(100, 200, 10) if scheduling.is_due(turn, MINUTE, now)) == 160
    assert scheduling.is_due(turn, EVERY_TICK, 100.0)


def test_plugins_that_come_shortly_after_each_other_are_due_together() -> None:
    anchors = {scheduling.registered(now, 1000.3, 5.0).anchor_s for now in (1010.4, 1012.0, 1015.2)}
    assert sorted(anchors) == [pytest.approx(1010.3)] * len(anchors)


def test_a_tick_that_comes_a_little_early_counts() -> None:
    """Timers do not fire to the microsecond; a plugin of one minute must not be asked every 65 s."""
    assert scheduling.is_due(Turn(0.0), MINUTE, 59.99)
    assert not scheduling.is_due(Turn(0.0), MINUTE, 55.0)


def test_an_answer_moves_the_anchor_and_a_skipped_tick_does_not() -> None:
    turn = scheduling.answered(Turn(0.0), MINUTE, Accept(), 75.0)
    assert turn.anchor_s == 75.0
    assert not scheduling.is_due(turn, MINUTE, 130.0)
    assert scheduling.is_due(turn, MINUTE, 135.0)
    assert scheduling.lag_s(turn, MINUTE, 141.0) == pytest.approx(6.0)


def test_hold_last_repeats_the_override_without_its_final() -> None:
    held = scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0).held
    assert held == Override(SEVEN.targets)
    assert scheduling.answered(Turn(0.0), MINUTE, SEVEN, 60.0).held is None


def test_hold_last_repeats_a_prediction() -> None:
    said = Predicted(Prediction(num_req=1.0), final=True)
    assert scheduling.answered(Turn(0.0), HOLDS, said, 60.0).held == Predicted(Prediction(num_req=1.0))
    assert scheduling.answered(Turn(0.0), HOLDS, Predicted(), 60.0).held is None


@pytest.mark.parametrize("answer", [Accept(), Reject("no"), Nothing()])
def test_an_override_is_not_revived_after_a_later_answer(answer: Answer) -> None:
    """Dynamo 1.6.1 keeps it: seven, hold, seven, hold."""
    turn = scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0)
    assert scheduling.answered(turn, HOLDS, answer, 120.0).held is None


def test_what_is_forgotten_does_not_stand_and_its_turn_does_not_move() -> None:
    turn = scheduling.forgotten(scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0))
    assert turn == Turn(60.0)

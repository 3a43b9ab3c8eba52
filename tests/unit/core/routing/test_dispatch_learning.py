"""Tests what dispatch learns: lengths of answers, and by how much estimates err."""

from __future__ import annotations

import math

import pytest

from dynamo_local.core.routing.estimates import CORRECTION_MAX, AnswerLengths, Correction, Risk, Share


def test_lengths_that_were_seen_replace_what_was_believed() -> None:
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.ended(100)
    assert lengths.mean == 100
    assert lengths.ends_within(10, 89) == 0.0
    assert lengths.ends_within(10, 90) == 1.0


def test_an_answer_that_is_longer_than_all_may_end_at_any_time() -> None:
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.ended(100)
    assert lengths.ends_within(200, 50) == pytest.approx(0.25)


def test_only_the_last_lengths_count() -> None:
    lengths = AnswerLengths(kept=16)
    for tokens in [10] * 30 + [1000] * 16:
        lengths.ended(tokens)
    assert lengths.mean == 1000


def test_a_correction_follows_what_is_seen_within_its_bound() -> None:
    """A profile that is 30 % off is corrected; one that is ten times off is not believed to be that."""
    slow, broken = Correction(), Correction()
    for _ in range(200):
        slow.seen(1.3, 1.0)
        broken.seen(10.0, 1.0)
    assert slow.factor == pytest.approx(1.3, rel=0.01)
    assert broken.factor == pytest.approx(CORRECTION_MAX, rel=0.01)


@pytest.mark.parametrize(("observed", "estimated"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_what_is_no_duration_corrects_nothing(observed: float, estimated: float) -> None:
    """Missing is not zero, and zero is not a measurement here."""
    correction = Correction()
    correction.seen(observed, estimated)
    assert correction.factor == 1.0


def test_a_share_of_time_is_reached_and_forgotten() -> None:
    """What takes 30 % of the time is told as 30 % before long, and as nothing when it is over for long."""
    share = Share(over_s=5.0)
    assert share.value(0.0) == 0.0
    for second in range(60):
        share.add(0.3, float(second))
    assert share.value(60.0) == pytest.approx(0.3, abs=0.06)
    assert share.value(120.0) < 0.001


def test_a_risk_is_learned_from_estimates_that_came_as_near() -> None:
    """At first what is believed; estimates at 60 % of their bound that were kept say nothing of those at 110 %."""
    risk = Risk(lambda share: min(1.0, max(0.0, share)))
    assert risk.of(0.65) == pytest.approx(0.65)
    for _ in range(300):
        risk.seen(0.65, missed=False)
    assert risk.of(0.65) < 0.25
    assert risk.of(1.15) == 1.0
    for _ in range(300):
        risk.seen(0.65, missed=True)
    assert risk.of(0.65) > 0.9

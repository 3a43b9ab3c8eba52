"""How probably targets are missed."""

from __future__ import annotations

from dynamo_local.core.routing.estimates import (
    AnswerLengths,
    Risk,
    Stream,
    harm,
    likely_above,
    misses_first_token,
    misses_gap,
)

RISK = Risk(lambda share: likely_above(share, 1.0))


def all_of(tokens: int) -> AnswerLengths:
    """Every answer has so many tokens."""
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.ended(tokens)
    return lengths


def test_a_first_token_far_below_its_target_is_safe_and_far_above_lost() -> None:
    assert misses_first_token(0.5, 2.0, RISK) == 0.0
    assert 0.0 < misses_first_token(1.5, 2.0, RISK) < misses_first_token(2.0, 2.0, RISK) < 1.0
    assert misses_first_token(3.0, 2.0, RISK) == 1.0
    assert misses_first_token(0.1, 0.0, RISK) == 1.0
    assert misses_first_token(100.0, None, RISK) == 0.0


def test_a_stream_that_has_saved_time_bears_a_pause() -> None:
    """100 tokens at 10 ms with a target of 50: 4 s saved, so a pause of 3 s costs nothing."""
    stream = Stream(101, 0.0)
    assert misses_gap(stream, 1.0, 3.0, 0.01, 0.05, all_of(102)) == 0.0


def test_a_pause_is_made_up_for_by_further_tokens() -> None:
    stream = Stream(1, 0.0)
    assert misses_gap(stream, 0.0, 0.4, 0.01, 0.05, all_of(20)) == 0.0
    assert misses_gap(stream, 0.0, 0.4, 0.01, 0.05, all_of(5)) == 1.0


def test_a_stream_that_cannot_catch_up_is_lost_once_its_savings_are() -> None:
    saved, lost = Stream(101, 0.0), Stream(2, 0.0)
    assert misses_gap(saved, 1.0, 0.0, 0.1, 0.05, all_of(110)) == 0.0
    assert misses_gap(saved, 1.0, 0.0, 0.1, 0.05, all_of(1000)) == 1.0
    assert misses_gap(lost, 1.0, 0.0, 0.1, 0.05, all_of(1000)) == 1.0


def test_harm_counts_only_what_this_pause_adds() -> None:
    lost, fresh = Stream(3, 0.0), Stream(1, 10.0)
    lengths = all_of(5)
    assert harm([lost], 10.0, before_s=0.0, more_s=1.0, itl_s=0.01, target_s=0.05, lengths=lengths) == 0.0
    assert harm([fresh, lost], 10.0, before_s=0.0, more_s=1.0, itl_s=0.01, target_s=0.05, lengths=lengths) == 1.0
    assert harm([fresh], 10.0, before_s=0.0, more_s=1.0, itl_s=0.01, target_s=None, lengths=lengths) == 0.0

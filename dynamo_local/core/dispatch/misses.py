"""How probably a target is missed, and what a pause does to the streams that run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dynamo_local.core.dispatch.learning import AnswerLengths, Risk

SURE_BELOW, SURE_ABOVE = 0.4, 1.2
"""An estimate of a wait below the first share of a bound keeps it, one above the second breaks it."""
GAP_BELOW, GAP_ABOVE = 0.6, 1.2
"""The same for a gap between tokens, which is the mean of many."""


class Stream(NamedTuple):
    """An answer that runs: tokens so far (1 or more), and when the first came (seconds)."""

    generated: int
    first_s: float


def misses_first_token(estimated_s: float, left_s: float | None, risk: Risk) -> float:
    """How probably (0..1) a first token that is estimated to come in `estimated_s` comes later than in `left_s`.

    None: there is no target to miss.
    """
    if left_s is None:
        return 0.0
    return 1.0 if left_s <= 0.0 else risk.of(estimated_s / left_s)


def likely_above(estimated_s: float, bound_s: float) -> float:
    """How probably (0..1) what is estimated so turns out above a bound (above 0), before anything was seen of it.

    It rises slowly at first, and begins early: what waits in a queue is late more often than its mean says, because
    others join it at the same moment, and seldom early.
    """
    return _rising(estimated_s / bound_s, SURE_BELOW, SURE_ABOVE)


def gap_above(estimated_s: float, bound_s: float) -> float:
    """How probably (0..1) a stream whose gap is estimated so has a mean gap above a bound (above 0)."""
    return _rising(estimated_s / bound_s, GAP_BELOW, GAP_ABOVE)


def _rising(share: float, none: float, sure: float) -> float:
    return min(1.0, max(0.0, (share - none) / (sure - none))) ** 2


def misses_gap(
    stream: Stream, now_s: float, pause_s: float, itl_s: float, target_s: float, lengths: AnswerLengths
) -> float:
    """How probably (0..1) the mean gap of a stream is above `target_s` when it ends, if it pauses now for `pause_s` and
    then has a token every `itl_s`.

    Below the target each token makes up for `target_s - itl_s`: it misses only if it ends before it has caught up.
    Above it, each token costs as much: it keeps the target only if it ends before what it has saved is used up.
    """
    saved_s = target_s * (stream.generated - 1) - (now_s - stream.first_s) - pause_s
    gain_s = target_s - itl_s
    if gain_s > 0:
        return lengths.ends_within(stream.generated, -saved_s / gain_s) if saved_s < 0 else 0.0
    if saved_s <= 0:
        return 1.0
    return 0.0 if gain_s == 0 else 1.0 - lengths.ends_within(stream.generated, saved_s / -gain_s)


def harm(
    streams: Iterable[Stream],
    now_s: float,
    *,
    before_s: float,
    more_s: float,
    itl_s: float,
    target_s: float | None,
    lengths: AnswerLengths,
) -> float:
    """How many of the streams a pause of `more_s`, behind one of `before_s` that comes anyway, makes miss their target
    (expected, 0 or more). None: there is no target to miss."""
    if target_s is None or more_s <= 0:
        return 0.0
    total = 0.0
    for stream in streams:
        after = misses_gap(stream, now_s, before_s + more_s, itl_s, target_s, lengths)
        if after > 0.0:
            total += max(0.0, after - misses_gap(stream, now_s, before_s, itl_s, target_s, lengths))
    return total

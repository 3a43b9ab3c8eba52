"""What is learned while requests are served: how long answers are, and by how much estimates err."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

from dynamo_local.core.isotonic import isotonic

LENGTHS_KEPT = 512
"""Answers whose lengths are remembered."""
PRIOR_LENGTHS = (8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""What is believed of answers before any has ended; each real one puts one of these out."""

CORRECTION_MAX = 2.0
"""An estimate is never stretched to more than this, or pressed below its inverse: what is further off is no error of
the profile but something that it does not know."""
CORRECTION_WEIGHT = 0.05
"""Of one observation against all before it."""


RISK_BELIEF = 10.0
"""What is believed of a risk counts as much as so many estimates."""
RISK_KEEPS = 0.98
"""How much what was seen before counts when one more is seen: some fifty count."""


class AnswerLengths:
    """The lengths of the last answers. They say how probably one that has so many tokens ends soon."""

    def __init__(self, kept: int = LENGTHS_KEPT) -> None:
        self._kept = max(kept, len(PRIOR_LENGTHS))
        self._sorted = sorted(PRIOR_LENGTHS)
        self._order = deque(PRIOR_LENGTHS)
        self._prior = len(PRIOR_LENGTHS)

    def ended(self, tokens: int) -> None:
        """An answer has come to its end after so many tokens."""
        if tokens < 1:
            return
        if self._prior or len(self._order) >= self._kept:
            old = self._order.popleft()
            self._sorted.pop(bisect_right(self._sorted, old) - 1)
            self._prior = max(0, self._prior - 1)
        self._order.append(tokens)
        insort(self._sorted, tokens)

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        return math.fsum(self._sorted) / len(self._sorted)

    def ends_within(self, generated: int, more: float) -> float:
        """How probably (0..1) an answer of `generated` tokens so far ends before it has `more` further ones.

        One that is longer than all that were seen may end at any time: it is taken to go on for as long again.
        """
        if more <= 0:
            return 0.0
        longer = len(self._sorted) - bisect_right(self._sorted, generated)
        if not longer:
            return min(1.0, more / max(1, generated))
        ends = bisect_right(self._sorted, generated + more) - (len(self._sorted) - longer)
        return min(1.0, max(0.0, ends / longer))


class Correction:
    """By what estimates are to be multiplied: the smoothed quotient of what was seen and what was estimated, within
    `CORRECTION_MAX` and its inverse. 1.0 before the first observation."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """At least 1 / `CORRECTION_MAX`, at most `CORRECTION_MAX`."""
        return math.exp(self._log)

    def seen(self, observed_s: float, estimated_s: float) -> None:
        """This came of an (uncorrected) estimate; values that are no durations are left out."""
        if not (observed_s > 0 and estimated_s > 0 and math.isfinite(observed_s) and math.isfinite(estimated_s)):
            return
        bound = math.log(CORRECTION_MAX)
        ratio = min(bound, max(-bound, math.log(observed_s) - math.log(estimated_s)))
        self._log += (ratio - self._log) * CORRECTION_WEIGHT


class Risk:
    """How probably what is estimated as some share of a bound turns out above it: at first what is believed, then what
    was seen of estimates that came as near to theirs. It never falls as the share rises."""

    STEP = 0.1
    CENTRES = tuple(0.35 + 0.1 * number for number in range(10))

    def __init__(self, believed: Callable[[float], float]) -> None:
        self._believed = [believed(centre) for centre in self.CENTRES]
        self._seen = [0.0] * len(self.CENTRES)
        self._missed = [0.0] * len(self.CENTRES)
        self._curve = isotonic(self._believed)

    def seen(self, share: float, *, missed: bool) -> None:
        """An estimate of that share of its bound was missed, or kept."""
        place = min(len(self.CENTRES) - 1, max(0, round((share - self.CENTRES[0]) / self.STEP)))
        self._seen[place] = self._seen[place] * RISK_KEEPS + 1.0
        self._missed[place] = self._missed[place] * RISK_KEEPS + missed
        weights = [RISK_BELIEF + seen for seen in self._seen]
        rows = zip(self._believed, self._missed, weights, strict=True)
        shares = [(believed * RISK_BELIEF + missed) / weight for believed, missed, weight in rows]
        self._curve = isotonic(shares, weights)

    def of(self, share: float) -> float:
        """0..1, evenly between the centres of what is counted together."""
        place = (share - self.CENTRES[0]) / self.STEP
        if place <= 0:
            return self._curve[0] * max(0.0, share / self.CENTRES[0])
        if place >= len(self._curve) - 1:
            return self._curve[-1]
        low = int(place)
        return self._curve[low] + (self._curve[low + 1] - self._curve[low]) * (place - low)


class Mean:
    """A mean that forgets: the newest value counts `weight`. None before the first."""

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self.value: float | None = None

    def seen(self, value: float) -> None:
        """One more."""
        self.value = value if self.value is None else self.value + (value - self.value) * self._weight


class Share:
    """Which share of the time lately went into something: what is `over_s` seconds old counts a third as much."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._sum_s = 0.0
        self._at_s = -math.inf

    def add(self, took_s: float, now_s: float) -> None:
        """It took so long, until now."""
        self._sum_s = self._left_s(now_s) + took_s
        self._at_s = max(self._at_s, now_s)

    def value(self, now_s: float) -> float:
        """0..1."""
        return min(1.0, self._left_s(now_s) / self._over_s)

    def _left_s(self, now_s: float) -> float:
        return self._sum_s * math.exp(-max(0.0, now_s - self._at_s) / self._over_s) if self._sum_s else 0.0

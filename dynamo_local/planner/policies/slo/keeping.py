"""What was kept lately, and what waits: how far a price that looks at what is to come has gone wrong. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.readings import Reading
from dynamo_local.planner.values.requests import Ended

MEMORY_S = 900.0
"""Answers of so long ago count e⁻¹."""
PRIOR_ANSWERS = 1000.0
"""As if so many had been answered before, just as many of them late as the target allows."""
AIM = 0.35
"""It is aimed at so much of what the target lets be missed: what is to come is not known, and a share that only its
mean keeps is missed half of the time."""
EXPONENT, FACTOR_MAX = 0.5, 1.2
"""While less is missed than is aimed at, a price goes by the root of what may be missed over what was, up to this
factor. Up to 1.5 as it was, what a calm stretch had saved was spent on the first rise."""
EXPONENT_BELOW, FACTOR_MIN = 1.0, 0.25
"""While more is missed it goes by the ratio itself, down to this factor: forecasts, or the queueing twin, promise more
than comes true."""

REACH = 0.5
"""Where any fleet would miss so much of what the target lets be missed, the target is taken to be out of reach."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Answers of late; those of them that missed a target; and those that would have missed it with any fleet. All
    discounted by their age."""

    answers: float = 0.0
    missed: float = 0.0
    hopeless: float = 0.0

    def after(self, ended: Sequence[Ended], hopeless: float, span_s: float, ttft_s: float, itl_s: float) -> Kept:
        """With the answers of one more interval of `span_s`, of which any fleet would miss that share. One of which
        no latency is known says nothing of what was kept."""
        fades = math.exp(-span_s / MEMORY_S)
        known = [each for each in ended if each.ttft_s is not None or each.itl_s is not None]
        missed = sum((each.ttft_s or 0.0) > ttft_s or (each.itl_s or 0.0) > itl_s for each in known)
        return Kept(
            self.answers * fades + len(known),
            self.missed * fades + missed,
            self.hopeless * fades + hopeless * len(known),
        )

    def factor(self, target: float) -> float:
        """What a price is multiplied with: above 1 while less is missed, that more GPUs would have kept, than is aimed
        at, below 1 while more is. The more of what may be missed any fleet would miss, the less it goes below 1: where
        the target is out of reach no number of GPUs ends that, and a GPU is worth what it serves."""
        allowed = max(1e-4, 1.0 - target)
        prior = PRIOR_ANSWERS * allowed * AIM
        avoidable = max(0.0, self.missed - self.hopeless) + prior
        ratio = allowed * AIM * (self.answers + PRIOR_ANSWERS) / avoidable
        if ratio >= 1:
            return min(ratio**EXPONENT, FACTOR_MAX)
        reach = max(0.0, 1.0 - self.hopeless / (REACH * allowed * max(self.answers, 1.0)))
        return max(ratio ** (EXPONENT_BELOW * reach), FACTOR_MIN)


def clearing(reading: Reading, rate: float, ttft_s: float, within_s: float) -> float:
    """Requests per second, beyond those that come, that clear within `within_s` what waits too long already: more than
    come in `ttft_s`. 0 where it is not known what waits."""
    if isinstance(reading.queue, Missing):
        return 0.0
    waiting = (reading.queue or 0.0) + reading.kv.waiting
    return max(0.0, waiting - rate * ttft_s) / within_s

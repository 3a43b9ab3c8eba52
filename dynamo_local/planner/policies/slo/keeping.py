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
PRIOR_ANSWERS = 300.0
"""As if so many had been answered before, just as many of them late as the target allows."""
EXPONENT = 0.5
FACTOR_MAX = 1.5
"""A price goes by the root of what may be missed over what was, up to this factor."""


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
        """What a price is multiplied with: above 1 while less is missed, that more GPUs would have kept, than the
        target allows. Never below: where much is missed GPUs are dear, and are worth it or not by what they serve."""
        allowed = max(1e-4, 1.0 - target)
        avoidable = max(0.0, self.missed - self.hopeless) + PRIOR_ANSWERS * allowed
        ratio = allowed * (self.answers + PRIOR_ANSWERS) / avoidable
        return min(max(ratio**EXPONENT, 1.0), FACTOR_MAX)


def clearing(reading: Reading, rate: float, ttft_s: float, within_s: float) -> float:
    """Requests per second, beyond those that come, that clear within `within_s` what waits too long already: more than
    come in `ttft_s`. 0 where it is not known what waits."""
    if isinstance(reading.queue, Missing):
        return 0.0
    waiting = (reading.queue or 0.0) + reading.kv.waiting
    return max(0.0, waiting - rate * ttft_s) / within_s

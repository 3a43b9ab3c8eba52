"""What is expected of the rate at one lead, and how wrong such forecasts were. Pure; rates in requests per second.

Errors are kept of the square roots: a count's scatter grows with its root, so that errors at one level say something
about those at another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from dynamo_local.planner.policies.slo.experts import experts

SMOOTH_BINS = 3
"""A forecast is compared with the mean of so many bins around its time: what is shorter is the arrivals' pattern."""
DISCOUNT = 0.97
"""An expert's error of one bin ago counts so much of one of now."""
PAST_MAX = 240
AGE_BINS = 120.0
"""Errors of so many bins ago count e⁻¹."""
LIKE = 0.25
LIKE_TREND = 0.15
"""Errors at levels that differ by this share of the level count e^-½; so do those where the forecast went up, or down,
by so much more or less. A load that rises is missed otherwise than one that falls."""
SHARPNESS = 5.0
"""An expert whose loss is twice the best one's has e⁻⁵ of its voice: nearly equal ones are averaged, which halves what
each errs by itself."""
QUANTILES = (0.05, 0.2, 0.5, 0.8, 0.95)
WEIGHTS = (0.125, 0.225, 0.3, 0.225, 0.125)
PRIOR_COUNT = 2.0
PRIOR_SPREAD = 0.12
PRIOR = (-1.64, -0.84, 0.0, 0.84, 1.64)
"""Before there are errors of its own, as if that many forecasts had been wrong by this share of the root."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The rate is this (requests/s) with that probability."""

    rate: float
    weight: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of one lead, in bins. `asked` are forecasts (roots, one of each expert) whose time has not come yet, the oldest
    first; `past` are forecasts with their errors; `losses` are the experts' discounted squared errors."""

    lead_bins: int
    asked: tuple[tuple[float, ...], ...] = ()
    past: tuple[tuple[tuple[float, ...], float], ...] = ()
    losses: tuple[float, ...] = ()

    def after(self, newest_first: Sequence[float]) -> Outlook:
        """With one more bin, the first of these, and a new forecast of each expert."""
        found = experts(self.lead_bins)
        mean = sum(newest_first) / len(newest_first)
        # A window that is not full yet says nothing: the mean of what there is stands in.
        told = tuple(
            math.sqrt(expert(newest_first) if len(expert.weights) <= len(newest_first) else mean) for expert in found
        )
        asked = (*self.asked, told)
        past, losses = self.past, self.losses or (0.0,) * len(found)
        late = SMOOTH_BINS // 2
        if len(asked) > self.lead_bins + late:
            came = math.sqrt(sum(newest_first[:SMOOTH_BINS]) / min(SMOOTH_BINS, len(newest_first)))
            judged, asked = asked[0], asked[1:]
            past = (*past, (judged, came))[-PAST_MAX:]
            losses = tuple(DISCOUNT * loss + (came - root) ** 2 for loss, root in zip(losses, judged, strict=True))
        return replace(self, asked=asked, past=past, losses=losses)

    def voices(self) -> tuple[float, ...]:
        """The experts' shares in the forecast, by their losses; the best one's alone while none is known."""
        least = min(self.losses)
        if least <= 0:
            best = self.losses.index(least)
            return tuple(float(index == best) for index in range(len(self.losses)))
        shares = [math.exp(-SHARPNESS * (loss / least - 1)) for loss in self.losses]
        return tuple(share / sum(shares) for share in shares)

    def scenarios(self) -> tuple[Scenario, ...]:
        """The rate at the lead, after this many bins, with what it may be; empty before the first bin."""
        if not self.asked:
            return ()
        voices = self.voices()
        root = sum(map(mul, voices, self.asked[-1]))
        rise = root - self.asked[-1][0]
        unit = max(root, 1e-6)
        weighted = [(share * PRIOR_SPREAD * root, PRIOR_COUNT / len(PRIOR)) for share in PRIOR]
        for age, (told, came) in enumerate(reversed(self.past)):
            then = sum(map(mul, voices, told))
            level, trend = (then - root) / (LIKE * unit), (then - told[0] - rise) / (LIKE_TREND * unit)
            weighted.append((came - then, math.exp(-age / AGE_BINS - 0.5 * (level * level + trend * trend))))
        errors = _quantiles(sorted(weighted))
        return tuple(
            Scenario(max(0.0, root + error) ** 2, weight) for error, weight in zip(errors, WEIGHTS, strict=True)
        )


def _quantiles(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """Of ascending values with weights."""
    total = sum(weight for _, weight in weighted)
    found, seen, index = [], 0.0, 0
    for quantile in QUANTILES:
        while index < len(weighted) - 1 and seen + weighted[index][1] < quantile * total:
            seen += weighted[index][1]
            index += 1
        found.append(weighted[index][0])
    return found

"""The rate that is expected at one lead time, and the errors of such forecasts. Pure; rates in requests per second.

Errors are kept of the square roots: a count's scatter grows with its root, so that errors at one level say something
about those at another.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul

from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S
from dynamo_local.planner.queueing import Demand
from dynamo_local.planner.values import Ended

# --- experts
# Cheap experts that continue a rate: means of the last windows, straight lines and parabolas through them. Pure.

MEANS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
LINES = (0.5, 1.0, 2.0, 4.0)
PARABOLAS = (2.0, 4.0)
"""Windows in multiples of the lead. 0 is the shortest window, `SHORTEST` bins."""
SHORTEST = 3


@dataclass(frozen=True, slots=True)
class Expert:
    """A forecast is the sum of the last bins times their weights, the newest first."""

    name: str
    weights: tuple[float, ...]

    def __call__(self, newest_first: Sequence[float]) -> float:
        """The rate that it expects; never below 0."""
        return max(0.0, sum(map(mul, self.weights, newest_first)))


@lru_cache(maxsize=16)
def experts(lead_bins: int) -> tuple[Expert, ...]:
    """Those for a forecast so many bins ahead."""
    found = {}
    for kind, degree, windows in (("mean", 0, MEANS), ("line", 1, LINES), ("parabola", 2, PARABOLAS)):
        for window in windows:
            bins = max(SHORTEST + 2 * degree, round(window * lead_bins))
            found[f"{kind} of {bins}"] = _fit(bins, degree, lead_bins)
    return tuple(Expert(name, weights) for name, weights in found.items())


def _fit(bins: int, degree: int, lead_bins: int) -> tuple[float, ...]:
    """Least squares, evaluated `lead_bins` after the newest bin, as weights of the bins."""
    ages = [-age / bins for age in range(bins)]
    at = lead_bins / bins
    # Orthogonal polynomials over the bins: the fit is the sum of its projections.
    basis: list[list[float]] = []
    ahead: list[float] = []
    for power in range(degree + 1):
        column, value = [age**power for age in ages], at**power
        for other, there in zip(basis, ahead, strict=True):
            part = sum(map(mul, column, other))
            column = [one - part * two for one, two in zip(column, other, strict=True)]
            value -= part * there
        norm = sum(map(mul, column, column)) ** 0.5
        basis.append([one / norm for one in column])
        ahead.append(value / norm)
    return tuple(sum(column[age] * there for column, there in zip(basis, ahead, strict=True)) for age in range(bins))


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
STEADIEST = 0.5
"""However long answers take, so much of the spread stays: the level itself is not known."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The rate is this (requests/s) with that probability. `lasting` is that of the answers that run at once: where
    they take long, chance in the arrivals is averaged."""

    rate: float
    weight: float
    lasting: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecasts at one lead time, in bins. `requested` are forecasts (roots, one of each expert) that are not due
    yet, the oldest first; `past` are forecasts with their errors; `losses` are the experts' discounted squared
    errors."""

    lead_bins: int
    requested: tuple[tuple[float, ...], ...] = ()
    past: tuple[tuple[tuple[float, ...], float], ...] = ()
    losses: tuple[float, ...] = ()

    def after(self, newest_first: Sequence[float]) -> Outlook:
        """With one more bin, the first of these, and a new forecast of each expert."""
        found = experts(self.lead_bins)
        mean = sum(newest_first) / len(newest_first)
        # A window that is not full yet says nothing: the mean of what there is stands in.
        reported = tuple(
            math.sqrt(expert(newest_first) if len(expert.weights) <= len(newest_first) else mean) for expert in found
        )
        requested = (*self.requested, reported)
        past, losses = self.past, self.losses or (0.0,) * len(found)
        late = SMOOTH_BINS // 2
        if len(requested) > self.lead_bins + late:
            came = math.sqrt(sum(newest_first[:SMOOTH_BINS]) / min(SMOOTH_BINS, len(newest_first)))
            judged, requested = requested[0], requested[1:]
            past = (*past, (judged, came))[-PAST_MAX:]
            losses = tuple(DISCOUNT * loss + (came - root) ** 2 for loss, root in zip(losses, judged, strict=True))
        return replace(self, requested=requested, past=past, losses=losses)

    def voices(self) -> tuple[float, ...]:
        """The experts' shares in the forecast, by their losses; the best one's alone while none is known."""
        least = min(self.losses)
        if least <= 0:
            best = self.losses.index(least)
            return tuple(float(index == best) for index in range(len(self.losses)))
        shares = [math.exp(-SHARPNESS * (loss / least - 1)) for loss in self.losses]
        return tuple(share / sum(shares) for share in shares)

    def scenarios(self, answer_s: float = 0.0) -> tuple[Scenario, ...]:
        """The rate at the lead, after this many bins, with what it may be; empty before the first bin. An answer takes
        `answer_s` in the mean."""
        if not self.requested:
            return ()
        voices = self.voices()
        root = sum(map(mul, voices, self.requested[-1]))
        rise = root - self.requested[-1][0]
        unit = max(root, 1e-6)
        weighted = [(share * PRIOR_SPREAD * root, PRIOR_COUNT / len(PRIOR)) for share in PRIOR]
        for age, (reported, came) in enumerate(reversed(self.past)):
            then = sum(map(mul, voices, reported))
            level, trend = (then - root) / (LIKE * unit), (then - reported[0] - rise) / (LIKE_TREND * unit)
            weighted.append((came - then, math.exp(-age / AGE_BINS - 0.5 * (level * level + trend * trend))))
        steadier, middle = _steadier(weighted, answer_s)
        return tuple(
            Scenario(max(0.0, root + error) ** 2, weight, max(0.0, root + middle + steadier * (error - middle)) ** 2)
            for error, weight in zip(_quantiles(sorted(weighted)), WEIGHTS, strict=True)
        )


def _steadier(weighted: Sequence[tuple[float, float]], answer_s: float) -> tuple[float, float]:
    """The factor on the spread of errors with weights, for answers that take so long, and the middle of the errors.

    The root of a Poisson rate that is counted for T seconds has the variance 1 / 4T. Errors are of `SMOOTH_BINS`.
    """
    total = sum(weight for _, weight in weighted)
    middle = sum(error * weight for error, weight in weighted) / total
    spread = sum((error - middle) ** 2 * weight for error, weight in weighted) / total
    counted_s = SMOOTH_BINS * INTERVAL_S
    if answer_s <= counted_s or spread <= 0:
        return 1.0, middle
    chance = 0.25 / counted_s - 0.25 / answer_s
    return max(STEADIEST, math.sqrt(max(0.0, 1 - chance / spread))), middle


def _quantiles(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """The quantiles of ascending values with weights."""
    total = sum(weight for _, weight in weighted)
    found, seen, index = [], 0.0, 0
    for quantile in QUANTILES:
        while index < len(weighted) - 1 and seen + weighted[index][1] < quantile * total:
            seen += weighted[index][1]
            index += 1
        found.append(weighted[index][0])
    return found


# --- lengths
# The lengths of recent requests, and the bursts in which they came, as a `Demand`. Pure.

WINDOWS_S = (150.0, 600.0)
"""Lengths of the last minutes, and of the last ten: a mix that has just changed is half believed at once."""
REQUESTS = 400
"""A demand has so many requests."""
ENDED_MIN = 20
"""A window with fewer answers is filled up with earlier ones."""
SMOOTH_S = 30.0
"""The local rate, by which gaps are scaled, is over so many seconds."""
WEIGHT_MAX = 8.0


def demands(began: Sequence[float], ended: Sequence[Ended], now_s: float, known_s: float) -> tuple[Demand, ...]:
    """One for each of `WINDOWS_S`, the same one only once; none where too little is known. Both sequences ascend. All
    requests of the last `known_s` seconds are known."""
    if len(began) < 2 or not ended:
        return ()
    gaps = _repeated(_gaps(began[-REQUESTS - 1 :]))
    found: list[Demand] = []
    samples: list[Sequence[Ended]] = []
    for window_s in WINDOWS_S:
        first = next((index for index, each in enumerate(ended) if each.at_s > now_s - window_s), len(ended))
        sample = ended[min(first, max(0, len(ended) - ENDED_MIN)) :]
        if sample not in samples:
            samples.append(sample)
            found.append(_demand(gaps, sample, window_s, known_s))
    return tuple(found)


def _demand(gaps: Sequence[float], sample: Sequence[Ended], window_s: float, known_s: float) -> Demand:
    """The demand of these gaps, with lengths drawn from those of the answers of so many seconds."""
    # At first, a long answer is less likely to have begun and ended already than a short one.
    known_s = max(known_s, 1.0)
    window_s = min(window_s, known_s)
    floor_s = window_s / WEIGHT_MAX
    weights = list(accumulate([window_s / min(window_s, max(left, floor_s)) for left in _left(sample, known_s)]))
    last, total = len(sample) - 1, weights[-1]
    found = [bisect_right(weights, share * total) for share in _lots(len(gaps))]
    chosen = [sample[index if index < last else last] for index in found]
    return Demand(tuple(gaps), tuple([each.isl for each in chosen]), tuple([each.osl for each in chosen]))


@lru_cache(maxsize=4)
def _lots(count: int) -> tuple[float, ...]:
    """So many numbers from 0 to 1, one in each equal part, in an order by chance. They are always the same."""
    chance, seed = [], 12345
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        chance.append(seed / 2**64)
    order = sorted(range(count), key=chance.__getitem__)
    return tuple((number + chance[place]) / count for place, number in enumerate(order))


def _left(sample: Sequence[Ended], known_s: float) -> list[float]:
    """For each answer, in how many of the known seconds it may have begun: by `lasted_s`, which thousands of calls in
    the arbiter's loop would take too long."""
    return [
        known_s - ((each.ttft_s or 0.0) + (each.itl_s or 0.0) * (each.osl - 1 if each.osl > 1 else 0))
        for each in sample
    ]


def _repeated(gaps: list[float]) -> list[float]:
    """As many as a demand has."""
    return (gaps * (REQUESTS // len(gaps) + 1))[:REQUESTS]


def _gaps(times: Sequence[float]) -> list[float]:
    """The times between arrivals, each times the rate around it: one in the mean. A silence counts as `SMOOTH_S`: a
    night would make one burst of all that came around it."""
    half = SMOOTH_S / 2
    first_s, last_s, count = times[0], times[-1], len(times)
    gaps, low, high = [], 0, 0
    for before, at_s in pairwise(times):
        from_s, until_s = at_s - half, at_s + half
        while times[low] < from_s:
            low += 1
        while high < count and times[high] <= until_s:
            high += 1
        span_s = (until_s if until_s < last_s else last_s) - (from_s if from_s > first_s else first_s)
        gap_s = at_s - before if at_s - before < SMOOTH_S else SMOOTH_S
        gaps.append(gap_s * (high - low) / (span_s if span_s > 1e-3 else 1e-3))
    mean = sum(gaps) / len(gaps)
    # Rounded: an even load is the same demand again, whose answers are known.
    return [round(gap / mean, 4) for gap in gaps] if mean > 0 else [1.0] * len(gaps)

"""The lengths of recent requests, and the bursts in which they came, as a `Demand`. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.values.requests import Ended

WINDOWS_S = (150.0, 600.0)
"""Lengths of the last minutes, and of the last ten: a mix that has just changed is half believed at once."""
REQUESTS = 800
"""A demand has so many requests."""
ENDED_MIN = 20
"""A window with fewer answers is filled up with earlier ones."""
SMOOTH_S = 30.0
"""The local rate, by which gaps are scaled, is over so many seconds."""
WEIGHT_MAX = 8.0


def demands(began: Sequence[float], ended: Sequence[Ended], now_s: float) -> tuple[Demand, ...]:
    """One for each of `WINDOWS_S`, the same one only once; none where too little is known. Both sequences ascend."""
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
            found.append(_demand(gaps, sample, min(window_s, now_s - sample[0].at_s + sample[0].lasted_s)))
    return tuple(found)


def _demand(gaps: Sequence[float], sample: Sequence[Ended], window_s: float) -> Demand:
    """Of these gaps, with lengths drawn from those of the answers of so many seconds."""
    # A long answer that began within the window is less likely to have ended in it than a short one.
    window_s = max(window_s, 1.0)
    floor_s = window_s / WEIGHT_MAX
    weights = list(accumulate([window_s / (left if left > floor_s else floor_s) for left in _left(sample, window_s)]))
    last, total = len(sample) - 1, weights[-1]
    found = [bisect_right(weights, share * total) for share in _lots(len(gaps))]
    chosen = [sample[index if index < last else last] for index in found]
    return Demand(tuple(gaps), tuple([each.isl for each in chosen]), tuple([each.osl for each in chosen]))


@lru_cache(maxsize=4)
def _lots(count: int) -> tuple[float, ...]:
    """So many numbers from 0 to 1, by chance, but always the same ones."""
    found, seed = [], 12345
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(seed / 2**64)
    return tuple(found)


def _left(sample: Sequence[Ended], window_s: float) -> list[float]:
    """Of each answer, how long before the window's end it may have begun: by `lasted_s`, which thousands of calls in
    the arbiter's loop would take too long."""
    return [
        window_s - ((each.ttft_s or 0.0) + (each.itl_s or 0.0) * (each.osl - 1 if each.osl > 1 else 0))
        for each in sample
    ]


def _repeated(gaps: list[float]) -> list[float]:
    """As many as a demand has."""
    return (gaps * (REQUESTS // len(gaps) + 1))[:REQUESTS]


def _gaps(times: Sequence[float]) -> list[float]:
    """The times between arrivals, each times the rate around it: one in the mean."""
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
        gaps.append((at_s - before) * (high - low) / (span_s if span_s > 1e-3 else 1e-3))
    mean = sum(gaps) / len(gaps)
    # Rounded: an even load is the same demand again, whose answers are known.
    return [round(gap / mean, 4) for gap in gaps] if mean > 0 else [1.0] * len(gaps)

"""Repetitions of a measurement as one number and how sure it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table it is the normal distribution's within 5 %.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_NORMAL = 2.04


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of a point: milliseconds, on which worker, when (seconds since the run began), and what the engine
    really computed then: mean requests of a pass, and KV tokens that they attended to."""

    worker: str
    at_s: float
    value_ms: float
    requests: float = 1.0
    kv_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of `count` repetitions, with the half width of its 95 % confidence interval (infinite below two)."""

    mean: float
    half_width: float
    count: int

    @property
    def relative(self) -> float:
        """The half width as a share of the mean."""
        return self.half_width / self.mean if self.mean > 0 else math.inf


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of these, which are one or more and independent of each other, by Student's t."""
    count = len(values)
    if count < 2:
        return Interval(values[0], math.inf, count)
    t = _T[count - 2] if count - 2 < len(_T) else _T_NORMAL
    mean = fmean(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, t * deviation / math.sqrt(count), count)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def robust_mean(values: Sequence[float]) -> float:
    """The mean of those that are no further from the median than ten times the median distance.

    Of a hundred passes one that the host's scheduler held up for ten times as long says nothing of the engine.
    """
    middle = median(values)
    reach = 10 * median(abs(value - middle) for value in values)
    return fmean(value for value in values if abs(value - middle) <= max(reach, 0.02 * middle))

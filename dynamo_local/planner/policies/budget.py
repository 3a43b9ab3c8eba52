"""Floors and GPU budget, for both roles at once.

In prose:

* No role goes below its endpoint floor. Floors that need more than the budget win: a fleet is never scaled to 0
  because it costs too much. The configuration refuses such floors, but a budget may be lowered at run time.
* The fleet never exceeds `gpus_max`. A larger demand is cut in proportion: prefill first, decode gets the rest, and
  prefill gets what decode leaves.
* A cut never makes a role larger than its claim. It makes a role smaller only if the role's own claim is smaller: at
  the maximum there are only whole swaps (guard hold).
* No reduction goes below `gpus_min` (guard hold).
* A fleet outside of these bounds, or below an endpoint floor, is repaired at once, and if need be from the other role
  (reconcile).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """One role: replicas that serve or will, replicas wanted, the floor, GPUs of each."""

    current: int
    wanted: int
    floor: int
    gpus: int


class Fit(enum.Enum):
    """The outcome of a claim."""

    AS_WANTED = enum.auto()
    GUARD_HOLD = enum.auto()
    RECONCILED = enum.auto()


class Granted(NamedTuple):
    """So many replicas, and why."""

    replicas: int
    fit: Fit


def granted(claims: Sequence[Claim], *, gpus_max: float, gpus_min: int) -> tuple[Granted, ...]:
    """For one role, or for prefill and decode."""
    gpus = [claim.gpus for claim in claims]
    held = _total([claim.current for claim in claims], gpus)
    below_floor = any(claim.current < claim.floor for claim in claims)
    short = held < gpus_min
    repairs = below_floor or held > gpus_max or short
    wanted = [max(claim.wanted, claim.floor) for claim in claims]
    if below_floor or held > gpus_max:
        least = [claim.floor for claim in claims]
    else:
        least = [max(claim.floor, min(claim.wanted, claim.current)) for claim in claims]
    counts = fitting(wanted, least, gpus, gpus_max)
    if counts is None:
        counts = [min(claim.current, low) for claim, low in zip(claims, least, strict=True)]
    _raised(counts, [claim.current for claim in claims], gpus, gpus_min, gpus_max)
    return tuple(_judged(claim, count, repairs) for claim, count in zip(claims, counts, strict=True))


def fitting(wanted: Sequence[int], least: Sequence[int], gpus: Sequence[int], gpus_max: float) -> list[int] | None:
    """`wanted`, cut to the budget, but not below `least`; None where these alone need more."""
    if _total(least, gpus) > gpus_max:
        return None
    if _total(wanted, gpus) <= gpus_max:
        return list(wanted)
    if len(wanted) == 1:
        return [_most(gpus_max, gpus[0], wanted[0])]
    total = _total(wanted, gpus)
    fits = _most(gpus_max - least[1] * gpus[1], gpus[0], wanted[0])
    prefill = max(least[0], min(fits, math.floor(wanted[0] * gpus_max / total)))
    decode = _most(gpus_max - prefill * gpus[0], gpus[1], wanted[1])
    prefill = _most(gpus_max - decode * gpus[1], gpus[0], wanted[0])
    return [prefill, decode]


def _most(space: float, gpus: int, wanted: int) -> int:
    """At most `wanted`, and what fits into that many GPUs."""
    return wanted if gpus <= 0 or space == math.inf else max(0, min(wanted, int(space // gpus)))


def _raised(counts: list[int], current: Sequence[int], gpus: Sequence[int], gpus_min: int, gpus_max: float) -> None:
    """Up to `gpus_min`, where what fits allows: what was to be taken away stays first, then the smaller role grows."""
    while (total := _total(counts, gpus)) < gpus_min:
        fits = [n for n in range(len(counts)) if gpus[n] > 0 and total + gpus[n] <= gpus_max]
        if not fits:
            return
        cut = [n for n in fits if counts[n] < current[n]]
        if cut:
            counts[max(cut, key=lambda n: current[n] - counts[n])] += 1
        else:
            counts[min(fits, key=lambda n: counts[n])] += 1


def _judged(claim: Claim, count: int, repairs: bool) -> Granted:
    if count == claim.wanted:
        return Granted(count, Fit.AS_WANTED)
    return Granted(count, Fit.RECONCILED if repairs and count != claim.current else Fit.GUARD_HOLD)


def _total(counts: Sequence[int], gpus: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, gpus, strict=True))

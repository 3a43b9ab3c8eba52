"""Floors and GPU budget, for both roles at once.

In prose:

* No role goes below its endpoint floor. Floors that need more than the budget win: a fleet is never scaled to 0
  because it costs too much (the configuration refuses such floors; a budget may be lowered at run time).
* Above `gpus_max` there is nothing: what is wanted is cut in proportion, prefill first, decode gets the rest, and what
  then is left over goes to prefill. A cut never makes a role larger than it was wanted, nor smaller than it is, unless
  by its own wish: at the maximum there are only whole swaps (guard hold).
* No reduction goes below `gpus_min` (guard hold).
* A fleet outside of these bounds, or below an endpoint floor, is repaired at once, and if need be from the other role
  (reconcile).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple


class Wish(NamedTuple):
    """One role: replicas that serve or will, replicas wanted, the floor, GPUs of each."""

    current: int
    wanted: int
    floor: int
    gpus: int


class Fit(enum.Enum):
    """What became of a wish."""

    AS_WANTED = enum.auto()
    GUARD_HOLD = enum.auto()
    RECONCILED = enum.auto()


class Granted(NamedTuple):
    """So many replicas, and why."""

    replicas: int
    fit: Fit


def granted(wishes: Sequence[Wish], *, gpus_max: float, gpus_min: int) -> tuple[Granted, ...]:
    """For one role, or for prefill and decode."""
    gpus = [wish.gpus for wish in wishes]
    held = _total([wish.current for wish in wishes], gpus)
    below_floor = any(wish.current < wish.floor for wish in wishes)
    short = held < gpus_min
    repairs = below_floor or held > gpus_max or short
    wanted = [max(wish.wanted, wish.floor) for wish in wishes]
    if below_floor or held > gpus_max:
        least = [wish.floor for wish in wishes]
    else:
        least = [max(wish.floor, min(wish.wanted, wish.current)) for wish in wishes]
    counts = fitting(wanted, least, gpus, gpus_max)
    if counts is None:
        counts = [min(wish.current, low) for wish, low in zip(wishes, least, strict=True)]
    _raised(counts, [wish.current for wish in wishes], gpus, gpus_min, gpus_max)
    return tuple(_judged(wish, count, repairs) for wish, count in zip(wishes, counts, strict=True))


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


def _most(room: float, gpus: int, wanted: int) -> int:
    """At most `wanted`, and what fits into that many GPUs."""
    return wanted if gpus <= 0 or room == math.inf else max(0, min(wanted, int(room // gpus)))


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


def _judged(wish: Wish, count: int, repairs: bool) -> Granted:
    if count == wish.wanted:
        return Granted(count, Fit.AS_WANTED)
    return Granted(count, Fit.RECONCILED if repairs and count != wish.current else Fit.GUARD_HOLD)


def _total(counts: Sequence[int], gpus: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, gpus, strict=True))

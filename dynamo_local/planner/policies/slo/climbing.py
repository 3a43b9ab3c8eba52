"""The ladder climbed: how many workers by slow rungs, who of them sleeps, and which role they have. Pure.

* **Cold starts** decide from what is expected at their lead, as if nobody slept. A sleeper that is woken is replaced by
  a start, so one that stands in for a worker that was given up, or not ordered, saves nothing, and is missing when a
  burst comes.
* **Wakes** bring sleepers for what is expected at their own, short lead, and was not foreseen.
* **Flips.** Where workers can take over each other's role, the other rungs decide how many there are, as if each split
  of them could be had, and the split follows what is expected next. A flip must gain more than it disturbs, and no
  decode worker goes whose streams the others could not bear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_local.planner.policies.slo.choosing import (
    Bounds,
    Expected,
    Fleet,
    Moment,
    filled,
    grown,
    plus,
    shrunk,
)
from dynamo_local.planner.policies.slo.ladder import COLD_START, FLIP, WAKE, Rung
from dynamo_local.planner.queueing.shares import Shares
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.readings import Reading

REACH = 4
"""Splits that differ by more flips than this are not looked at."""
FLIP_GAIN = 0.25
"""A flip must gain so much of a GPU's price: it is nearly free, and so would be done for nothing."""
KV_MOST = 0.8
"""No decode worker flips where the KV that is in use would fill more than this of those that stay."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A rung, what is expected at its lead, and of the moments until then."""

    rung: Rung
    at_lead: Moment
    until: Sequence[Moment]


@dataclass(frozen=True, slots=True)
class Quick:
    """What quick rungs have: workers that serve, sleepers, and workers that could take over the other role."""

    ready: Fleet = (0, 0)
    asleep: Fleet = (0, 0)
    flippable: Fleet = (0, 0)


@dataclass(frozen=True, slots=True)
class AnySplit:
    """A moment, served by the best split of as many workers: what flips can have."""

    moment: Moment
    around: Fleet
    floors: Fleet
    _known: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def scenarios(self) -> tuple[tuple[float, Shares], ...]:
        """The moment's."""
        return self.moment.scenarios

    def served(self, fleet: Fleet) -> float:
        """Of the best split of so many workers that a few flips can have."""
        total = sum(fleet)
        if total not in self._known:
            low = max(min(fleet[0], self.around[0] - REACH), min(self.floors[0], fleet[0]))
            high = min(max(fleet[0], self.around[0] + REACH), max(total - self.floors[1], fleet[0]))
            found = (self.moment.served((prefill, total - prefill)) for prefill in range(low, high + 1))
            self._known[total] = max(found)
        return self._known[total]


def quick(pools: WorkerPools, reading: Reading) -> Quick:
    """What these pools have. Needs a graph with prefill workers."""
    assert pools.prefill is not None
    prefill, decode = pools.prefill, pools.decode
    bears = decode.flippable
    while bears > 0 and not _bears(reading, decode.ready, bears):
        bears -= 1
    return Quick((prefill.ready, decode.ready), (prefill.asleep, decode.asleep), (prefill.flippable, bears))


def _bears(reading: Reading, ready: int, fewer: int) -> bool:
    """Whether the decode workers that stay can hold the KV of now; not where it is not known of each of them."""
    known = reading.kv.count >= ready and reading.kv.waiting == 0
    return known and ready > fewer and float(reading.kv.usage) / (ready - fewer) <= KV_MOST


def climbed(now: Fleet, ladder: Sequence[Ahead], has: Quick, gpu_price: float, bounds: Bounds) -> tuple[Fleet, int]:
    """The fleet that is worth its price, and how many decode workers of it come by flips (negative: prefill
    workers)."""
    rungs = {each.rung.name: each for each in ladder}
    slow, wake, flip = rungs[COLD_START], rungs.get(WAKE), rungs.get(FLIP)

    def seen(moment: Moment) -> Expected:
        return moment if flip is None else AnySplit(moment, now, bounds.floors)

    fleet = shrunk(now, [seen(each) for each in slow.until], gpu_price, bounds)
    if wake is not None and any(has.asleep):
        fleet = grown(fleet, now, wake.at_lead, gpu_price, wake.rung.order_price, bounds, has.asleep)
    goal = grown(fleet, now, seen(slow.at_lead), gpu_price, slow.rung.order_price, bounds)
    fleet = (max(fleet[0], goal[0]), max(fleet[1], goal[1]))
    fleet = filled(fleet, slow.at_lead, bounds)
    if flip is None:
        return fleet, 0
    flips = flipped(fleet, has, flip, gpu_price, bounds)
    return plus(fleet, (-flips, flips)), flips


def flipped(fleet: Fleet, has: Quick, flip: Ahead, gpu_price: float, bounds: Bounds) -> int:
    """So many prefill workers are to decode (negative: the other way), for what is expected next."""
    moments = (*flip.until, flip.at_lead)
    cost = FLIP_GAIN * gpu_price * max(bounds.gpus) * len(moments)
    found = []
    for flips in range(-min(REACH, has.flippable[1]), min(REACH, has.flippable[0]) + 1):
        ready = plus(has.ready, (-flips, flips))
        if min(ready) >= 1 and (flips == 0 or bounds.above_floors(plus(fleet, (-flips, flips)))):
            value = sum(each.served(ready) for each in moments) - cost * abs(flips)
            found.append((value, -abs(flips), flips))
    return max(found, default=(0.0, 0, 0))[2]

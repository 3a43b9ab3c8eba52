"""How many workers: what each would serve of what is expected, against its price. Pure.

A future moment has scenarios. Each has a rate, a probability, and the shares of requests that keep TTFT and ITL, by the
number of prefill and of decode workers. The *yield* of a fleet is the mean rate of requests that keep both.

* **Price.** A GPU is worth its place if it serves `cost_factor × COST_SHARE × (1 − target) / 1 %` of what a GPU of this
  deployment serves in the mean. So a target of 99 % asks for ten times as much as one of 99.9 %. Where the workers of
  now are overrun, the requests that come are not what their GPUs serve: then one of the best fleet is looked at.
* **Shrinking.** The workers of now serve all moments from now to the lead: one that goes cannot be back before. One
  stays if there is any stretch from now on in which it is worth more than its price, summed over that stretch.
* **Growing.** A worker that is ordered now serves from the lead time on. It must be worth the `order_price` of its
  scaling option.
* **Overload.** Where no fleet within the budget keeps half of the requests, all fleets would be worth nothing. Then the
  rule plans for a part of the load, which the budget can serve, and no worker leaves.

With more scaling options than cold starts: `climbing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_local.core import lead_times
from dynamo_local.planner.queueing import Shares
from dynamo_local.planner.values import Reading, WorkerPools

INTERVAL_S = 5.0
START_UP_S = 30.0
"""How long a start takes, until one was observed."""
COST_SHARE = 0.12
OVERRUN = 0.5
"""Workers that keep the targets of less than this share of the requests are overrun."""
PART_DOWN, PART_UP, PART_LEAST = 0.7, 1.1, 0.01
"""In each interval the part of an overload that is planned for changes by one of these factors. If not even the least
part can be served, the targets cannot be kept at all."""
EPSILON = 1e-9

Fleet = tuple[int, int]
"""Prefill and decode workers."""


COLD_START, WAKE, FLIP = "cold_start", "wake", "flip"
LEAD_CHANGED = 1.25
"""A lead is another one where it differs by this factor: what was learned of the old one holds until then."""
ORDER_PRICE: Mapping[str, float] = {COLD_START: 2.0, WAKE: 1.5, FLIP: 1.0}
"""The least worth of a GPU that is taken this way, in prices of a GPU that is held. The GPU is paid while it starts,
and may be needed for a short while only."""
LEAD_S: Mapping[str, float] = {WAKE: 5.0, FLIP: 1.0}
"""Until one was seen."""
WAKES = (lead_times.OptionKind.WAKE_1, lead_times.OptionKind.WAKE_2)
FLIPS = (lead_times.OptionKind.FLIP_TO_PREFILL, lead_times.OptionKind.FLIP_TO_DECODE)


@dataclass(frozen=True, slots=True)
class ScalingOption:
    """`lead_s`: from the decision to a worker that serves."""

    name: str
    lead_s: float

    @property
    def order_price(self) -> float:
        return ORDER_PRICE[self.name]

    def lead_bins(self, interval_s: float) -> int:
        """In intervals: a decision that is made now is in force at the lead, and the next one an interval later."""
        return max(1, math.ceil((self.lead_s + interval_s) / interval_s - 0.5))


def scaling_options_of(
    pools: WorkerPools, start_up_s: float, before: tuple[ScalingOption, ...] = ()
) -> tuple[ScalingOption, ...]:
    """The scaling options that there are, the slowest first, with leads as they were seen (the median of the last
    ones)."""
    known = {scaling_option.name: scaling_option.lead_s for scaling_option in before}
    found = {COLD_START: max((pool.start_up_s or 0.0 for pool in pools.all), default=0.0) or start_up_s}
    if WAKE in known or any(pool.asleep for pool in pools.all):
        found[WAKE] = _seen(pools, WAKES) or LEAD_S[WAKE]
    if FLIP in known or any(pool.flippable for pool in pools.all):
        found[FLIP] = _seen(pools, FLIPS) or LEAD_S[FLIP]
    return tuple(ScalingOption(name, _steady(lead_s, known.get(name))) for name, lead_s in found.items())


def _seen(pools: WorkerPools, ways: Sequence[str]) -> float:
    return max((pool.lead_times.get(way, 0.0) for pool in pools.all for way in ways), default=0.0)


def _steady(lead_s: float, before: float | None) -> float:
    if before is not None and before / LEAD_CHANGED <= lead_s <= before * LEAD_CHANGED:
        return before
    return lead_s


class Expected(Protocol):
    """A moment to come, as the choice sees it."""

    @property
    def scenarios(self) -> tuple[tuple[float, Shares], ...]: ...

    def served(self, fleet: Fleet) -> float: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The demand of one moment: `(rate × probability, shares)` of each scenario. The yield of a
    fleet is cached: the decisions of a whole lead time ask for the same fleets."""

    scenarios: tuple[tuple[float, Shares], ...]
    _known: dict[Fleet, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rate(self) -> float:
        """Requests per second, in the mean."""
        return sum(weight for weight, _ in self.scenarios)

    def served(self, fleet: Fleet) -> float:
        """Requests per second that keep both targets with these workers. A moment of many requests is one for prefill
        and decode alike, so what one role loses the other would mostly have lost, too: the smaller share counts."""
        known = self._known.get(fleet)
        if known is None:
            known = self._known[fleet] = self._served(fleet)
        return known

    def _served(self, fleet: Fleet) -> float:
        (prefill, decode), served = fleet, 0.0
        for weight, shares in self.scenarios:
            of_prefill, of_decode = shares.prefill, shares.decode
            one = of_prefill[prefill] if prefill < len(of_prefill) else of_prefill[-1]
            other = of_decode[decode] if decode < len(of_decode) else of_decode[-1]
            served += weight * (one if one < other else other)
        return served


@dataclass(frozen=True, slots=True)
class Bounds:
    """GPUs of a worker of either role, the fewest workers, and the most and the fewest GPUs of both."""

    gpus: Fleet
    floors: Fleet
    max_gpus: int
    min_gpus: int = 0

    def held(self, fleet: Fleet) -> int:
        """GPUs of these workers."""
        return fleet[0] * self.gpus[0] + fleet[1] * self.gpus[1]

    def fits(self, fleet: Fleet) -> bool:
        """Whether there may be so many."""
        return self.held(fleet) <= self.max_gpus

    def above_floors(self, fleet: Fleet) -> bool:
        """Whether there may be so few."""
        roles = fleet[0] >= self.floors[0] and fleet[1] >= self.floors[1]
        return roles and self.held(fleet) >= self.min_gpus


def price(target: float, cost_factor: float, mean_rate: float, mean_gpus: float) -> float:
    """Requests per second that a GPU must serve beyond what is served without it."""
    return cost_factor * COST_SHARE * max(1e-4, 1.0 - target) / 0.01 * mean_rate / max(mean_gpus, 1.0)


def overrun_yield(now: Fleet, moment: Moment, bounds: Bounds) -> float | None:
    """Requests per second that a GPU of the best fleet would serve, if the present workers are overrun: they serve less
    than `OVERRUN` of the demand. None if they are not overrun."""
    if moment.served(now) >= OVERRUN * moment.rate:
        return None
    prefills, decodes = (range(low, _enough(moment, role, low) + 1) for role, low in enumerate(bounds.floors))
    fleets = itertools.product(prefills, decodes)
    return max((moment.served(each) / bounds.held(each) for each in fleets if bounds.fits(each)), default=None)


def is_borne(now: Fleet, moment: Moment, bounds: Bounds) -> bool:
    """Whether these workers, or any others within the budget, keep the targets of `OVERRUN` of the demand."""
    enough = OVERRUN * moment.rate
    (prefill_gpus, decode_gpus), least = bounds.gpus, bounds.floors[0]
    most = (bounds.max_gpus - decode_gpus * bounds.floors[1]) // prefill_gpus if prefill_gpus else least
    fleets = ((n, (bounds.max_gpus - n * prefill_gpus) // decode_gpus) for n in range(least, most + 1))
    return moment.served(now) >= enough or any(moment.served(each) >= enough for each in fleets)


def borne_part(before: float, *, is_borne: bool) -> float:
    """The part of the load to plan for, after `before`: smaller until the budget can serve it, then larger again."""
    return min(1.0, before * PART_UP) if is_borne else max(PART_LEAST, before * PART_DOWN)


def plus(fleet: Fleet, more: Fleet) -> Fleet:
    """Both together."""
    return fleet[0] + more[0], fleet[1] + more[1]


def shrunk(now: Fleet, moments: Sequence[Expected], gpu_price: float, bounds: Bounds) -> Fleet:
    """As many fewer as are not worth their price in any part, from now on, of these moments."""
    fleet = now
    while True:
        fewer = [(fleet[0] - 1, fleet[1]), (fleet[0], fleet[1] - 1), (fleet[0] - 1, fleet[1] - 1)]
        for other in fewer:
            if bounds.above_floors(other) and not pays(fleet, other, moments, gpu_price, bounds):
                fleet = other
                break
        else:
            return fleet


def pays(fleet: Fleet, other: Fleet, moments: Sequence[Expected], gpu_price: float, bounds: Bounds) -> bool:
    """Whether `fleet` gains more over the smaller `other` than its price, in any stretch from now on."""
    saved, gained = gpu_price * (bounds.held(fleet) - bounds.held(other)), 0.0
    for each in moments:
        gained += each.served(fleet) - each.served(other) - saved
        if gained > 0:
            return True
    return False


def grown(
    fleet: Fleet,
    now: Fleet,
    moment: Expected,
    gpu_price: float,
    order_price: float,
    bounds: Bounds,
    most: Fleet | None = None,
) -> Fleet:
    """The best fleet at the scaling option's lead, not below `fleet`; those beyond `now` are ordered, `most` of them at
    most."""
    base, best, gain = moment.served(fleet), fleet, EPSILON
    for prefill in range(fleet[0], _enough(moment, 0, fleet[0]) + 1):
        for decode in range(fleet[1], _enough(moment, 1, fleet[1]) + 1):
            other = (prefill, decode)
            ordered = (max(0, prefill - now[0]), max(0, decode - now[1]))
            if not bounds.fits(other) or (most is not None and (ordered[0] > most[0] or ordered[1] > most[1])):
                break
            paid = bounds.held(other) - bounds.held(fleet) + (order_price - 1) * bounds.held(ordered)
            value = moment.served(other) - base - gpu_price * paid
            if value > gain:
                best, gain = other, value
    return best


def filled(fleet: Fleet, moment: Expected, bounds: Bounds) -> Fleet:
    """With as many more as there always are, each where it serves most."""
    while bounds.held(fleet) < bounds.min_gpus:
        steps = [step for step, gpus in (((1, 0), bounds.gpus[0]), ((0, 1), bounds.gpus[1])) if gpus]
        more = [other for other in (plus(fleet, step) for step in steps) if bounds.fits(other)]
        if not more:
            break
        fleet = max(more, key=moment.served)
    return fleet


def _enough(moment: Expected, role: int, least: int) -> int:
    """So many that more would not serve more."""
    most = least
    for _, shares in moment.scenarios:
        column = shares.decode if role else shares.prefill
        while most < len(column) - 1 and column[most] < column[-1] - EPSILON:
            most += 1
    return most


def swapped(fleet: Fleet, moments: Sequence[Expected], gpu_price: float, order_price: float, bounds: Bounds) -> Fleet:
    """At the budget: a worker of one role in place of one of the other, where that gains more than it costs."""
    if bounds.fits((fleet[0] + 1, fleet[1])) or bounds.fits((fleet[0], fleet[1] + 1)):
        return fleet
    cost = gpu_price * (order_price - 1) * max(bounds.gpus) * len(moments)
    found = [(0.0, fleet)]
    for other in ((fleet[0] + 1, fleet[1] - 1), (fleet[0] - 1, fleet[1] + 1)):
        if bounds.above_floors(other) and bounds.fits(other):
            found.append((sum(each.served(other) - each.served(fleet) for each in moments) - cost, other))
    return max(found)[1]


# --- climbing
# Choosing among the scaling options: how many workers start, which of them sleep, and which role they have. Pure.
#
# * **Cold starts** decide from the demand at their lead time, as if nobody slept. A start replaces a sleeper that is
#   woken. So a sleeper in place of a worker saves nothing, and is missing when a burst comes.
# * **Wakes** bring sleepers for the demand at their own, short lead time that the cold starts did not foresee.
# * **Flips.** If workers can take over each other's role, the other scaling options decide how many there are, as if
#   each split of them were possible. The split follows the next demand. A flip must gain more than it disturbs, and no
#   decode worker goes whose streams the others could not bear.

REACH = 4
"""Splits that differ by more flips than this are not looked at."""
FLIP_GAIN = 0.25
"""A flip must gain so much of a GPU's price: it is nearly free, and so would be done for nothing."""
KV_MOST = 0.8
"""No decode worker flips where the KV that is in use would fill more than this of those that stay."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A scaling option, what is expected at its lead, and of the moments until then."""

    scaling_option: ScalingOption
    at_lead: Moment
    until: Sequence[Moment]


@dataclass(frozen=True, slots=True)
class Quick:
    """The capacity of quick scaling options: workers that serve, sleepers, and workers that could take over the other
    role."""

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
        """Requests served by the best split of so many workers that a few flips can have."""
        total = sum(fleet)
        if total not in self._known:
            low = max(min(fleet[0], self.around[0] - REACH), min(self.floors[0], fleet[0]))
            high = min(max(fleet[0], self.around[0] + REACH), max(total - self.floors[1], fleet[0]))
            found = (self.moment.served((prefill, total - prefill)) for prefill in range(low, high + 1))
            self._known[total] = max(found)
        return self._known[total]


def quick(pools: WorkerPools, reading: Reading) -> Quick:
    """The capacity of these pools."""
    prefill, decode = pools.prefill, pools.decode
    if prefill is None:
        return Quick((0, decode.ready), (0, decode.asleep))
    bears = decode.flippable
    while bears > 0 and not _bears(reading, decode.ready, bears):
        bears -= 1
    return Quick((prefill.ready, decode.ready), (prefill.asleep, decode.asleep), (prefill.flippable, bears))


def _bears(reading: Reading, ready: int, fewer: int) -> bool:
    """Whether the decode workers that stay can hold the KV of now; not where it is not known of each of them."""
    known = reading.kv.count >= ready and reading.kv.waiting == 0
    return known and ready > fewer and float(reading.kv.usage) / (ready - fewer) <= KV_MOST


def climbed(now: Fleet, ahead: Sequence[Ahead], has: Quick, gpu_price: float, bounds: Bounds) -> tuple[Fleet, int]:
    """The fleet that is worth its price, and how many decode workers of it come by flips (negative: prefill
    workers)."""
    scaling_options = {each.scaling_option.name: each for each in ahead}
    slow, wake, flip = scaling_options[COLD_START], scaling_options.get(WAKE), scaling_options.get(FLIP)

    def seen(moment: Moment) -> Expected:
        return moment if flip is None else AnySplit(moment, now, bounds.floors)

    fleet = shrunk(now, [seen(each) for each in slow.until], gpu_price, bounds)
    if wake is not None and any(has.asleep):
        fleet = grown(fleet, now, wake.at_lead, gpu_price, wake.scaling_option.order_price, bounds, has.asleep)
    goal = grown(fleet, now, seen(slow.at_lead), gpu_price, slow.scaling_option.order_price, bounds)
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

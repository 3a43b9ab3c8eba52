"""The worth of each worker in the recorded past. Pure; numpy arrays are never changed in place.

The n-th worker of a role (its rank) is judged by itself. `queueing.misses` replays the requests that really came, and
says how many more would have been kept in each interval with the n-th worker than without it. The candidates of a rank
are its holds: how long the worker stays after the rule last wanted it.

* 0 s: the rule alone decides.
* Headroom: the worker is there as soon as the rule wants one worker less.
* Longer: the worker bridges lulls. This is ski rental, per worker, with the observed lulls in place of a worst case.
* Always, or never. "Always up to rank n, and never above" is a fixed fleet. So every fixed fleet is a candidate.

A worker that was away needs its lead time again. It is paid from its order on. The candidate with the most saved
requests, less the price of its GPU time, leads. Sums fade by `MEMORY_S`: the leader follows a load that changes.

Sources: convex demand splits into one ski rental per server (Lin, Wierman, Andrew, Thereska, "Dynamic right-sizing for
power-proportional data centers", INFOCOM 2011). A hold of one lead's loss is never worse than twice the best (Karlin,
Manasse, McGeoch, Owicki, 1994). The best candidate on fading sums is the leader of Herbster and Warmuth's shifting
experts (1998). It has no worst-case bound of its own; benchmarks.regret measures what it costs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo_local.planner.queueing import Misses, Past
from dynamo_local.planner.values import Ended, FixedFleet, Requests

HOLDS_S = (-math.inf, 0.0, 30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 0.0, 120.0, math.inf)
"""The candidates: how long a worker stays after it was last wanted. The first is never there, the last always."""
EARLIER = (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0)
"""A candidate with 1 is wanted as soon as the rule wants one worker less: headroom."""
FIRST_HOLD = 1
"""The candidate that leads until the past says otherwise."""
FIRST_BINS = 12.0
"""It is ahead by the price of a GPU for so many intervals: nobody leads by chance."""
NEVER_BINS = 36.0
"""And "never" is behind by so many: orders ahead of a rise look like waste until the rise has come."""
MEMORY_S = 5400.0
"""Requests and GPU time of so long ago count e⁻¹."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bin:
    """One interval of the past, judged. `wanted` is what the rule wanted then. `saved[n - 1]` are the requests that
    were kept with n workers, but not with one less. `missed` are those that any number of workers would have missed."""

    wanted: int
    saved: Floats
    missed: float


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of one role with all candidates. Arrays have a row for each rank, and a column for each candidate.

    `saved` are requests, `held` intervals of one worker. `saveable` and `missed` are requests that the largest fleet
    keeps and misses. `idle` is the number of intervals since a rank was last wanted; `away` those until it serves.
    `idle` and `wanted` have a column for each value of `EARLIER`.
    """

    saved: Floats
    held: Floats
    saveable: Floats
    missed: float
    idle: Floats
    there: NDArray[np.bool_]
    away: Floats
    wanted: Floats
    """When each rank was last wanted (planner's clock, seconds); not judged yet."""

    @classmethod
    def of(cls, workers_max: int) -> Ranks:
        """Without a past."""
        shape = (workers_max, len(HOLDS_S))
        there = np.zeros(shape, dtype=np.bool_)
        there[:, -1] = True
        none = np.full((workers_max, 2), np.inf)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(workers_max), 0.0, none, there, np.zeros(shape), -none)

    def after(self, one: Bin, lead_bins: int, bin_s: float) -> Ranks:
        """With one more interval of the past. A worker that was away serves `lead_bins` intervals after its order."""
        fades = self.fades(bin_s)
        idle = np.where(_wanted(len(self.idle), one.wanted), 0.0, self.idle + 1)
        there = idle[:, EARLIER] * bin_s <= np.asarray(HOLDS_S)
        away = np.where(there & ~self.there, float(lead_bins), np.maximum(self.away - 1, 0.0))
        serves = there & (away <= 0)
        return replace(
            self,
            saved=fades * self.saved + serves * one.saved[:, None],
            held=fades * self.held + there,
            saveable=fades * self.saveable + one.saved,
            missed=fades * self.missed + one.missed,
            idle=idle,
            there=there,
            away=away,
        )

    @staticmethod
    def fades(bin_s: float) -> float:
        """The part of a sum that remains after an interval of `bin_s` seconds."""
        return math.exp(-bin_s / MEMORY_S)

    def resized(self, workers_max: int) -> Ranks:
        """With so many ranks: the upper ones go, or come without a past."""
        none, kept = Ranks.of(workers_max), min(workers_max, len(self.idle))

        def joined(known: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate((known[:kept], new[kept:]))

        return Ranks(
            joined(self.saved, none.saved),
            joined(self.held, none.held),
            joined(self.saveable, none.saveable),
            self.missed,
            joined(self.idle, none.idle),
            joined(self.there, none.there),
            joined(self.away, none.away),
            joined(self.wanted, none.wanted),
        )

    def wants(self, workers: int, now_s: float) -> Ranks:
        """The rule wants so many workers now."""
        wanted = np.where(_wanted(len(self.wanted), workers), now_s, self.wanted)
        return replace(self, wanted=wanted)

    def leaders(self, bin_price: float) -> NDArray[np.intp]:
        """For each rank, its best candidate where a worker costs so many requests per interval."""
        value = self.saved - bin_price * self.held
        value[:, FIRST_HOLD] += bin_price * FIRST_BINS
        value[:, 0] -= bin_price * NEVER_BINS
        return np.argmax(value, axis=1)

    def avoidable(self, leaders: NDArray[np.intp]) -> float:
        """Requests that these candidates would have missed, and the largest fleet would have kept."""
        return float(np.sum(self.saveable - self.saved[np.arange(len(leaders)), leaders]))

    def held_now(self, leaders: NDArray[np.intp], now_s: float) -> int:
        """So many workers are held by these candidates."""
        since_s = now_s - self.wanted[np.arange(len(leaders)), np.asarray(EARLIER)[leaders]]
        return int(np.count_nonzero(since_s <= np.asarray(HOLDS_S)[leaders]))


def _wanted(ranks: int, workers: int) -> NDArray[np.bool_]:
    """Which ranks are wanted where the rule wants so many workers; and with one more."""
    return np.arange(ranks)[:, None] < np.array([[workers, workers + 1]])


def saved_by(misses: Sequence[Sequence[int]], workers_max: int) -> Floats:
    """Requests that each rank saves in each interval, by `Misses.prefill` or `Misses.decode`: a row for each rank.

    A rank saves no more than the one before it: where only several workers together save requests, each has its part.
    """
    counts = np.minimum(np.arange(workers_max + 1), len(misses) - 1)
    missed = np.array(misses, dtype=float)[counts]
    saved = np.maximum(missed[:-1] - missed[1:], 0.0)
    for at in np.flatnonzero((saved[1:] > saved[:-1]).any(axis=0)):
        saved[:, at] = _parted(saved[:, at])
    return saved


def _parted(column: Floats) -> Floats:
    """The nearest column that does not rise, with the same sum: neighbours that rise share what they have."""
    blocks: list[tuple[float, int]] = []
    for value in column:
        total, ranks = float(value), 1
        while blocks and blocks[-1][0] * ranks < total * blocks[-1][1]:
            more, others = blocks.pop()
            total, ranks = total + more, ranks + others
        blocks.append((total, ranks))
    return np.repeat([total / ranks for total, ranks in blocks], [ranks for _, ranks in blocks])


# --- The price of a GPU, by what the recorded past would have cost.

AIM = 0.7
"""The policy aims at this share of the misses that the target allows: the future is not the past."""
AIM_LEAST = 0.3
"""Misses that no fleet could avoid leave less of that; never less than this share of it."""
EASY_PRIOR = 200.0
"""Hopeless requests of the queueing model count as so many that were seen."""
PEAK_BINS = 6
"""Rates are compared over so many intervals: over one alone they are chance, and workers would come and go with it."""
BEYOND = 1.05
"""A load above the highest that was judged by this factor is a new one: no worker is unworthy of it."""
HOUR_S, DAY_S = 3600.0, 86_400.0
"""The sums of stretches are kept for so long."""
JUDGED_MIN = 300.0
"""Before so many requests were judged the price is that of a mean GPU."""
FACTORS = tuple(0.88**step for step in range(23))
"""Prices that are tried, in prices of a mean GPU: from one down to a sixteenth. A dearer one would save GPUs for as
long as nothing happens that the past has not seen."""

SETTLES_S = 1800.0
"""The price goes to the one that the past wants by 1 − e⁻¹ of the way in so long."""


def settled(before: float, wanted: float, lasted_s: float) -> float:
    """The price after so long. Both are in prices of a mean GPU.

    A price that jumps after a burst holds too many GPUs after it, and too few before the next one. The requests that a
    GPU saves should be worth the same at all times, as in a fixed fleet.
    """
    return wanted * (before / wanted) ** math.exp(-lasted_s / SETTLES_S)


# --- The recorded past: requests that ended, until they are judged.

STRETCH_S = 60.0
"""The past is judged in stretches of at least so long,"""
STRETCH_MAX_S = 180.0
"""and of at most so long."""
TURNED_EVERY_S = 600.0
"""A stretch is judged for the other shape of the graph as well, once in so long: that takes four times as long."""
FILL_S = 900.0
"""Requests of so long before fill the workers first, if answers take that long."""
FILL_MIN_S = 20.0
REQUESTS_MAX = 6000
"""A stretch has at most so many requests, with those that fill the workers. More would take the arbiter's loop too
long."""
RECORDED_MAX = 20_000
"""So many answers wait for their judgement at most."""
REQUESTS_PER_S = 60.0
"""At higher rates only a part of the past is judged: so many requests per second in the mean."""
LASTED_QUANTILE = 0.98
"""A moment is judged once this share of the answers takes less time than has passed since."""
LASTED_SAMPLE = 500
"""So many answers say how long one takes."""
DECISIONS_MAX = 1440
"""Two hours of decisions: a moment is judged when its answers have ended."""
STALE_S = 3600.0
"""A past of which nothing was judged for so long rules no more: perhaps requests are only counted now."""


def filling_s(lasted_s: float) -> float:
    """For how long requests fill the workers of a stretch, where answers take `lasted_s` at most. In seconds."""
    return min(max(lasted_s, FILL_MIN_S), FILL_S)


_ROW = attrgetter("at_s", "isl", "osl", "ttft_s", "itl_s")


@dataclass(frozen=True, slots=True)
class Ruled:
    """A decision of the rule: the workers of each role that it wanted, and those that served then. `gpus` are those of
    all processes, also of starting and leaving workers."""

    at_s: float
    wanted: tuple[int, int]
    ready: tuple[int, int]
    gpus: int


def past_of(came: Floats, judged_from_s: float, bin_s: float, bins: int, *, turned: bool = False) -> Past:
    """The past of these requests (rows of arrival, prompt and answer tokens; ascending), judged from then on.

    Its clock begins with the first of them.
    """
    if not len(came):
        return Past((), (), (), 0.0, bin_s, bins, turned)
    first_s = float(came[0, 0])
    isl, osl = (tuple(column.astype(np.int64).tolist()) for column in (came[:, 1], came[:, 2]))
    return Past(tuple((came[:, 0] - first_s).tolist()), isl, osl, judged_from_s - first_s, bin_s, bins, turned)


@dataclass(frozen=True, slots=True)
class Record:
    """`requests` that ended, a row each: arrival (planner's clock, seconds), tokens of prompt and answer, and 1 where a
    target was missed. `decisions` are the last ones of the rule. All before `judged_until_s` is judged. `asked` is the
    stretch that is being judged, with the requests of each of its intervals that missed a target."""

    judged_until_s: float
    requests: Floats = field(default_factory=partial(np.zeros, (0, 4)))
    decisions: tuple[Ruled, ...] = ()
    due_s: float = -math.inf
    asked: Past | None = None
    asked_from_s: float = 0.0
    asked_missed: tuple[int, ...] = ()
    turned_s: float = -math.inf
    """When a stretch was last judged for the other shape."""
    known_until_s: float = math.inf
    """Until then the requests are known."""

    def known(self, seen: Requests, bin_s: float) -> Record:
        """The requests of this interval are known. Time between it and the last one before is not judged: nobody knows
        who came."""
        judged_until_s = self.judged_until_s
        if seen.since_s > self.known_until_s + bin_s:
            judged_until_s = max(judged_until_s, seen.since_s)
        return replace(self, known_until_s=seen.at_s, judged_until_s=judged_until_s)

    def after(self, ended: Sequence[Ended], ttft_s: float, itl_s: float) -> Record:
        """With these answers. One of which no latency is known is left out: nobody knows when it came."""
        if not ended:
            return self
        # Columns, because a decision may have a thousand answers. An unknown latency becomes NaN.
        rows = np.array(list(map(_ROW, ended)), dtype=float)
        at_s, isl, osl, first_s, gap_s = rows[~np.isnan(rows[:, 3])].T
        osl, gap_s = np.maximum(osl, 1), np.nan_to_num(gap_s)
        came_s = at_s - (first_s + gap_s * (osl - 1))
        missed = (first_s > ttft_s) | (gap_s > itl_s)
        new = np.column_stack((came_s, isl, osl, missed))
        return replace(self, requests=np.concatenate((self.requests, new))[-RECORDED_MAX:])

    def decided(self, now_s: float, wanted: tuple[int, int], ready: tuple[int, int], gpus: int) -> Record:
        """The rule wants so many workers of each role, while so many serve, and so many GPUs are held."""
        return replace(self, decisions=(*self.decisions, Ruled(now_s, wanted, ready, gpus))[-DECISIONS_MAX:])

    def due(self, now_s: float, bin_s: float) -> bool:
        """Whether a stretch ended by `now_s` that is long enough to be judged."""
        return now_s >= self.due_s and now_s - self.judged_until_s >= STRETCH_S - bin_s

    def asking(self, now_s: float, lasted_s: float, bin_s: float) -> Record:
        """With the next stretch to be judged in `asked`; None where none is due. Answers take `lasted_s` at most."""
        until_s = now_s - lasted_s
        from_s = max(self.judged_until_s, until_s - STRETCH_MAX_S)
        if now_s < self.due_s or until_s - from_s < STRETCH_S - bin_s:
            return replace(self, asked=None)
        fill_s = filling_s(lasted_s)
        bins = int((until_s - from_s) // bin_s)
        until_s = from_s + bins * bin_s
        times = self.requests[:, 0]
        came = self.requests[(times >= from_s - fill_s) & (times < until_s)]
        if len(came) > REQUESTS_MAX:  # its last part alone, half of which may fill the workers
            span_s = (until_s - from_s + fill_s) * REQUESTS_MAX / len(came)
            bins = max(1, int((span_s - min(fill_s, span_s / 2)) // bin_s))
            from_s = until_s - bins * bin_s
            came = came[came[:, 0] >= until_s - span_s]
        came = came[np.argsort(came[:, 0], kind="stable")][-REQUESTS_MAX:]
        at = np.floor((came[:, 0] - from_s) / bin_s)
        missed = np.bincount(at[(came[:, 3] > 0) & (at >= 0) & (at < bins)].astype(np.intp), minlength=bins)
        turned = now_s - self.turned_s >= TURNED_EVERY_S
        return replace(
            self,
            turned_s=now_s if turned else self.turned_s,
            requests=self.requests[times >= until_s - min(2 * fill_s, FILL_S)],
            judged_until_s=until_s,
            due_s=now_s + len(came) / REQUESTS_PER_S,
            asked=past_of(came, from_s, bin_s, bins, turned=turned),
            asked_from_s=from_s,
            asked_missed=tuple(missed.tolist()),
        )

    def ruled_at(self, at_s: float) -> Ruled | None:
        """The last decision before that time; None before the first."""
        index = bisect_right(self.decisions, at_s, key=lambda each: each.at_s)
        return self.decisions[index - 1] if index else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A judged stretch of the past: its requests, those that missed a target, GPU-seconds of the workers that served,
    and the highest rate of `PEAK_BINS` intervals (requests/s).

    `fixed[role][n]` are the requests that n workers would have missed, had there been so many all the time. `turned`
    are those of the other shape of the graph, if that was judged.
    """

    until_s: float
    lasted_s: float
    requests: int
    missed: int
    gpu_s: float
    peak: float
    fixed: tuple[Floats, Floats]
    turned: tuple[Floats, Floats] | None = None

    def resized(self, workers_max: int) -> Stretch:
        """For so many workers. More than were judged would have missed as many as all of those."""
        counts = np.arange(workers_max + 1)

        def both(missed: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
            return missed[0][np.minimum(counts, len(missed[0]) - 1)], missed[1][np.minimum(counts, len(missed[1]) - 1)]

        return replace(self, fixed=both(self.fixed), turned=None if self.turned is None else both(self.turned))


def _summed(misses: Misses) -> tuple[Floats, Floats]:
    return np.array(misses.prefill, dtype=float).sum(axis=1), np.array(misses.decode, dtype=float).sum(axis=1)


def peak_rate(requests: Sequence[int], bin_s: float) -> float:
    """The highest rate (requests/s) over `PEAK_BINS` of these intervals, of `bin_s` seconds each."""
    bins = min(PEAK_BINS, len(requests))
    sums = [sum(requests[first : first + bins]) for first in range(len(requests) - bins + 1)]
    return max(sums) / (bins * bin_s)


def last_rate(rates: Sequence[float]) -> float:
    """The mean (requests/s) of the last `PEAK_BINS` rates, to be compared with `peak_rate`. The newest is the first."""
    return fmean(rates[:PEAK_BINS])


def fixed_fleet(stretches: Sequence[Stretch], gpus: tuple[int, int], most_gpus: int) -> FixedFleet | None:
    """Over these stretches; None with fewer than `JUDGED_MIN` requests. If no fleet keeps as much, the one that keeps
    most."""
    requests = sum(each.requests for each in stretches)
    if requests < JUDGED_MIN:
        return None
    lasted_s = sum(each.lasted_s for each in stretches)
    share = 1.0 - sum(each.missed for each in stretches) / requests
    fleet, kept, held = _cheapest([each.fixed for each in stretches], requests, gpus, most_gpus, share)
    own = sum(each.gpu_s for each in stretches) / 3600
    return FixedFleet(lasted_s / 3600, share, own, fleet, kept, held * lasted_s / 3600)


def _cheapest(
    missed: Sequence[tuple[Floats, Floats]], requests: int, gpus: tuple[int, int], most_gpus: int, share: float
) -> tuple[tuple[int, int], float, int]:
    """The fixed fleet with the fewest GPUs that keeps `share` of the requests, what it keeps, and its GPUs. `missed` is
    that of each stretch. If no fleet keeps as much, the one that keeps most."""
    prefill, decode = (sum((each[role] for each in missed), np.zeros(1)) / requests for role in (0, 1))
    kept = np.outer(1.0 - np.minimum(prefill, 1.0), 1.0 - np.minimum(decode, 1.0))
    held = np.add.outer(np.arange(len(prefill)) * gpus[0], np.arange(len(decode)) * gpus[1])
    nobody = (np.arange(len(prefill))[:, None] < (gpus[0] > 0)) | (np.arange(len(decode)) < 1)
    kept = np.where((held <= most_gpus) & ~nobody, kept, -1.0)
    enough = kept >= min(share, float(kept.max()))
    best = int(np.argmin(np.where(enough, held - 1e-6 * kept, np.inf)))
    fleet = divmod(best, kept.shape[1])
    return fleet, float(kept[fleet]), int(held[fleet])


@dataclass(frozen=True, slots=True)
class Turn:
    """Both shapes of the graph on the same recorded past: the cheapest fixed fleet of each, and the share it keeps.
    `fleet`, `gpus` and `share` are of the graph's own shape, `turned_*` of the other one. A fleet without prefill
    workers is aggregated."""

    hours: float
    fleet: tuple[int, int]
    gpus: int
    share: float
    turned_fleet: tuple[int, int]
    turned_gpus: int
    turned_share: float

    @property
    def pays(self) -> bool:
        """Whether the other shape would be cheaper by more than chance."""
        return self.turned_gpus <= TURN_PAYS * self.gpus and self.turned_share >= self.share - TURN_SLACK


TURN_PAYS, TURN_SLACK = 0.85, 0.001
TURN_STRETCHES = 3
"""From so many stretches on, both shapes are compared."""


def turn(stretches: Sequence[Stretch], gpus: tuple[int, int], most_gpus: int, target: float) -> Turn | None:
    """Over those of these stretches that were judged for both shapes; None while they are too few."""
    both = [(each, each.turned) for each in stretches if each.turned is not None]
    requests = sum(each.requests for each, _ in both)
    if len(both) < TURN_STRETCHES or requests < JUDGED_MIN:
        return None
    own = [each.fixed for each, _ in both]
    other = [turned for _, turned in both]
    turned_gpus = (0, gpus[1]) if gpus[0] else (gpus[1], gpus[1])
    # The share that both can keep, if they cannot keep the target.
    best = [_cheapest(*of, most_gpus, 1.0)[1] for of in ((own, requests, gpus), (other, requests, turned_gpus))]
    share = min(target, *best)
    fleet, kept, held = _cheapest(own, requests, gpus, most_gpus, share)
    found, turned_kept, turned_held = _cheapest(other, requests, turned_gpus, most_gpus, share)
    hours = sum(each.lasted_s for each, _ in both) / 3600
    return Turn(hours, fleet, held, kept, found, turned_held, turned_kept)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """All that is known of the past. `roles` are the ranks of prefill and decode, `requests` the judged ones (fading).
    `easy` and `easy_missed` are requests, and misses, of intervals that one worker less of each role would have served
    as well: more workers would not have helped."""

    record: Record
    roles: tuple[Ranks, Ranks]
    requests: float = 0.0
    easy: float = 0.0
    easy_missed: float = 0.0
    stretches: tuple[Stretch, ...] = ()
    history_peak: float = 0.0
    """The highest rate (requests/s) that a history from before the start had."""

    @classmethod
    def of(cls, now_s: float, workers_max: int) -> Hindsight:
        """Without a past."""
        return cls(Record(now_s), (Ranks.of(workers_max), Ranks.of(workers_max)))

    def begun(self, now_s: float) -> Hindsight:
        """A past whose clock ended at 0 s, as that of a planner that begins now."""
        prefill, decode = (replace(role, wanted=role.wanted + now_s) for role in self.roles)
        return replace(self, record=Record(now_s), roles=(prefill, decode))

    def resized(self, workers_max: int) -> Hindsight:
        """With so many workers of a role, at most. A stretch that is being judged is given up."""
        if workers_max == self.workers_max:
            return self
        prefill, decode = (role.resized(workers_max) for role in self.roles)
        stretches = tuple(each.resized(workers_max) for each in self.stretches)
        return replace(self, roles=(prefill, decode), stretches=stretches, record=replace(self.record, asked=None))

    @property
    def workers_max(self) -> int:
        """So many workers of a role are judged."""
        return len(self.roles[0].idle)

    @property
    def hopeless(self) -> float:
        """Share of the requests that miss a target with any number of workers, as it was seen."""
        modelled = max(role.missed for role in self.roles) / max(self.requests, 1.0)
        return (self.easy_missed + EASY_PRIOR * modelled) / (self.easy + EASY_PRIOR)

    def asking(self, lately: Sequence[Ended], now_s: float, bin_s: float) -> Hindsight:
        """With the next stretch to be judged. `lately` are the answers that say how long one takes."""
        if not lately or not self.record.due(now_s, bin_s):
            return self if self.record.asked is None else replace(self, record=replace(self.record, asked=None))
        lasted_s = sorted(each.lasted_s for each in lately[-LASTED_SAMPLE:])
        return replace(self, record=self.record.asking(now_s, lasted_s[int(len(lasted_s) * LASTED_QUANTILE)], bin_s))

    def decided(self, wanted: tuple[int, int], ready: tuple[int, int], gpus: int, now_s: float) -> Hindsight:
        """The rule wants so many workers of each role, while so many serve, and so many GPUs are held."""
        roles = self.roles[0].wants(wanted[0], now_s), self.roles[1].wants(wanted[1], now_s)
        return replace(self, roles=roles, record=self.record.decided(now_s, wanted, ready, gpus))

    def held(
        self, workers: tuple[int, int], bin_price: float, gpus: tuple[int, int], rate: float, now_s: float
    ) -> tuple[int, int]:
        """The workers to have where the rule wants `workers` for `rate` requests/s. Without a judged past these, or if
        it is stale; and no fewer, if there was no such load yet."""
        if self.requests < JUDGED_MIN or self.is_stale(now_s):
            return workers
        found = [
            max(1, role.held_now(role.leaders(bin_price * each), now_s)) if each else 0
            for role, each in zip(self.roles, gpus, strict=True)
        ]
        if rate > BEYOND * max((self.history_peak, *(each.peak for each in self.stretches))):
            return max(found[0], workers[0]), max(found[1], workers[1])
        return found[0], found[1]

    def is_stale(self, now_s: float) -> bool:
        """Whether nothing was judged for so long that the past rules no more."""
        return now_s - self.record.judged_until_s > STALE_S

    def fixed_fleets(self, gpus: tuple[int, int], most_gpus: int) -> tuple[FixedFleet, ...]:
        """The best fixed fleets of the last hour, and of the last day if more than that is known."""
        found = []
        for seconds in (HOUR_S, DAY_S):
            since_s = self.record.judged_until_s - seconds
            fixed = fixed_fleet([each for each in self.stretches if each.until_s > since_s], gpus, most_gpus)
            if fixed is not None and (seconds == HOUR_S or fixed.hours > 1.5):
                found.append(fixed)
        return tuple(found)

    def turn(self, gpus: tuple[int, int], most_gpus: int, target: float) -> Turn | None:
        """Both shapes of the graph on the stretches of the last day."""
        return turn(self.stretches, gpus, most_gpus, target)

    def judged(
        self,
        misses: Misses,
        lead_bins: tuple[int, int],
        bin_s: float,
        turned: Misses | None = None,
    ) -> Hindsight:
        """With the stretch that was asked for. `turned` is the other shape. Nobody starts in the first stretch: its
        workers were there."""
        lead_bins = lead_bins if self.stretches else (0, 0)
        roles, requests, easy, easy_missed = list(self.roles), self.requests, self.easy, self.easy_missed
        fades, gpu_s = Ranks.fades(bin_s), 0.0
        both = (misses.prefill, misses.decode)
        saved = [saved_by(missed, self.workers_max) for missed in both]
        for at, count in enumerate(misses.requests):
            ruled = self.record.ruled_at(self.record.asked_from_s + (at + 1) * bin_s)
            if ruled is None:
                continue
            requests = fades * requests + count
            gpu_s += bin_s * ruled.gpus
            is_easy = True
            for role, missed in enumerate(both):
                one = Bin(ruled.wanted[role], saved[role][:, at], float(missed[-1][at]))
                is_easy = is_easy and not one.saved[max(0, ruled.ready[role] - 1) :].any()
                roles[role] = roles[role].after(one, lead_bins[role], bin_s)
            easy = fades * easy + is_easy * count
            easy_missed = fades * easy_missed + is_easy * self.record.asked_missed[at]
        until_s = self.record.asked_from_s + len(misses.requests) * bin_s
        stretch = Stretch(
            until_s,
            len(misses.requests) * bin_s,
            sum(misses.requests),
            sum(self.record.asked_missed),
            gpu_s,
            peak_rate(misses.requests, bin_s),
            _summed(misses),
            None if turned is None else _summed(turned),
        )
        kept = (*self.stretches, stretch) if gpu_s else self.stretches
        return replace(
            self,
            stretches=tuple(each for each in kept if each.until_s > until_s - DAY_S),
            roles=(roles[0], roles[1]),
            requests=requests,
            easy=easy,
            easy_missed=easy_missed,
            record=replace(self.record, asked=None),
        )

    @property
    def newest_s(self) -> float:
        """Seconds from the end of the stretch before the last one to that of the last one."""
        if not self.stretches:
            return 0.0
        last = self.stretches[-1]
        return last.until_s - self.stretches[-2].until_s if len(self.stretches) > 1 else last.lasted_s

    def factor(self, gpus: tuple[int, int], target: float, bin_price: float) -> float:
        """The dearest price of a GPU at which the recorded past would have kept the target.

        `gpus` are those of a worker of each role. `bin_price` is the price of a mean GPU, in requests per interval."""
        if self.requests < JUDGED_MIN:
            return 1.0
        allowed = max(1e-4, 1.0 - target)
        left = 1.0 - self.hopeless / allowed
        aim = AIM * allowed * self.requests * (1.0 if left <= 0 else max(left, AIM_LEAST))
        for each in FACTORS:
            leaders = [role.leaders(bin_price * each * of_one) for role, of_one in zip(self.roles, gpus, strict=True)]
            if sum(role.avoidable(lead) for role, lead in zip(self.roles, leaders, strict=True)) <= aim:
                return each
        return FACTORS[-1]

"""Repetitions of points: their statistics, the plan of the next one, and what they show of the host. Pure.

The host's faults are a worker slower than its equals, a noisy neighbour, a drifting engine. Each becomes a sentence for
a person. A repetition is compared with others of the same point, so differences between points do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import sqrt
from statistics import fmean, median

from dynamo_local.profile.points import Point

# The mean of repeated measurements, and its confidence interval. Pure.

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table it is the normal distribution's within 5 %.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_NORMAL = 2.04


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of a point: duration in ms, the worker, and the time in seconds since the run began.

    Also what the engine really computed: mean requests of a pass, and the KV tokens that they attended to.
    """

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
    """Confidence interval of the mean, by Student's t. One or more independent values."""
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

    One pass of a hundred that the host's scheduler delayed tenfold says nothing about the engine.
    """
    middle = median(values)
    reach = 10 * median(abs(value - middle) for value in values)
    return fmean(value for value in values if abs(value - middle) <= max(reach, 0.02 * middle))


# The plan: which point is measured next, when a point is done, and the remaining time. Pure.
#
# Each round visits every open point in its own order, from the seed. So a slow change of the host is not mistaken for a
# property of long prompts. A point is done when its confidence interval is narrow enough, or its share of the budget is
# spent. Unused shares go to the other points.


@dataclass(frozen=True, slots=True)
class Rules:
    """`width`: the half width of the interval at which a point is done, as a share of its mean."""

    budget_s: float = 900.0
    width: float = 0.03
    repeats_min: int = 3
    repeats_max: int = 30
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Progress of a point: its repetitions, oldest first, and their seconds."""

    samples: tuple[Sample, ...] = ()
    spent_s: float = 0.0
    failures: tuple[str, ...] = ()
    """Why repetitions came to nothing, the latest last."""

    @cached_property
    def interval(self) -> Interval | None:
        """None before the first repetition."""
        return interval([sample.value_ms for sample in self.samples]) if self.samples else None


FAILURES_MAX = 3
"""A point that failed so often is given up: a prompt that the engine refuses will be refused again."""


@dataclass(frozen=True, slots=True)
class Progress:
    """All points, in their order, with what is known of each. `elapsed_s` of the budget are spent."""

    points: tuple[Point, ...]
    rules: Rules
    known: Mapping[Point, Measured] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def of(self, point: Point) -> Measured:
        """Progress of a point."""
        return self.known.get(point, Measured())

    def noted(self, point: Point, samples: Sequence[Sample], took_s: float, failure: str | None = None) -> Progress:
        """One repetition more (on several workers: several samples), which took so long, or came to nothing."""
        before = self.of(point)
        failures = before.failures if failure is None else (*before.failures, failure)
        after = Measured((*before.samples, *samples), before.spent_s + took_s, failures)
        return Progress(self.points, self.rules, {**self.known, point: after}, self.elapsed_s + took_s)

    @property
    def open(self) -> list[Point]:
        """Those that are not done, in their order."""
        share_s = self._shares()
        return [point for point in self.points if not self._done(point, share_s[point])]

    def next_point(self) -> Point | None:
        """The one to be measured now; None: all are done, or the budget is spent."""
        if self.elapsed_s >= self.rules.budget_s:
            return None
        left = self.open
        if not left:
            return None
        least = min(self._visits(point) for point in left)
        return min((point for point in left if self._visits(point) == least), key=self._turn)

    @property
    def left_s(self) -> float:
        """About how long it still takes: never longer than the budget."""
        left = sum(self._missing(point) * self._cost_s(point) for point in self.open)
        return max(0.0, min(left, self.rules.budget_s - self.elapsed_s))

    # --- inside --------------------------------------------------------------------------------

    def _visits(self, point: Point) -> int:
        known = self.of(point)
        return len(known.samples) + len(known.failures)

    def _turn(self, point: Point) -> bytes:
        """Within a round by chance."""
        return blake2b(f"{self.rules.seed}/{self._visits(point)}/{point}".encode(), digest_size=8).digest()

    def _done(self, point: Point, share_s: float) -> bool:
        known, rules = self.of(point), self.rules
        if len(known.failures) >= FAILURES_MAX or len(known.samples) >= rules.repeats_max:
            return True
        if known.interval is None or len(known.samples) < rules.repeats_min:
            return False
        return known.interval.relative <= rules.width or known.spent_s >= share_s

    def _shares(self) -> dict[Point, float]:
        """Seconds that each point may take: what points that are narrow enough did not need goes to the others."""
        narrow = {point for point in self.points if self._done(point, float("inf"))}
        others = [point for point in self.points if point not in narrow]
        budget_s = self.rules.budget_s - sum(self.of(point).spent_s for point in narrow)
        weights = sum(point.cost for point in others)
        return {point: budget_s * point.cost / weights if point not in narrow else 0.0 for point in self.points}

    def _missing(self, point: Point) -> float:
        """Repetitions until it is narrow enough, as far as that can be said."""
        known, rules = self.of(point), self.rules
        count = len(known.samples)
        if known.interval is None or count < rules.repeats_min:
            return rules.repeats_min - count
        wanted = count * (known.interval.relative / rules.width) ** 2
        return max(1.0, min(wanted, rules.repeats_max) - count)

    def _cost_s(self, point: Point) -> float:
        """Duration of one repetition: the point's own mean, else estimated from the others by cost."""
        known = self.of(point)
        if known.samples:
            return known.spent_s / len(known.samples)
        done = [(each.cost, of.spent_s / len(of.samples)) for each, of in self.known.items() if of.samples]
        return point.cost * fmean(seconds / cost for cost, seconds in done) if done else 0.0


def share_done(progress: Progress) -> tuple[int, int]:
    """How many points are done, and how many there are."""
    return len(progress.points) - len(progress.open), len(progress.points)


def measured(progress: Progress, points: Iterable[Point] | None = None) -> dict[Point, Measured]:
    """Those with a repetition or more."""
    return {point: progress.of(point) for point in points or progress.points if progress.of(point).samples}


SLOWER = 1.05
"""So many times its equals' time, in the median over the points, and a worker is called slow."""
SLOWER_AT = 0.75
"""At such a share of the points at least: one point alone may be chance."""
DRIFT = 0.05
"""Change of all times over the run, as a share, that is told."""
SIGMAS = 4.0
"""And it must be so many times as large as its own error."""
HELD_UP = 1.10
"""A repetition so many times as long as the quickest ones of its point was held up by something."""
HELD_UP_SHARE = 0.10
"""Such a share of all repetitions, and there is a neighbour."""
QUICK = 0.25
"""The quickest repetitions: this quantile of a point's."""
OTHERS = 0.25
"""Such a share of the host's processors used by others is told."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """`kind`: slow_worker, noisy_neighbour, drift, busy_host, on_processors or stranger; `size` is a share (0.2: a
    fifth longer)."""

    kind: str
    worker: str | None
    size: float
    text: str


def noticed(known: Mapping[Point, Measured]) -> list[Noticed]:
    """All of it."""
    slow = list(slow_workers(known))
    even = _evened(known, {each.worker: 1 + each.size for each in slow if each.worker})
    drift = list(drifts(even))
    return [*slow, *drift, *([] if drift else neighbours(even))]


def slow_workers(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """Workers that take longer than others with the same engine; needs two or more of them."""
    ratios: dict[str, list[float]] = {}
    for each in known.values():
        means = _by_worker(each)
        for worker, mean in means.items():
            others = [other for name, other in means.items() if name != worker]
            if others:
                ratios.setdefault(worker, []).append(mean / median(others))
    for worker, found in sorted(ratios.items()):
        middle = median(found)
        if middle >= SLOWER and sum(ratio > 1 + (SLOWER - 1) / 2 for ratio in found) >= SLOWER_AT * len(found):
            text = (
                f"{worker} takes {middle:.2f} times what its equals take, at {len(found)} points: look at its GPU's "
                "clocks, temperature and power limit; the profile counts it in"
            )
            yield Noticed("slow_worker", worker, middle - 1, text)


def drifts(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """One straight line through all repetitions over time, each as a share of its point's mean."""
    rows = [
        (sample.at_s, sample.value_ms / fmean(s.value_ms for s in each.samples))
        for each in known.values()
        if len(each.samples) >= 2
        for sample in each.samples
    ]
    if len(rows) < 8:
        return
    mid = fmean(at_s for at_s, _ in rows)
    squares = sum((at_s - mid) ** 2 for at_s, _ in rows)
    if squares <= 0:
        return
    level = fmean(share for _, share in rows)
    slope = sum((at_s - mid) * (share - level) for at_s, share in rows) / squares
    rest = sum((share - level - slope * (at_s - mid)) ** 2 for at_s, share in rows)
    error = sqrt(rest / (len(rows) - 2) / squares)
    span_s = max(at_s for at_s, _ in rows) - min(at_s for at_s, _ in rows)
    change = slope * span_s
    if abs(change) >= DRIFT and abs(slope) >= SIGMAS * error:
        how = "slower" if change > 0 else "quicker"
        text = (
            f"the engine became {abs(change):.0%} {how} while it was measured ({span_s:.0f} s): a GPU that heats up or "
            "throttles, or a cache that fills; measure again when it is steady"
        )
        yield Noticed("drift", None, change, text)


def neighbours(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """Repetitions that took much longer than the quickest of their point: something else ran at that time."""
    held: list[Sample] = []
    count, most = 0, 1.0
    for each in known.values():
        if len(each.samples) < 3:
            continue
        quick = quantile([sample.value_ms for sample in each.samples], QUICK)
        count += len(each.samples)
        late = [sample for sample in each.samples if sample.value_ms > HELD_UP * quick]
        most = max([most, *(sample.value_ms / quick for sample in late)])
        held += late
    if not held or len(held) < HELD_UP_SHARE * count:
        return
    workers = sorted({sample.worker for sample in held})
    text = (
        f"{len(held)} of {count} repetitions took up to {most:.1f} times as long as the quickest of their point, on "
        f"{', '.join(workers)}: something else uses the GPU or the processors now and then; end it and measure again"
    )
    yield Noticed("noisy_neighbour", workers[0] if len(workers) == 1 else None, most - 1, text)


def busy_processors(share: float) -> Iterator[Noticed]:
    """Mean share of the processors that other processes used during the run."""
    if share >= OTHERS:
        text = (
            f"other processes used {min(share, 1.0):.0%} of this host's processors meanwhile: what runs on those (the "
            "way over HTTP, starts, an engine without a GPU) takes longer than on a quiet host; measure again then"
        )
        yield Noticed("busy_host", None, share, text)


def on_processors(count: int, model: str) -> Iterator[Noticed]:
    """Engines whose GPUs are simulated, and which compute all the same."""
    text = (
        f"the GPUs are simulated: these engines compute on {count} × {model}, which they share with whatever else runs "
        "on this host, and several workers were measured one after the other"
    )
    yield Noticed("on_processors", None, 1.0, text)


def strangers(seen: Mapping[tuple[int, str], int]) -> Iterator[Noticed]:
    """Processes (pid, name) that used a measured GPU beside its worker, by the device's index."""
    for (pid, name), index in sorted(seen.items()):
        text = f"GPU {index} was also used by {name} (pid {pid}): the times of its worker are not its own; end it"
        yield Noticed("stranger", None, 1.0, text)


def _by_worker(each: Measured) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in each.samples:
        values.setdefault(sample.worker, []).append(sample.value_ms)
    return {worker: median(found) for worker, found in values.items()}


def _evened(known: Mapping[Point, Measured], slower: Mapping[str, float]) -> dict[Point, Measured]:
    """Without what is known to be slow about a worker, which would look like a neighbour."""
    if not slower:
        return dict(known)
    return {
        point: Measured(
            tuple(
                Sample(s.worker, s.at_s, s.value_ms / slower.get(s.worker, 1.0), s.requests, s.kv_tokens)
                for s in each.samples
            ),
            each.spent_s,
        )
        for point, each in known.items()
    }

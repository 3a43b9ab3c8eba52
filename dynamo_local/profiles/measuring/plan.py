"""Which point is measured next, when a point is done, and how long all of it still takes. Pure.

Each round visits every point that is not done, in an order of its own (from the seed), so that nothing that changes
slowly on the host is mistaken for a property of long prompts. A point is done when its confidence interval is narrow
enough, or its share of the budget is spent. What points leave of their shares is shared among the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from statistics import fmean

from dynamo_local.profiles.measuring.points import Point
from dynamo_local.profiles.measuring.statistics import Interval, Sample, interval


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
    """What is known of a point: its repetitions, the oldest first, and the seconds that they took."""

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
        """What is known of it."""
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
        """Of one repetition: its own mean, else that of the others by their cost."""
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

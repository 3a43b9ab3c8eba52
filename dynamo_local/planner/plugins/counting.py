"""What is counted of plugins, under the names of Dynamo's metrics (without their prefix `dynamo_planner_`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

COUNTERS = {
    "plugin_evaluations_total": ("plugin_id", "stage", "result"),
    "plugin_held_over_total": ("plugin_id", "stage"),
    "reject_short_circuited_total": ("plugin_id",),
    "tick_skipped_total": ("plugin_id",),
    "tick_requires_unsatisfied_total": ("plugin_id", "missing_field"),
    "reconcile_clamped_total": ("sub_component_type", "source"),
    "constrain_capped_total": ("sub_component_type", "source"),
    "tick_timeout_total": (),
}
"""Each with its labels."""
HISTOGRAMS = {"plugin_latency_seconds": ("plugin_id", "stage"), "tick_duration_seconds": ()}
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Durations:
    """How many there were, and how many up to each of `BOUNDS_S` (not cumulated; the last: longer than all)."""

    count: int = 0
    sum_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Take one more duration in."""
        self.count += 1
        self.sum_s += seconds
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1


class Counters:
    """By name, then by the values of the labels. Those of a plugin go with it, so that they do not pile up."""

    def __init__(self) -> None:
        self.totals: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in COUNTERS}
        self.durations: dict[str, defaultdict[tuple[str, ...], Durations]] = {
            name: defaultdict(Durations) for name in HISTOGRAMS
        }

    def add(self, name: str, *labels: str) -> None:
        """One more. KeyError for a name that is not in `COUNTERS`."""
        self.totals[name][labels] += 1

    def took(self, name: str, seconds: float, *labels: str) -> None:
        """One more duration. KeyError for a name that is not in `HISTOGRAMS`."""
        self.durations[name][labels].add(seconds)

    def forget(self, plugin_id: str) -> None:
        """The plugin has left."""
        counted: tuple[dict[tuple[str, ...], Any], ...] = (*self.totals.values(), *self.durations.values())
        for found in counted:
            for labels in [labels for labels in found if plugin_id in labels]:
                del found[labels]

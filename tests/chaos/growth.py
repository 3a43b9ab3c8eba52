"""Memory and descriptors of a run's processes over time: whether one of them grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import linear_regression, mean

import psutil

from benchmarks.processes import rss_mib

EVERY_S = 10.0
WARM_UP_S = 3600.0
"""A process is judged from so long after it was first seen. Until then etcd's log fills, and allocators fragment."""
LEAST_S = 2400.0
"""A shorter stretch is not judged: an allocator takes memory in steps."""
PER_HOUR_MAX = 0.01
SLACK = {"MiB": 1.0, "descriptors": 2.0}
"""Less than that over the whole stretch is no growth."""


@dataclass(slots=True)
class Watched:
    """The samples of one process."""

    name: str
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in SLACK})


@dataclass(frozen=True, slots=True)
class Trend:
    """How one figure of a process changed, warm-up left out. `per_hour`: the slope of a line through the samples, as a
    part of their mean."""

    name: str
    what: str
    hours: float
    first: float
    last: float
    per_hour: float

    @property
    def grows(self) -> bool:
        """Whether it is more than noise."""
        return self.per_hour > PER_HOUR_MAX and self.last - self.first > SLACK[self.what]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.first:.1f} to {self.last:.1f} {self.what} in {self.hours:.2f} h, "
            f"{self.per_hour:+.2%} an hour"
        )


class Growth:
    """Samples of each process that there was."""

    def __init__(self) -> None:
        self._watched: dict[tuple[int, float], Watched] = {}
        """The key is a process's pid and start, because the kernel gives pids out again."""

    def sample(self, processes: Mapping[int, str], now_s: float) -> None:
        """Note memory and descriptors of these processes, by pid, at a time (seconds). Ended ones are left out."""
        for pid, name in processes.items():
            try:
                process = psutil.Process(pid)
                key = pid, process.create_time()
                found = {"MiB": rss_mib(pid), "descriptors": float(process.num_fds())}
            except psutil.NoSuchProcess:
                continue
            watched = self._watched.setdefault(key, Watched(name))
            watched.at_s.append(now_s)
            for what, value in found.items():
                watched.values[what].append(value)

    def trends(self) -> list[Trend]:
        """The trends of each process that lived for `WARM_UP_S` and `LEAST_S`."""
        return [trend for watched in self._watched.values() for trend in trends_of(watched)]


def trends_of(watched: Watched) -> Iterable[Trend]:
    """The trends of one process. There are none if it lived for less than `WARM_UP_S` and `LEAST_S`."""
    begin_s = watched.at_s[0] + WARM_UP_S
    kept = [number for number, at_s in enumerate(watched.at_s) if at_s >= begin_s]
    hours = [(watched.at_s[number] - begin_s) / 3600 for number in kept]
    if not hours or hours[-1] * 3600 < LEAST_S:
        return
    for what, all_values in watched.values.items():
        values = [all_values[number] for number in kept]
        slope, first = linear_regression(hours, values)
        last = first + slope * hours[-1]
        yield Trend(watched.name, what, hours[-1], first, last, slope / mean(values))

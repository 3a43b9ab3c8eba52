"""Traffic from counters that only grow: the difference between two scrapes, over processes that come and go. Pure.

Each scrape is a reading of every process that counts. A process that began within the window counts from 0; one that
ended within it counts up to its last reading, so at most what came after that is lost. Where an expected process did
not answer, the scrape is no end and no beginning of a window: a part of the sum is no sum.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.traffic import ACCEPT_LENGTH, HIT_RATE, REQUESTS
from dynamo_local.core.types import Missing
from dynamo_local.planner.values.traffic import UNKNOWN, Traffic

SCRAPE_EVERY_S = 5.0
STALE_SCRAPES = 3
KEPT_S = 60.0
KEPT_MAX_S = 4 * 3600.0

Counters = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counted:
    """One process's counters at one moment. `epoch` stands for the process, which is up since `up_since_s`; `prefills`
    says that its prefix cache saves prefills that a planner counts."""

    frontend: bool
    prefills: bool
    name: str
    epoch: str
    up_since_s: float
    counters: Counters


@dataclass(slots=True)
class _Process:
    of: Counted
    readings: deque[tuple[float, Counters]] = field(default_factory=deque)
    raw: Counters = field(default_factory=dict)
    carried: Counter[str] = field(default_factory=Counter)
    """What was counted before its counters began anew."""

    def read(self, at_s: float, counters: Counters) -> None:
        for name, before in self.raw.items():
            if counters.get(name, before) < before:
                self.carried[name] += before  # type: ignore[assignment]  # typeshed knows whole numbers only
        self.raw = counters
        self.readings.append((at_s, {name: value + self.carried[name] for name, value in counters.items()}))

    def before(self, at_s: float) -> Counters | None:
        """Its counters at that time; None where that is not known."""
        if self.of.up_since_s >= at_s:
            return {}
        return next((counters for read_s, counters in reversed(self.readings) if read_s <= at_s), None)

    def forget(self, until_s: float) -> None:
        while len(self.readings) > 1 and self.readings[1][0] <= until_s:
            self.readings.popleft()


class CounterHistory:
    """Scrapes of the last `keep_s` seconds: the longest window that is to be asked for."""

    def __init__(self) -> None:
        self._complete: deque[float] = deque()
        self._processes: dict[str, _Process] = {}
        self._failed: str | None = None
        self.keep_s = KEPT_S

    def add(self, at_s: float, counted: Iterable[Counted], *, absent: Iterable[str] = ()) -> None:
        """One scrape; `absent` names those that should have answered and did not."""
        for one in counted:
            process = self._processes.setdefault(one.epoch, _Process(one))
            process.read(at_s, one.counters)
        missing = sorted(absent)
        if missing:
            self.failed(f"{', '.join(missing)} did not tell")
        else:
            self._failed = None
            self._complete.append(at_s)
        self._forget(at_s)

    def failed(self, why: str) -> None:
        """A scrape failed as a whole."""
        self._failed = why

    def traffic(self, window_s: float, now_s: float) -> Traffic | Missing:
        """The window of about that length that ended with the last scrape."""
        self.keep_s = max(self.keep_s, window_s)
        why = "" if self._failed is None else f" ({self._failed})"
        if not self._complete:
            return Missing(f"the requests were not counted yet{why}")
        end_s = self._complete[-1]
        if now_s - end_s > STALE_SCRAPES * SCRAPE_EVERY_S:
            return Missing(f"the requests were counted last {now_s - end_s:.0f} s ago{why}")
        latest_s = end_s - window_s + SCRAPE_EVERY_S / 2
        begin_s = next((at_s for at_s in reversed(self._complete) if at_s <= latest_s and at_s < end_s), None)
        if begin_s is None:
            known_s = end_s - self._complete[0]
            return Missing(f"the requests are counted for {known_s:.0f} s, not yet for {window_s:g} s")
        return self._between(begin_s, end_s)

    def _between(self, begin_s: float, end_s: float) -> Traffic | Missing:
        frontends, engines, prefills = Counter[str](), Counter[str](), Counter[str]()
        counted = told = 0
        for process in self._processes.values():
            at_s, last = process.readings[-1]
            if at_s <= begin_s:
                continue
            first = process.before(begin_s)
            if first is None:
                return Missing(f"{process.of.name} was not counted when the window began")
            counted, told = counted + process.of.frontend, told + (not process.of.frontend)
            for sums in (frontends if process.of.frontend else engines, *([prefills] if process.of.prefills else [])):
                for name, value in last.items():
                    sums[name] += value - first.get(name, 0.0)  # type: ignore[assignment]
        if not counted:
            return Missing("no frontend counted requests")
        return Traffic(
            at_s=end_s,
            duration_s=end_s - begin_s,
            num_req=frontends.get(REQUESTS, 0.0),
            isl=_mean(frontends, "isl"),
            osl=_mean(frontends, "osl"),
            ttft_ms=_mean(frontends, "ttft_s", 1000.0),
            itl_ms=_mean(frontends, "itl_s", 1000.0),
            request_duration_s=_mean(frontends, "duration_s"),
            kv_hit_rate=_hit_rate(frontends, prefills),
            accept_length=_accept_length(engines, told > 0),
        )

    def _forget(self, now_s: float) -> None:
        until_s = now_s - min(self.keep_s, KEPT_MAX_S) - 2 * SCRAPE_EVERY_S
        while len(self._complete) > 1 and self._complete[1] <= until_s:
            self._complete.popleft()
        for process in self._processes.values():
            process.forget(until_s)
        self._processes = {
            epoch: process for epoch, process in self._processes.items() if process.readings[-1][0] >= until_s
        }


def _mean(counts: Counters, name: str, factor: float = 1.0) -> float | Missing:
    """Of a histogram; `Missing` where nothing was observed."""
    count = counts.get(f"{name}_count", 0.0)
    return factor * counts.get(f"{name}_sum", 0.0) / count if count > 0 else Missing("no request in the window")


def _hit_rate(frontends: Counters, engines: Counters) -> float | Missing:
    """By the engines' own prefix caches, else by what a router knew, else by what the answers said."""
    if (queries := engines.get("prefix_queries", 0.0)) > 0:
        return _share(engines.get("prefix_hits", 0.0) / queries)
    routed = _mean(frontends, HIT_RATE)
    if not isinstance(routed, Missing):
        return _share(routed)
    cached, isl = _mean(frontends, "cached"), _mean(frontends, "isl")
    if isinstance(cached, Missing) or isinstance(isl, Missing) or isl <= 0:
        return UNKNOWN
    return _share(cached / isl)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _accept_length(engines: Counters, told: bool) -> float | Missing:
    """Tokens per decode pass: 1 where the engines that were counted (`told`: there were some) do not speculate."""
    if not told:
        return UNKNOWN
    told_by_engines = _mean(engines, ACCEPT_LENGTH)
    if not isinstance(told_by_engines, Missing):
        return max(1.0, told_by_engines)
    if "drafts" not in engines:
        return 1.0
    drafted = engines["drafts"]
    return 1.0 + engines.get("accepted", 0.0) / drafted if drafted > 0 else Missing("nothing was drafted in the window")

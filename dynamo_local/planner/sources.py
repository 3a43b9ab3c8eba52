"""The sources of a planner's values, in the arbiter and in the simulator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.traffic import ACCEPT_LENGTH, HIT_RATE, REQUESTS
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import (
    UNKNOWN,
    Capabilities,
    Engines,
    EngineSeen,
    Forecasts,
    ForecastTask,
    Requests,
    Traffic,
)


class TrafficSource(Protocol):
    """The traffic of the clients."""

    async def traffic(self, window_s: float) -> Traffic | Missing:
        """The window of so many seconds that ends now. May raise `DynamoError`."""
        ...


class RequestSource(Protocol):
    """The clients' requests one by one."""

    async def requests(self, window_s: float) -> Requests | Missing:
        """Those of the last so many seconds. `Missing` where they are only counted together. May raise
        `DynamoError`."""
        ...


class PassSource(Protocol):
    """The forward passes of the engines."""

    async def passes(self) -> Engines:
        """One entry for each rank of each ready worker, with the passes since the last call of this. A worker that
        does not answer is `Missing` there; raises nothing."""
        ...

    def capabilities(self) -> Mapping[str, Capabilities]:
        """The limits of the engines, by component."""
        ...


class Forecaster(Protocol):
    """Continues series: `planner.forecasting` in a process of its own, or inline in the simulator."""

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        """The answer, or why there was none within `deadline_s` seconds. Never raises for a task."""
        ...


class NoForecaster:
    """Where nobody can forecast."""

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        return Missing(f"there is nobody to ask for a {task.predictor} forecast")


# --- counters
# Traffic from counters that only grow: the difference between two scrapes, over processes that come and go. Pure.
#
# Each scrape is a reading of every process that counts. A process that began within the window counts from 0; one
# that
# ended within it counts up to its last reading, so at most what came after that is lost. Where an expected process
# did
# not answer, the scrape is no end and no beginning of a window: a part of the sum is no sum.

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
    """The count before the counters began anew."""

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
        counted = reported = 0
        for process in self._processes.values():
            at_s, last = process.readings[-1]
            if at_s <= begin_s:
                continue
            first = process.before(begin_s)
            if first is None:
                return Missing(f"{process.of.name} was not counted when the window began")
            counted, reported = counted + process.of.frontend, reported + (not process.of.frontend)
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
            accept_length=_accept_length(engines, reported > 0),
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
    """The mean of a histogram; `Missing` without an observation."""
    count = counts.get(f"{name}_count", 0.0)
    return factor * counts.get(f"{name}_sum", 0.0) / count if count > 0 else Missing("no request in the window")


def _hit_rate(frontends: Counters, engines: Counters) -> float | Missing:
    """The KV hit rate: from the engines' prefix caches, else from a router, else from the answers."""
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


def _accept_length(engines: Counters, reported: bool) -> float | Missing:
    """Tokens per decode pass: 1 where the engines that were counted (`told`: there were some) do not speculate."""
    if not reported:
        return UNKNOWN
    reported_by_engines = _mean(engines, ACCEPT_LENGTH)
    if not isinstance(reported_by_engines, Missing):
        return max(1.0, reported_by_engines)
    if "drafts" not in engines:
        return 1.0
    drafted = engines["drafts"]
    return 1.0 + engines.get("accepted", 0.0) / drafted if drafted > 0 else Missing("nothing was drafted in the window")


# --- passes
# The engines' passes: the new ones and the last one of each, with their age. Pure.
#
# A worker's passes are forgotten with the worker. One that did not answer keeps its last pass until that is
# `STALE_AFTER_S` old; then it is `Missing`: an engine that tells nothing is not idle. An idle one says so each
# second.

STALE_AFTER_S = 3.0
"""Three heartbeats."""
NEW_PASSES = 256
"""The passes of each engine, until a caller takes them."""


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that serves. `worker_id` is what its engine calls itself, as far as that can be known beforehand."""

    name: str
    component: str
    worker_id: str


@dataclass(slots=True)
class _Engine:
    last: ForwardPass
    new: deque[ForwardPass] = field(default_factory=lambda: deque(maxlen=NEW_PASSES))


@dataclass(slots=True)
class _Worker:
    engines: dict[EngineId, _Engine] = field(default_factory=dict)
    silent: str | None = None
    ranks: int = 1


class PassTracker:
    """Fed with workers' answers (`heard`), read once per observation (`take`)."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._capabilities: dict[str, Capabilities] = {}
        self.missed: dict[EngineId, int] = {}
        """Passes that never came, by engine: gaps in their numbers."""

    def after(self) -> dict[str, int]:
        """The number of the last pass of each engine, by `worker id/rank`: what came before need not be told again."""
        return {
            f"{engine.worker_id}/{engine.dp_rank}": known.last.counter_id
            for worker in self._workers.values()
            for engine, known in worker.engines.items()
        }

    def heard(
        self,
        name: str,
        passes: Iterable[ForwardPass] | None,
        *,
        ranks: int = 1,
        missed: Mapping[str, int] | None = None,
    ) -> None:
        """A worker's answer; `passes` is None where it keeps none. Passes that are already known are left out,
        unless the engine was started again (its numbers began anew)."""
        worker = self._workers.setdefault(name, _Worker())
        worker.ranks = ranks
        worker.silent = "it keeps no passes (forward-passes is off)" if passes is None else None
        current: set[EngineId] = set()
        for passed in passes or ():
            current.add(passed.engine)
            known = worker.engines.get(passed.engine)
            if known is None:
                known = worker.engines[passed.engine] = _Engine(passed)
                if not passed.heartbeat:
                    known.new.append(passed)
            elif passed.counter_id > known.last.counter_id or passed.at_s > known.last.at_s + STALE_AFTER_S:
                known.last = passed
                if not passed.heartbeat:
                    known.new.append(passed)
            elif passed.heartbeat and passed.at_s > known.last.at_s:
                known.last = passed
        for engine in current:
            self.missed[engine] = (missed or {}).get(str(engine.dp_rank), 0)
        ids = {engine.worker_id for engine in current}
        if ids:  # its instance id has changed: the old one is nobody's
            worker.engines = {engine: known for engine, known in worker.engines.items() if engine.worker_id in ids}

    def can(self, component: str, capabilities: Capabilities) -> None:
        """The report of a worker about its engine."""
        self._capabilities[component] = capabilities

    def capabilities(self) -> Mapping[str, Capabilities]:
        """The last reports, by component."""
        return dict(self._capabilities)

    def take(self, ready: Iterable[ReadyWorker], now_s: float) -> Engines:
        """The engines of the ready workers, with what came since the last call; all others are forgotten."""
        ready = tuple(ready)
        names = {worker.name for worker in ready}
        self._workers = {name: worker for name, worker in self._workers.items() if name in names}
        seen: dict[EngineId, EngineSeen] = {}
        for worker in ready:
            seen.update(self._engines_of(worker, now_s))
        self.missed = {engine: count for engine, count in self.missed.items() if engine in seen}
        return seen

    def _engines_of(self, ready: ReadyWorker, now_s: float) -> dict[EngineId, EngineSeen]:
        worker = self._workers.get(ready.name, _Worker())
        worker_id = next((engine.worker_id for engine in worker.engines), ready.worker_id)
        why = worker.silent or "it has told no pass yet"
        seen = {
            EngineId(worker_id, rank): EngineSeen(ready.component, (), Missing(f"{ready.name}: {why}"))
            for rank in range(worker.ranks)
        }
        for engine, known in worker.engines.items():
            age_s = now_s - known.last.at_s
            stale = Missing(f"the last pass of {ready.name} is {age_s:.1f} s old") if age_s > STALE_AFTER_S else None
            seen[engine] = EngineSeen(ready.component, tuple(known.new), stale or known.last)
            known.new.clear()
        return seen

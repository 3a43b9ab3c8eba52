"""The arbiter's part of `/metrics`: workers, GPUs, tasks and dispatch, for Prometheus.

Gauges are computed at a scrape, so an arbiter without scrapes spends nothing on them. Counters go up when events
happen. An unknown value (a queue that does not answer) has no sample. It is never 0.
"""

from __future__ import annotations

import enum
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.lifecycle import STARTS
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import Missing, WorkerState

PREFIX = "dynamo_arbiter"
CONTENT_TYPE = CONTENT_TYPE_LATEST


class GpuState(enum.StrEnum):
    """The four places of the ledger (`core.gpus`)."""

    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"
    TAKEN = "taken"


def gpus_by_state(gpus: GpuLedger) -> dict[GpuState, int]:
    """The number of devices in each place. A device that a foreign process uses is not free."""
    return {
        GpuState.FREE: len(gpus.free),
        GpuState.HELD: sum(len(held) for held in gpus.held.values()),
        GpuState.QUARANTINED: len(gpus.quarantined),
        GpuState.TAKEN: len(gpus.taken),
    }


def residue_by_component(fleet: Fleet) -> dict[tuple[str, str], int]:
    """Bytes that sleeping workers keep, by component and `gpu` or `host`. Unknown ones are left out."""
    found: dict[tuple[str, str], int] = {}
    for name, sleeper in fleet.gpus.sleepers.items():
        component = fleet.workers[name].component
        for where, size, times in (("gpu", sleeper.vram_bytes, len(sleeper.uuids)), ("host", sleeper.host_bytes, 1)):
            if not isinstance(size, Missing):
                found[component, where] = found.get((component, where), 0) + size * times
    return found


class GpuSeconds:
    """GPU-seconds by component. Settle them whenever the held GPUs may have changed."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._since_s = 0.0

    def settle(self, now_s: float, held: Mapping[str, int]) -> None:
        """Add the GPU-seconds until now. From now on `held` is (GPUs by component)."""
        for component, count in self._held.items():
            self._totals[component] += count * (now_s - self._since_s)
        self._since_s, self._held = now_s, dict(held)
        for component in held:
            self._totals.setdefault(component, 0.0)

    def totals(self) -> dict[str, float]:
        """The totals at the last `settle`. A component that never held a GPU has no entry."""
        return dict(self._totals)


def gpus_held(workers: Iterable[Worker]) -> dict[str, int]:
    """GPUs by component, of all workers that hold any, in every state."""
    held: Tally[str] = Tally()
    for worker in workers:
        if worker.gpus:
            held[worker.component] += len(worker.gpus)
    return dict(held)


@dataclass(frozen=True, slots=True)
class Now:
    """The values of the gauges. `queue` has the known ones of `pending`, `outstanding`, `dead_letters`."""

    state: str
    workers: Mapping[tuple[str, WorkerState], int]
    """Workers by component and state. Components without a worker have no entry."""
    gpus: Mapping[GpuState, int]
    gpu_seconds: Mapping[str, float]
    queue: Mapping[str, int] = field(default_factory=dict)
    task_deaths: Mapping[str, int] = field(default_factory=dict)
    """How often each of the arbiter's tasks has died."""
    residue: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Bytes that sleeping workers keep, by component and place (`gpu`, `host`). Unknown ones are left out."""
    lacking: frozenset[str] = frozenset()
    """Degraded components (`core.fleet.degraded`)."""


NOTHING = Now("", {}, {}, {})
STATES = ("starting", "adopting", "ready", "degraded", "leaving")


class _Gauges(Collector):
    def __init__(self, now: Callable[[], Now]) -> None:
        self._now = now

    def describe(self) -> Iterator[Metric]:
        return _families(NOTHING)

    def collect(self) -> Iterator[Metric]:
        return _families(self._now())


def _families(now: Now) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the state that the graph is in", labels=["state"])
    for name in STATES if now.state else ():
        state.add_metric([name], float(name == now.state))
    yield state
    workers = GaugeMetricFamily(f"{PREFIX}_workers", "Workers in each state", labels=["component", "state"])
    for component in dict.fromkeys(component for component, _ in now.workers):
        for each in WorkerState:  # all of them: a count that falls to 0 must appear as 0
            workers.add_metric([component, each], now.workers.get((component, each), 0))
    yield workers
    residue = GaugeMetricFamily(
        f"{PREFIX}_standby_bytes",
        "Memory that sleeping workers keep: on their GPUs, and of the host",
        labels=["component", "memory"],
    )
    for (component, where), size in now.residue.items():
        residue.add_metric([component, where], size)
    yield residue
    lacking = GaugeMetricFamily(
        f"{PREFIX}_lacking",
        "1 for a component that lacks workers, which makes the graph degraded",
        labels=["component"],
    )
    for component in dict.fromkeys(component for component, _ in now.workers):
        lacking.add_metric([component], float(component in now.lacking))
    yield lacking
    yield _filled(
        GaugeMetricFamily(
            f"{PREFIX}_gpus", "GPUs that this graph may use, by who has them (taken: somebody else)", labels=["state"]
        ),
        now.gpus,
    )
    yield _filled(
        CounterMetricFamily(
            f"{PREFIX}_gpu_held_seconds", "GPU-seconds held by workers, from start to exit", labels=["component"]
        ),
        now.gpu_seconds,
    )
    yield _filled(
        GaugeMetricFamily(
            f"{PREFIX}_prefill_queue_requests", "Requests in the prefill queue, as last seen", labels=["of"]
        ),
        now.queue,
    )
    yield _filled(
        CounterMetricFamily(
            f"{PREFIX}_task_deaths", "How often a task of the arbiter died, and was started again", labels=["task"]
        ),
        now.task_deaths,
    )


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
    """With a value for each value of its only label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


class ArbiterMetrics:
    """The arbiter's metrics, in a registry of their own. `now` is called at each scrape.

    The counters of `components` begin at 0: Prometheus sees no increase in a series that appears with its first value.
    """

    def __init__(self, now: Callable[[], Now] = lambda: NOTHING, components: Iterable[str] = ()) -> None:
        # `…_created` gauges double the exposition, as in the Frontend.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(now))
        self.restarts = Counter(
            f"{PREFIX}_restarts",
            "Processes started under a name that had one before",
            ["component"],
            registry=self.registry,
        )
        self.drains = Counter(
            f"{PREFIX}_drains",
            "Drains that ended: finished, timed_out, taken_back or failed (it hung)",
            ["component", "outcome"],
            registry=self.registry,
        )
        self.requests_cut = Counter(
            f"{PREFIX}_requests_cut",
            "Requests cut because a drain passed its deadline, as far as they could be counted",
            ["component"],
            registry=self.registry,
        )
        self.requests_abandoned = Counter(
            f"{PREFIX}_requests_abandoned",
            "Requests ended by leaving workers because their clients did not read",
            ["component"],
            registry=self.registry,
        )
        for component in components:
            self.restarts.labels(component)
            self.requests_cut.labels(component)
            self.requests_abandoned.labels(component)
            for outcome in filter(None, (traits.drain_outcome for traits in TRAITS.values())):
                self.drains.labels(component, outcome)

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Count a transition. `worker` is as it is after the whole step."""
        component, cut = transition.component, transition.details.get("requests_cut")
        if transition.kind in STARTS and worker.start.starts > 1:
            self.restarts.labels(component).inc()
        if isinstance(cut, int):
            self.requests_cut.labels(component).inc(cut)
        self.requests_abandoned.labels(component).inc(transition.details.get("requests_abandoned", 0))
        outcome = TRAITS[transition.after].drain_outcome if TRAITS[transition.before].drains else None
        if outcome is not None:
            self.drains.labels(component, outcome).inc()

    def exposition(self) -> bytes:
        """The text format, for `CONTENT_TYPE`."""
        return generate_latest(self.registry)


# Dispatch metrics: where prompts were prefilled and why, how good estimates were, and how many requests were deferred
# or refused. Workers (`components.remote_prefill`, `components.prefill_worker`) report counters named `NAME`,
# `NAME.WAY` or `NAME.WAY.WHY` beside their load. An unknown name, of another version, is left out.

DISPATCH_PREFIX = "dynamo_dispatch"
_WORKER = ("component", "worker")


@dataclass(frozen=True, slots=True)
class _Family:
    """A counter of workers under its public name. `labels` name the parts after the dots."""

    name: str
    what: str
    labels: tuple[str, ...] = ()
    gauge: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "prefills": _Family(
        "prefills",
        "Decisions where to prefill, by way (local, remote) and why; came_back is a remote one that was done here "
        "after all",
        ("way", "why"),
    ),
    "fallbacks": _Family("fallbacks", "Decisions that slo was to make, and the seed's rule made"),
    "refused": _Family("refused", "Requests that a worker refused because too many wait there (429 if all do)"),
    "deferred": _Family("deferred", "Prefills put behind all others, because they cannot keep their target any more"),
    "late_prefills": _Family("late_prefills", "Prefills that were pulled from behind all others"),
    "first_tokens": _Family("first_tokens", "First tokens that came as was decided, by way", ("way",)),
    "first_token_estimated_s": _Family(
        "first_token_estimated_seconds", "Sum of the times to first token that were estimated, by way", ("way",)
    ),
    "first_token_seen_s": _Family(
        "first_token_seen_seconds", "Sum of the times to first token that came of it, by way", ("way",)
    ),
    "first_token_error_s": _Family(
        "first_token_error_seconds", "Sum of the distances between the two, by way", ("way",)
    ),
    "correction": _Family(
        "correction", "By what estimates are multiplied, from what was seen: local, remote, itl", ("of",), gauge=True
    ),
}


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """The counters of one worker."""

    component: str
    worker: str
    counters: Mapping[str, float]


def dispatch_now(reported: Mapping[str, Mapping[str, float]], fleet: Fleet) -> tuple[WorkerCounters, ...]:
    """The counters of the present workers."""
    return tuple(
        WorkerCounters(fleet.workers[name].component, name, counters)
        for name, counters in reported.items()
        if name in fleet.workers
    )


class DispatchMetrics(Collector):
    """Collects the workers' counters. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], tuple[WorkerCounters, ...]] = tuple) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return _dispatch_families(())

    def collect(self) -> Iterator[Metric]:
        return _dispatch_families(self._now())


def _dispatch_families(counters: tuple[WorkerCounters, ...]) -> Iterator[Metric]:
    for key, family in _FAMILIES.items():
        kind: Any = GaugeMetricFamily if family.gauge else CounterMetricFamily
        metric = kind(f"{DISPATCH_PREFIX}_{family.name}", family.what, labels=[*_WORKER, *family.labels])
        for each in counters:
            for name, value in each.counters.items():
                head, *values = name.split(".")
                if head == key and len(values) == len(family.labels):
                    metric.add_metric([each.component, each.worker, *values], value)
        yield metric

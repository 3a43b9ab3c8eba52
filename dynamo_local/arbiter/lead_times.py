"""Measures the lead times of a run in its arbiter, and keeps them in a file for this host.

A lead time is the time from a decision until one more worker serves, by scaling option: a cold start, a prewarmed
process, a wake, a flip.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.arbiter.deployment import Launcher
from dynamo_local.arbiter.metrics import PREFIX
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.lead_times import LeadTimes, OptionKind
from dynamo_local.core.prewarmed import engine_of
from dynamo_local.core.types import Role, ServiceSpec
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import StateError
from dynamo_local.state.leads import LeadFile

log = logging.getLogger(__name__)


class RunLeadTimes:
    """The lead times of one run. `background` runs coroutines that nobody awaits."""

    def __init__(
        self, launcher: Launcher, file: LeadFile, background: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._launcher = launcher
        self._file = file
        self._background = background
        self._writing = asyncio.Lock()
        self.known = LeadTimes()

    def remember(self) -> None:
        """Read the lead times that earlier runs measured for the present services. An unreadable file is logged."""
        graph = self._launcher.factory.graph
        of = {service.name: what_it_runs(service) for service in graph.services if ROLES[service.role].computes}
        try:
            self.known = LeadTimes(self.known.run, self._file.read(graph.namespace, of))
        except StateError as error:
            log.warning("the lead times of earlier runs are not known: %s", error)

    def note(self, option: str, component: str, seconds: float) -> None:
        """Add one lead time, in seconds from the decision. `LeadTimeWatch` calls it."""
        self.known = self.known.noted(option, component, seconds)
        self._background(self._keep(option, component, seconds))

    async def _keep(self, option: str, component: str, seconds: float) -> None:
        factory = self._launcher.factory
        of = what_it_runs(factory.service(component))
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.add, factory.graph.namespace, component, of, option, seconds)
            except StateError as error:
                log.warning("a lead time was not kept for later runs: %s", error)

    def status(self) -> list[dict[str, Any]]:
        """For `dynamo status --json` and `dynamo planner status`."""
        return self.known.as_json()

    def start_up_s(self, component: str) -> float | None:
        """The median start-up time of a component on this host, or None if it was never measured.

        If the host keeps prewarmed processes, a start from one of these is preferred to a cold start.
        """
        options = (
            (OptionKind.PREWARMED, OptionKind.COLD) if self._launcher.factory.settings.spares else (OptionKind.COLD,)
        )
        found = self.medians(component)
        return next((found[option] for option in options if option in found), None)

    def medians(self, component: str) -> dict[str, float]:
        """The median of each scaling option that was measured on this host."""
        return self.known.medians(component)


UNDER_WAY = frozenset({S.STARTING, S.FLIPPING, S.WAKING, S.FALLING_ASLEEP})


class LeadTimeWatch:
    """Measures how long each scaling option takes.

    A start begins when its process is to be made. A flip, a wake and a sleep begin with the command. A failed,
    cancelled or overtaken change is not measured, nor is one that an earlier arbiter began. Only workers with an engine
    are measured: the planner adds no others. `was_prewarmed` says whether the process of a pid was prewarmed.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        note: Callable[[str, str, float], None],
        was_prewarmed: Callable[[int | None], bool],
    ) -> None:
        self._now_s = now_s
        self._note = note
        self._was_prewarmed = was_prewarmed
        self._began: dict[str, float] = {}

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Begin or end a measurement, if this transition is one of those."""
        before, after, kind = transition.before, transition.after, transition.kind
        if before is after or not ROLES[worker.role].computes:
            return
        name = transition.details["was"] if kind is TransitionKind.FLIPPED else transition.name
        began_s, now_s = self._began.pop(name, None), self._now_s()
        if after in UNDER_WAY:
            if before not in UNDER_WAY:
                self._began[name] = now_s
        elif began_s is not None and (option := self._finished_option(worker, before, after, kind)) is not None:
            self._note(option, transition.component, now_s - began_s)

    def _finished_option(self, worker: Worker, before: S, after: S, kind: TransitionKind) -> OptionKind | None:
        """The scaling option that is complete now, or None."""
        level_2 = worker.standby.level == 2
        match before, after:
            case S.STARTING, S.READY:
                return OptionKind.PREWARMED if self._was_prewarmed(worker.pid) else OptionKind.COLD
            case S.FLIPPING, S.READY if kind is TransitionKind.FLIPPED:
                return OptionKind.FLIP_TO_PREFILL if worker.role is Role.PREFILL else OptionKind.FLIP_TO_DECODE
            case S.WAKING, S.READY:
                return OptionKind.WAKE_2 if level_2 else OptionKind.WAKE_1
            case S.FALLING_ASLEEP, S.SLEEPING:
                return OptionKind.SLEEP_2 if level_2 else OptionKind.SLEEP_1
        return None


def what_it_runs(service: ServiceSpec) -> str:
    """Engine, model and number of GPUs: a lead time holds for the same combination only."""
    if service.runtime is not None:
        return service.runtime
    model = service.config.get("model")
    engine = engine_of(service.config.get("engine"), model, TINY_MODEL)
    return f"{engine}:{model or TINY_MODEL}:{service.resources.gpu}"


@dataclass(frozen=True, slots=True)
class LeadTimesNow:
    """The values at a scrape. `spares` counts prewarmed processes by engine and state."""

    lead_times: LeadTimes = field(default_factory=LeadTimes)
    spares: Mapping[tuple[str, str], int] = field(default_factory=dict)


class LeadTimeMetrics(Collector):
    """Lead times and prewarmed processes on `/metrics`. A lead time that was never measured has no sample."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], LeadTimesNow] = LeadTimesNow) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return _families(LeadTimesNow())

    def collect(self) -> Iterator[Metric]:
        return _families(self._now())


def _families(now: LeadTimesNow) -> Iterator[Metric]:
    lead_times = GaugeMetricFamily(
        f"{PREFIX}_lead_seconds",
        "From a decision until the worker served, by the way it came about; of this host's latest",
        labels=["component", "rung", "statistic"],
    )
    kept = GaugeMetricFamily(
        f"{PREFIX}_lead_samples", "How many leads those statistics are of", labels=["component", "rung"]
    )
    for component, option, _, lead_time in now.lead_times.rows():
        for statistic, value in (("last", lead_time.last_s), ("median", lead_time.median_s), ("p90", lead_time.p90_s)):
            lead_times.add_metric([component, option, statistic], value)
        kept.add_metric([component, option], lead_time.count)
    yield lead_times
    yield kept
    spares = GaugeMetricFamily(f"{PREFIX}_spares", "Processes of which workers can be made", labels=["engine", "state"])
    for (engine, state), count in now.spares.items():
        spares.add_metric([engine, state], count)
    yield spares

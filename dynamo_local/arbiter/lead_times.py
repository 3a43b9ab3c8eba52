"""Lead times, joined to a run: measured by who watches the shell, kept for the run and, in a file, for this host."""

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
from dynamo_local.core.fleet.lifecycle import Event, Flipped
from dynamo_local.core.lead_times import LeadTimes, Rung
from dynamo_local.core.prewarmed import engine_of
from dynamo_local.core.types import Role, ServiceSpec
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import StateError
from dynamo_local.state.leads import LeadFile

log = logging.getLogger(__name__)


class RunLeadTimes:
    """The lead times of one run. `background` runs what takes time."""

    def __init__(
        self, launcher: Launcher, file: LeadFile, background: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._launcher = launcher
        self._file = file
        self._background = background
        self._writing = asyncio.Lock()
        self.known = LeadTimes()

    def remember(self) -> None:
        """Take what earlier runs measured, of what now runs. A file that cannot be read is logged."""
        graph = self._launcher.factory.graph
        of = {service.name: what_it_runs(service) for service in graph.services}
        try:
            self.known = LeadTimes(self.known.run, self._file.read(graph.namespace, of))
        except StateError as error:
            log.warning("the lead times of earlier runs are not known: %s", error)

    def note(self, rung: str, component: str, seconds: float) -> None:
        """One more: from the decision until it serves (or sleeps). `LeadTimeWatch` calls it."""
        self.known = self.known.noted(rung, component, seconds)
        self._background(self._keep(rung, component, seconds))

    async def _keep(self, rung: str, component: str, seconds: float) -> None:
        factory = self._launcher.factory
        of = what_it_runs(factory.service(component))
        async with self._writing:
            try:
                await asyncio.to_thread(self._file.add, factory.graph.namespace, component, of, rung, seconds)
            except StateError as error:
                log.warning("a lead time was not kept for later runs: %s", error)

    def status(self) -> list[dict[str, Any]]:
        """For `dynamo status --json` and `dynamo planner status`."""
        return self.known.as_json()

    def start_up_s(self, component: str) -> float | None:
        """What a start of it takes on this host, in the median: from a spare where the host keeps some, else a cold
        one. None where neither was measured."""
        rungs = (Rung.SPARE, Rung.COLD) if self._launcher.factory.settings.spares else (Rung.COLD,)
        found = self.medians(component)
        return next((found[rung] for rung in rungs if rung in found), None)

    def medians(self, component: str) -> dict[str, float]:
        """What each rung of it takes on this host, as far as that was measured."""
        return self.known.medians(component)


UNDER_WAY = frozenset({S.STARTING, S.FLIPPING, S.WAKING, S.FALLING_ASLEEP})


class LeadTimeWatch:
    """Notes how long each way to a worker took.

    A start begins when its process is to be made, a flip, a wake and a sleep when they are ordered. What fails, is
    taken back or is overtaken by another order (a wake of one that is still falling asleep) says nothing, nor does
    what began under an earlier arbiter. `was_spare` says of a pid whether its process was one.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        note: Callable[[str, str, float], None],
        was_spare: Callable[[int | None], bool],
    ) -> None:
        self._now_s = now_s
        self._note = note
        self._was_spare = was_spare
        self._began: dict[str, float] = {}

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Note it, if a way to a worker begins or ends with it."""
        before, after, event = transition.before, transition.after, transition.event
        if before is after:
            return
        name = event.was if isinstance(event, Flipped) else transition.name
        began_s, now_s = self._began.pop(name, None), self._now_s()
        if after in UNDER_WAY:
            if before not in UNDER_WAY:
                self._began[name] = now_s
        elif began_s is not None and (rung := self._rung(worker, before, after, event)) is not None:
            self._note(rung, transition.component, now_s - began_s)

    def _rung(self, worker: Worker, before: S, after: S, event: Event) -> Rung | None:
        """What has come to its end; None where it has not come to the one that was meant."""
        level_2 = worker.standby.level == 2
        match before, after:
            case S.STARTING, S.READY:
                return Rung.SPARE if self._was_spare(worker.pid) else Rung.COLD
            case S.FLIPPING, S.READY if isinstance(event, Flipped):
                return Rung.FLIP_TO_PREFILL if worker.role is Role.PREFILL else Rung.FLIP_TO_DECODE
            case S.WAKING, S.READY:
                return Rung.WAKE_2 if level_2 else Rung.WAKE_1
            case S.FALLING_ASLEEP, S.SLEEPING:
                return Rung.SLEEP_2 if level_2 else Rung.SLEEP_1
        return None


def what_it_runs(service: ServiceSpec) -> str:
    """Engine and model, on how many GPUs: the lead times of another one say nothing about it."""
    if service.runtime is not None:
        return service.runtime
    model = service.config.get("model")
    engine = engine_of(service.config.get("engine"), model, TINY_MODEL)
    return f"{engine}:{model or TINY_MODEL}:{service.resources.gpu}"


# --- lead_metrics
# Lead times and spares on `/metrics`. What was never measured has no sample.


@dataclass(frozen=True, slots=True)
class LeadTimesNow:
    """What is known at a scrape. `spares` by engine and state."""

    leads: LeadTimes = field(default_factory=LeadTimes)
    spares: Mapping[tuple[str, str], int] = field(default_factory=dict)


class LeadTimeMetrics(Collector):
    """Registered as the collector of its families. `now` is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], LeadTimesNow] = LeadTimesNow) -> None:
        self._now = now
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """All families, without samples."""
        return _families(LeadTimesNow())

    def collect(self) -> Iterator[Metric]:
        """With what is known now."""
        return _families(self._now())


def _families(now: LeadTimesNow) -> Iterator[Metric]:
    leads = GaugeMetricFamily(
        f"{PREFIX}_lead_seconds",
        "From a decision until the worker served, by the way it came about; of this host's latest",
        labels=["component", "rung", "statistic"],
    )
    kept = GaugeMetricFamily(
        f"{PREFIX}_lead_samples", "How many leads those statistics are of", labels=["component", "rung"]
    )
    for component, rung, _, lead in now.leads.rows():
        for statistic, value in (("last", lead.last_s), ("median", lead.median_s), ("p90", lead.p90_s)):
            leads.add_metric([component, rung, statistic], value)
        kept.add_metric([component, rung], lead.count)
    yield leads
    yield kept
    spares = GaugeMetricFamily(f"{PREFIX}_spares", "Processes of which workers can be made", labels=["engine", "state"])
    for (engine, state), count in now.spares.items():
        spares.add_metric([engine, state], count)
    yield spares

"""Observers of the planner: TensorBoard and Prometheus. Both are called on the event loop, and never block it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_local.arbiter.planner_metrics import PREFIX, PlannerGauges, PlannerNow
from dynamo_local.arbiter.tensorboard import ScalarFile, folder_for, missing_library
from dynamo_local.clock import Clock
from dynamo_local.errors import ConfigError
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.records import figures as scalars
from dynamo_local.planner.records.decision_log import DecisionRecord
from dynamo_local.planner.values import Observation

LAG_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Board:
    """A `PlannerObserver` that writes TensorBoard scalars from `open` to `close`, and nothing before or after.

    `base` is the folder that a relative log_dir is in, `logs` the run's own.
    """

    def __init__(self, base: Path, logs: Path, clock: Clock, tell: Callable[[str], None]) -> None:
        self._base = base
        self._logs = logs
        self._clock = clock
        self._tell = tell
        self._log_dir: Path | None = None
        self._file: ScalarFile | None = None
        self._began_s = 0.0
        self._dropped_before = 0

    @property
    def folder(self) -> Path | None:
        """Where the scalars go; None while they go nowhere."""
        return None if self._file is None else self._file.folder

    @property
    def dropped(self) -> int:
        """Points that never reached the disk, of all files so far."""
        return self._dropped_before + (0 if self._file is None else self._file.dropped)

    async def open(self, log_dir: Path | None) -> None:
        """The planner starts, or its log_dir is changed. Raises `ConfigError`, with the old file still open."""
        if self._file is not None and log_dir == self._log_dir:
            return
        now = datetime.fromtimestamp(self._clock.wall_s()).astimezone()
        if (why := missing_library(log_dir)) is not None:
            self._tell(why)
        folder = folder_for(log_dir, base=self._base, logs=self._logs, now=now)
        try:
            file = None if folder is None else await asyncio.to_thread(ScalarFile, folder)
        except ConfigError as error:
            if log_dir is not None:
                raise
            self._tell(f"no TensorBoard scalars: {error}")  # the user named no log_dir: no reason to fail
            file = None
        await self.close()
        self._file, self._log_dir, self._began_s = file, log_dir, self._clock.now_s()

    async def close(self) -> None:
        """Write what is buffered, and close the file."""
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(file.close)
            self._dropped_before += file.dropped

    def on_observation(self, observation: Observation) -> None:
        """See `PlannerObserver`."""
        if self._file is not None:
            points = scalars.of_reading(observation.reading, observation.pools)
            self._file.add(points, step=self._second(observation.at_s), wall_s=self._clock.wall_s())

    def on_decision(self, record: DecisionRecord) -> None:
        """See `PlannerObserver`."""
        if self._file is not None:
            points = scalars.of_decision(record.decision.reasons, record.inputs.fleet)
            self._file.add(points, step=self._second(record.decision.now_s), wall_s=record.wall_s)

    def _second(self, at_s: float) -> int:
        return max(0, int(at_s - self._began_s))


class PlannerMetrics:
    """The planner's part of `/metrics`, in the arbiter's registry. A `PlannerObserver`."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], PlannerNow] = PlannerNow) -> None:
        self.registry = registry
        self._now = now
        registry.register(_Gauges(now))
        self.gauges = PlannerGauges(registry, now)
        self.tick_lag = Histogram(
            f"{PREFIX}_tick_lag_seconds", "By how much each tick came late", buckets=LAG_BUCKETS, registry=registry
        )
        self.decisions = Counter(
            f"{PREFIX}_decisions",
            "Decisions about each component, by the rule that decided; a hold is one, too",
            ["component", "rule"],
            registry=registry,
        )
        self.scale_actions = Counter(
            f"{PREFIX}_scale_actions",
            "Steps that were decided, and what came of them: committed, refused, no_operation or deferred; "
            "in a virtual environment written or skipped",
            ["component", "direction", "outcome"],
            registry=registry,
        )

    def on_observation(self, observation: Observation) -> None:
        """See `PlannerObserver`."""
        self.gauges.on_observation(observation)
        self.tick_lag.observe(self._now().counts.lag_s)

    def on_decision(self, record: DecisionRecord) -> None:
        """See `PlannerObserver`."""
        self.gauges.on_decision(record)
        for reason in record.decision.reasons:
            self.decisions.labels(reason.component, reason.rule).inc()
        for component, outcome in record.outcomes.items():
            direction = "up" if record.decision.steps[component] > 0 else "down"
            self.scale_actions.labels(component, direction, outcome.outcome).inc()


class _Gauges(Collector):
    def __init__(self, now: Callable[[], PlannerNow]) -> None:
        self._now = now

    def describe(self) -> Iterator[Metric]:
        return _families(PlannerNow())

    def collect(self) -> Iterator[Metric]:
        return _families(self._now())


def _families(now: PlannerNow) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}_state", "1 for the state that the planner is in", labels=["state"])
    for each in PlannerState:
        state.add_metric([each], float(each is now.state))
    yield state
    ticks, failed = now.counts.pulls, now.counts.failed_ticks
    yield CounterMetricFamily(f"{PREFIX}_ticks", "Ticks: pulls of the metrics, failed ones included", ticks)
    yield CounterMetricFamily(f"{PREFIX}_failed_ticks", "Ticks that raised; each was tried again", failed)
    held = GaugeMetricFamily(
        f"{PREFIX}_loop_held_max_seconds",
        "The longest that one step of a tick, or of asking a source, held the arbiter's loop so far; on a busy host "
        "the wall clock counts what others had of the core",
        labels=["work", "clock"],
    )
    for work, longest in now.counts.latency.longest.items():
        held.add_metric([work, "wall"], longest.elapsed_s)
        held.add_metric([work, "cpu"], longest.cpu_s)
    yield held
    yield CounterMetricFamily(
        f"{PREFIX}_tensorboard_dropped_points", "TensorBoard points that never reached the disk", now.dropped
    )

"""A planner by itself: connector, election, sources and loop, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_local.arbiter.logged_decisions import LoggedDecisions, LoggedTicks
from dynamo_local.arbiter.planner_metrics import PlannerNow
from dynamo_local.arbiter.planner_report.schedule import ReportSchedule
from dynamo_local.arbiter.planner_views import PlannerMetrics
from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.notes import About
from dynamo_local.core.types import Load
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.connector import KubernetesConnector
from dynamo_local.kubernetes.election import Election
from dynamo_local.kubernetes.observation import LoadsOfPasses
from dynamo_local.kubernetes.passes import HeardPasses
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.collector import Collector, Sampled
from dynamo_local.planner.forecasting.answers import ArbiterForecaster, InlineForecaster
from dynamo_local.planner.loop import PlannerLoop, PlannerState
from dynamo_local.planner.records.decision_log import DecisionLog, decision_log_path
from dynamo_local.planner.records.ticks import TickLog, tick_log_path
from dynamo_local.planner.sources import TrafficSource
from dynamo_local.planner.values import WorkerPools
from dynamo_local.system.executors import ended

log = logging.getLogger(__name__)

NO_PASSES = (
    "policy load goes by the load of each worker, which on Kubernetes follows from the engines' passes, and these are "
    "heard over NATS (NATS_SERVER is not set; the operator sets it where its platform has NATS) or on the sockets that "
    "workers tell in their DynamoWorkerMetadata (which cannot be listed here). slo, sla and throughput-load with "
    "optimization_target sla go by the traffic alone"
)


class PodPlanner:
    """Between `start` and `stop`. `registry` has what /metrics shows."""

    def __init__(
        self,
        options: PlannerConfig,
        connector: KubernetesConnector,
        election: Election,
        clock: Clock,
        logs: Path,
        *,
        name: str,
        traffic: TrafficSource | None,
        passes: HeardPasses | None = None,
        forecaster: ArbiterForecaster | InlineForecaster | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.options = options
        self.loop: PlannerLoop | None = None
        self._connector = connector
        self._election = election
        self._clock = clock
        self._logs = logs
        self._name = name
        self._traffic = traffic
        self.passes = passes
        self._loads = None if passes is None else LoadsOfPasses(passes, connector.pools, clock)
        self._forecaster = forecaster or ArbiterForecaster()
        self._background: set[asyncio.Task[Any]] = set()
        self._logged: list[LoggedDecisions | LoggedTicks] = []
        self._reports: ReportSchedule | None = None
        self._gpu_hours, self._counted_s = 0.0, clock.now_s()

    async def start(self) -> None:
        """Check the graph, stand for election, and plan. Raises `GraphUnfit`, `Forbidden`, `ConfigError`."""
        options = self.options
        if self.options.policy == "load" and self._loads is None:
            raise ConfigError(NO_PASSES)
        policy = await asyncio.to_thread(policy_of, options)
        await self._connector.start()
        await self._election.start()
        self._connector.leads = self._election.follows
        loop = self.loop = await self._made()
        self._connector.on_manual = loop.on_manual_change
        loop.start(options, policy, no_operation=self.options.no_operation, paused=self._election.follows() is not None)
        self._election.on_leading, self._election.on_following = loop.resume, loop.pause
        if self._reports is not None:
            self._reports.began()
            self._run(self._reports.run())

    async def stop(self) -> None:
        """The tick that is under way ends; the lease is given back, so that another planner goes on at once."""
        if self.loop is not None:
            self._election.on_leading = self._election.on_following = _nothing
            await asyncio.gather(self.loop.stop(), self._forecaster.close())
        await self._election.close()
        await self._connector.close()
        if self._reports is not None and self.loop is not None:
            self._reports.ended()
            await self._reports.close()
        await ended(*self._background)

    async def _made(self) -> PlannerLoop:
        await asyncio.to_thread(_made_folder, self._logs)
        decisions, ticks = decision_log_path(self._logs), tick_log_path(self._logs)
        logged = await asyncio.to_thread(LoggedDecisions, DecisionLog, decisions, self._run, tell)
        recorder = await asyncio.to_thread(LoggedTicks, TickLog, ticks, self._run, tell)
        self._logged = [logged, recorder]
        loads = self._loads if self.options.policy == "load" else None
        loop = PlannerLoop(
            _Graph(self._connector, loads),
            Collector(
                loads or _Unmeasured(), self._queue(loads), self._clock, traffic=self._traffic, passes=self.passes
            ),
            self._connector,
            self._clock,
            last_number=logged.log.last_seq,
            tell=tell,
            forecaster=self._forecaster,
            recorder=recorder,
        )
        metrics = PlannerMetrics(self.registry, self._now)
        loop.observers += [logged, metrics]
        self._reports = ReportSchedule(
            self._name,
            self._logs,
            self._clock,
            hours=lambda: self.options.report_interval_hours,
            written=self._written,
            tell=tell,
        )
        return loop

    def _queue(self, loads: LoadsOfPasses | None) -> LoadsOfPasses | None:
        return loads if self._connector.seen.prefill is not None else None

    def unhealthy(self) -> str | None:
        """Why this planner does not plan as it should; None where it does, or holds for a reason of its own."""
        if self.loop is None or self.loop.state is PlannerState.STOPPED:
            return "it has not begun yet"
        trouble = self.loop.trouble
        return trouble if trouble is not None and trouble.startswith("a tick failed") else None

    def _now(self) -> PlannerNow:
        loop = self.loop
        if loop is None:
            return PlannerNow()
        now_s = self._clock.now_s()
        held = self._connector.pools().gpus_spoken_for
        self._gpu_hours += held * (now_s - self._counted_s) / 3600
        self._counted_s = now_s
        return PlannerNow(loop.state, loop.counts, 0, loop.since_s, self._gpu_hours)

    async def _written(self) -> None:
        for logged in self._logged:
            await logged.written()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _made_folder(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {logs} of the planner's logs cannot be made: {error.strerror}") from error


class _Graph:
    """What the loop sees: `loop.World`."""

    def __init__(self, connector: KubernetesConnector, loads: LoadsOfPasses | None) -> None:
        self._connector = connector
        self._loads = loads

    def worker_pools(self) -> WorkerPools:
        return self._connector.worker_pools()

    def ready(self) -> tuple[str, ...]:
        return () if self._loads is None else self._loads.ready()

    def blind(self) -> str | None:
        return self._connector.blind()


class _Unmeasured:
    """Loads of single workers are measured for the policy `load` alone: no other one asks for them."""

    async def loads(self) -> dict[str, Sampled[Load]]:
        return {}


def tell(text: str, about: About = None) -> None:
    """A person reads it in the pod's log."""
    log.warning("%s", text)


def _nothing() -> None:
    """Nobody cares."""

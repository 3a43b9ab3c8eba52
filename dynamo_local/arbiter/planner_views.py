"""Shows the arbiter's planner in TensorBoard, Prometheus and reports. None of them blocks the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_local.arbiter.planner_metrics import PlannerMetrics, PlannerNow, PluginMetrics, PluginsNow
from dynamo_local.arbiter.planner_report_schedule import ReportSchedule
from dynamo_local.arbiter.planning import ArbiterPlanner
from dynamo_local.arbiter.tensorboard import Board
from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig


class PlannerViews:
    """Subscribes TensorBoard, metrics and reports to a planner. `reports.run` and `reports.close` are the caller's.

    `base` is the folder that a relative log_dir is in. `gpu_hours` says how long components have held GPUs.
    """

    def __init__(
        self,
        planning: ArbiterPlanner,
        registry: CollectorRegistry,
        *,
        gpu_hours: Callable[[Iterable[str]], float | None],
        base: Path,
        logs: Path,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._planning = planning
        self._gpu_hours = gpu_hours
        self._board = Board(base, logs, clock, tell)
        self.reports = ReportSchedule(
            planning.graph.namespace,
            logs,
            clock,
            hours=lambda: planning.options.report_interval_hours,
            written=planning.written,
            tell=tell,
        )
        self._metrics = PlannerMetrics(registry, self._now)
        PluginMetrics(registry, self._plugins)
        planning.subscribe(
            self._board, self._metrics, on_start=self._on_start, on_stop=self._on_stop, status=self._status
        )

    async def _on_start(self, options: PlannerConfig) -> None:
        await self._board.open(options.log_dir)
        self.reports.began()

    async def _on_stop(self) -> None:
        self.reports.ended()
        await self._board.close()

    def _status(self) -> dict[str, Any]:
        folder = self._board.folder
        return {
            "tensorboard": None if folder is None else str(folder),
            "reports": None if self._planning.options.report_interval_hours is None else str(self.reports.folder),
            **self._planning.sources.drift.status(),
        }

    def _now(self) -> PlannerNow:
        planning = self._planning
        hours = self._gpu_hours(self._metrics.gauges.components)
        drift = planning.sources.drift.figures()
        dropped, fixed = self._board.dropped, planning.fixed_fleet
        return PlannerNow(planning.state, planning.counts, dropped, planning.since_s, hours, drift, fixed)

    def _plugins(self) -> PluginsNow:
        found = self._planning.plugins
        return PluginsNow() if found is None else PluginsNow(found.rows(), found.counters)

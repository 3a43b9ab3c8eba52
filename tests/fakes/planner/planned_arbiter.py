"""An arbiter of numbers for the planner in it: a fleet that never changes, sources that answer, orders kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynamo_local.arbiter.planning import ArbiterPlanner, PlannerPlugins
from dynamo_local.arbiter.sampler import LoadsSample
from dynamo_local.clock import AsyncioClock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.fleet.events import Command, Scale, ScaleAll
from dynamo_local.core.types import GraphSpec, Load, Missing, Resources, Role, ServiceSpec
from dynamo_local.planner.records.decision_log import decision_log_path, read
from dynamo_local.ports import QueueDepth
from dynamo_local.state.schema import PlannerEntry
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, name, on_ledger, worker
from tests.fakes.arbiter.kept_fleet import KeptFleet
from tests.fakes.arbiter.told import Told
from tests.fakes.infra.etcd import FakeEtcd

ONE = Resources(gpu=1)
GRAPH = GraphSpec(
    "dynamo",
    "graphs.disagg:Frontend",
    (
        ServiceSpec("Frontend", Role.FRONTEND, config={"served_model_name": "sim-tiny"}),
        ServiceSpec("VllmWorker", Role.DECODE, resources=ONE),
        ServiceSpec("PrefillWorker", Role.PREFILL, resources=ONE),
    ),
)
QUICK = {"adjustment_interval": 0.4, "metric_pulling_interval": 0.2}


class Arbiter:
    """Shows what the planner needs of one."""

    def __init__(self, folder: Path) -> None:
        self.file = KeptFleet()
        self.statefile = self.file.statefile
        self.controller = shell_of(on_ledger([*fleet("ready").workers.values(), worker(0, "ready", PREFILL)], 8))
        self.folder = folder
        self.kv = 0.7
        self.scaled: list[tuple[str, str | int]] = []
        self.told = Told()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.etcd = FakeEtcd()
        self.links = SimpleNamespace(etcd_answers=True, answer=True, kv=self.etcd)
        self.planning = self.made(PlannerConfig())

    def made(self, options: PlannerConfig, plugins: PlannerPlugins | None = None, **more: Any) -> ArbiterPlanner:
        """The planner of an arbiter on this statefile."""
        return ArbiterPlanner(
            GRAPH,
            options,
            commands=self,  # type: ignore[arg-type]
            controller=self.controller,
            statefile=self.statefile,
            sampling=self,  # type: ignore[arg-type]
            links=self.links,  # type: ignore[arg-type]
            clock=AsyncioClock(),
            logs=self.folder,
            background=self.background,
            tell=self.told,
            plugins=plugins,
            **more,
        )

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, command: Command) -> dict[str, Any]:
        if isinstance(command, ScaleAll):
            self.scaled.extend(command.targets.items())
            return {each: {"instructions": [{"watcher_name": name(1, each)}]} for each in command.targets}
        assert isinstance(command, Scale)
        self.scaled.append((command.component, str(command.target)))
        return {"instructions": [{"watcher_name": name(1, command.component)}]}

    async def loads(self) -> LoadsSample:
        return LoadsSample({name(): (Load(gpu_cache_usage_perc=self.kv), AsyncioClock().now_s())})

    async def depth(self) -> QueueDepth | Missing:
        return QueueDepth(0, 0)

    def kept(self) -> PlannerEntry | None:
        """What the statefile says of the planner."""
        return self.file.store.read().planner

    async def decisions(self, count: int) -> list[Any]:
        """The log, once it has so many."""
        async with asyncio.timeout(10.0):
            while len(found := read(decision_log_path(self.folder))) < count:
                await asyncio.sleep(0.01)
        return found

"""A planner's loop on a world of numbers: sources that are slow or fail, a connector that records, an observer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.collector import Collector, Sampled
from dynamo_local.planner.connectors import Committed, Refused
from dynamo_local.planner.loop import PlannerLoop
from dynamo_local.planner.policies.load_planner import LoadPlanner
from dynamo_local.planner.records.decision_log import DecisionRecord
from dynamo_local.planner.values import Observation, Pool, Reading, WorkerPools
from tests.fakes.arbiter.told import Told
from tests.fakes.planner.options import load_options

PREFILL, DECODE = "PrefillWorker", "VllmWorker"
OPTIONS = load_options(adjustment_interval=10.0, metric_pulling_interval=1.0)


class Rig:
    """One decode and one prefill worker that a test loads; everything is at second 0 and nothing to do at first.

    `before_*` are awaited before a source (or the connector) answers: a sleep, or an exception.
    """

    def __init__(self, *, prefill: int = 1, decode: int = 1, last_number: int = 0) -> None:
        self.clock = AsyncioClock()
        self.pools = WorkerPools(
            Pool(PREFILL, 1, ready=prefill, gpus_held=prefill), Pool(DECODE, 1, ready=decode, gpus_held=decode)
        )
        self.depth_now: int = 0
        self.kv = 0.7
        self.blindness: str | None = None
        self.silent: set[str] = set()
        self.pools_fail: list[Exception] = []
        self.before_loads: Callable[[], Awaitable[None]] = _at_once
        self.before_depth: Callable[[], Awaitable[None]] = _at_once
        self.before_act: Callable[[], Awaitable[None]] = _at_once
        self.outcome: Committed | Refused = Committed(("dynamo_X",))
        self.asked: list[tuple[str, float]] = []
        self.acts: list[tuple[str, int, str, float]] = []
        self.wholes: list[dict[str, int]] = []
        self.acting = 0
        self.readings: list[Reading] = []
        self.records: list[DecisionRecord] = []
        self.told = Told()
        self.loop = PlannerLoop(
            self,
            Collector(self, self, self.clock),
            self,
            self.clock,
            last_number=last_number,
            tell=self.told,
        )
        self.loop.observers.append(self)

    # --- what the loop sees ------------------------------------------------------------------------

    def worker_pools(self) -> WorkerPools:
        if self.pools_fail:
            raise self.pools_fail.pop(0)
        return self.pools

    def ready(self) -> tuple[str, ...]:
        return tuple(f"dynamo_{DECODE}_{n}" for n in range(self.pools.decode.ready))

    def blind(self) -> str | None:
        return self.blindness

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        self.asked.append(("loads", self.clock.now_s()))
        assert not self.acting, "a pull while a decision is carried out"
        await self.before_loads()
        load, now_s = Load(gpu_cache_usage_perc=self.kv), self.clock.now_s()
        return {name: Sampled(load, now_s) for name in self.ready() if name not in self.silent}

    async def depth(self) -> Sampled[int] | Missing:
        self.asked.append(("depth", self.clock.now_s()))
        await self.before_depth()
        return Sampled(self.depth_now, self.clock.now_s())

    # --- what the loop does ------------------------------------------------------------------------

    whole = False

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        return await self._act(component, 1, stimulus_id)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        return await self._act(component, -1, stimulus_id)

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Refused:
        self.wholes.append(dict(targets))
        return self.outcome

    async def _act(self, component: str, step: int, stimulus_id: str | None) -> Committed | Refused:
        assert not self.acting, "two decisions are carried out at once"
        self.acts.append((component, step, stimulus_id or "", self.clock.now_s()))
        self.acting += 1
        try:
            await self.before_act()
        finally:
            self.acting -= 1
        return self.outcome

    def on_observation(self, observation: Observation) -> None:
        self.readings.append(observation.reading)

    def on_decision(self, record: DecisionRecord) -> None:
        self.records.append(record)

    # --- for tests ---------------------------------------------------------------------------------

    def start(self, options: PlannerConfig = OPTIONS, *, no_operation: bool = False) -> None:
        self.loop.start(options, LoadPlanner(options), no_operation=no_operation)

    def change(self, options: PlannerConfig) -> None:
        self.loop.change(options, LoadPlanner(options), no_operation=False)

    async def until(self, at_s: float) -> None:
        await self.clock.sleep_until(at_s)

    def decided_at(self) -> list[float]:
        return [record.decision.now_s for record in self.records]

    def rules(self, component: str) -> list[str]:
        return [
            str(reason.rule)
            for record in self.records
            for reason in record.decision.reasons
            if reason.component == component
        ]

    def grown(self, **pools: int) -> WorkerPools:
        """The pools with other numbers of ready workers."""
        assert self.pools.prefill is not None
        prefill, decode = pools.get("prefill", self.pools.prefill.ready), pools.get("decode", self.pools.decode.ready)
        return WorkerPools(
            replace(self.pools.prefill, ready=prefill, gpus_held=prefill),
            replace(self.pools.decode, ready=decode, gpus_held=decode),
        )


async def _at_once() -> None:
    """Answer without waiting."""


def taking(seconds: float) -> Callable[[], Awaitable[None]]:

    async def wait() -> None:
        await asyncio.sleep(seconds)

    return wait


def failing(error: Exception) -> Callable[[], Awaitable[None]]:

    async def fail() -> None:
        raise error

    return fail


def on_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:

    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run

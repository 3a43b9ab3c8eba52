"""Plugins that answer from a script, a registry for them, and the pulls of a small graph."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.notes import About
from dynamo_local.planner.plugins.pipeline import PluginPipeline
from dynamo_local.planner.plugins.registration import Rules
from dynamo_local.planner.plugins.registry import PluginFailed, PluginRow, Registry
from dynamo_local.planner.stages import Answer, PipelineContext, PluginSpec, Stage
from dynamo_local.planner.values import ComponentTarget, Observation, Override, OverrideType, Proposal
from tests.fakes.planner.observations import reading, worker_pools

Says = Callable[[PipelineContext], Answer | Awaitable[Answer]]


def override(*, final: bool = False, kind: OverrideType = OverrideType.SET, **replicas: int) -> Override:
    return Override(tuple(ComponentTarget(role, count, kind) for role, count in replicas.items()), final=final)


def observation(at_s: float, prefill: int = 2, decode: int = 2, **more: Any) -> Observation:
    return Observation(reading(at_s, 0, 0.3), worker_pools(prefill, decode), **more)


class Scripted:
    """A plugin that says what it is told to. `seen` are the contexts and proposals that it was shown."""

    transport, where = "in_process", "a script"

    def __init__(self, says: Says) -> None:
        self.says = says
        self.seen: list[tuple[PipelineContext, tuple[Proposal, ...]]] = []
        self.left: str | None = None

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        self.seen.append((context, tuple(proposals)))
        try:
            async with asyncio.timeout(timeout_s):
                said = self.says(context)
                return await said if isinstance(said, Awaitable) else said
        except TimeoutError:
            raise PluginFailed(f"no answer within {timeout_s:g} s") from None

    async def reset(self, reason: str, timeout_s: float) -> None:
        self.left = reason

    async def close(self) -> None:
        pass


class Plugins:
    """A pipeline with scripted plugins, on the running loop's clock."""

    def __init__(self, *, tick_max_s: float = 30.0, scale_interval_s: float = 0.0) -> None:
        self.told: list[tuple[str, About]] = []
        clock = AsyncioClock()
        rules = Rules(scale_interval_s=scale_interval_s)
        self.registry = Registry(
            clock,
            self._no_connection,
            lambda text, about=None: self.told.append((text, about)),
            rules=rules,
            grid_s=clock.now_s(),
        )
        self.pipeline = PluginPipeline(self.registry, clock, tick_max_s=tick_max_s)
        self._clock = clock

    def add(self, stage: Stage, says: Says | Answer, *, name: str | None = None, **spec: Any) -> Scripted:
        plugin = Scripted(says if callable(says) else lambda _: says)
        self.registry.add(PluginSpec(name or str(stage), stage, **spec), plugin, "", origin="configured")
        return plugin

    async def tick(self, *own: Proposal, predicted: Any = None, at_s: float | None = None) -> dict[str, int]:
        seen = observation(self._clock.now_s() if at_s is None else at_s)
        prediction = await self.pipeline.predict(seen, predicted)
        found = await self.pipeline.targets(seen, prediction, own)
        return {target.sub_component_type: target.replicas for target in found}

    def row(self, plugin_id: str) -> PluginRow:
        return next(row for row in self.registry.rows() if row.plugin_id == plugin_id)

    def total(self, name: str, *labels: str) -> int:
        return self.registry.counters.totals[name][labels]

    @staticmethod
    def _no_connection(endpoint: object) -> Any:
        raise AssertionError("nothing is connected to here")

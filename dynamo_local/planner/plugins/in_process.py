"""Plugins that are Python objects in the arbiter's process. Each runs in a thread of its own, never on the loop."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from dynamo_local.config.planner import InProcessPluginConfig
from dynamo_local.errors import ConfigError, DynamoError
from dynamo_local.planner.plugins.registration import Registering
from dynamo_local.planner.plugins.registry import PluginFailed, in_process
from dynamo_local.planner.stages import Answer, PipelineContext, PluginSpec, Stage, Unusable, shown, usable
from dynamo_local.planner.values import Proposal
from dynamo_local.system.executors import DaemonExecutor

GROUP = "dynamo_local.planner_plugins"


class InProcessPlugin:
    """An object with a method of its stage's name: `predict(context)`, `propose(context)`,
    `reconcile(context, proposals)` or `constrain(context)`. The method may be a coroutine."""

    transport = "in_process"

    def __init__(self, plugin_id: str, instance: object, stage: Stage) -> None:
        self.where = f"{type(instance).__module__}.{type(instance).__qualname__}"
        self._method = getattr(instance, stage, None)
        if not callable(self._method):
            raise ConfigError(f"the planner's plugin {plugin_id}: {self.where} has no method {stage}")
        self._reset = getattr(instance, "reset", None)
        self._thread = DaemonExecutor(f"planner plugin {plugin_id}", threads=1)

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        """See `Plugin`. While its last call has not returned it is not called again."""
        arguments: tuple[Any, ...] = (context, tuple(proposals)) if stage is Stage.RECONCILE else (context,)
        answered = await self._run(self._method, arguments, timeout_s)
        try:
            return usable(stage, answered)
        except Unusable as error:
            raise PluginFailed(f"its answer cannot be used: {error}") from None

    async def reset(self, reason: str, timeout_s: float) -> None:
        """See `Plugin`: its method `reset(reason)`, where it has one."""
        if callable(self._reset):
            try:
                await self._run(self._reset, (reason,), timeout_s)
            except PluginFailed:
                pass  # it is let go of in any case

    async def close(self) -> None: ...

    async def _run(self, method: Any, arguments: tuple[Any, ...], timeout_s: float) -> object:
        def call() -> object:
            answer = method(*arguments)
            return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

        try:
            return await self._thread.run(call, timeout_s, what="it")
        except DynamoError as error:
            raise PluginFailed(str(error)) from None
        except Exception as error:  # whatever somebody else's code raises
            raise PluginFailed(f"{type(error).__name__}: {shown(error)}") from None


async def _awaited(answer: Any) -> object:
    return await answer


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin of this process: what it registers as, and the object; or why it could not be made."""

    name: str
    said: Registering | None = None
    instance: object = None
    fault: str | None = None
    origin: str = "configured"


def installed() -> Iterator[Found]:
    """Those of installed packages: entry points of `GROUP`, each a class with a `PluginSpec` as `plugin`. Blocks."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            made = entry.load()
            spec = made.plugin
            if not isinstance(spec, PluginSpec):
                raise TypeError(f"its attribute `plugin` is a {type(spec).__name__}, and must be a PluginSpec")
            yield Found(entry.name, _said(spec), made(), origin="installed")
        except Exception as error:  # whatever somebody else's code raises
            yield Found(entry.name, fault=f"{type(error).__name__}: {shown(error)}")


def configured(configs: Sequence[InProcessPluginConfig]) -> Iterator[Found]:
    """Those of `plugin_registration.in_process_plugins`. Blocks."""
    for config in configs:
        try:
            made = getattr(importlib.import_module(config.module), config.class_name)
            yield Found(config.plugin_id, in_process(config), made(**config.kwargs))
        except Exception as error:  # whatever somebody else's code raises
            yield Found(config.plugin_id, fault=f"{type(error).__name__}: {shown(error)}")


def _said(spec: PluginSpec) -> Registering:
    return Registering(
        plugin_id=spec.plugin_id,
        plugin_type=spec.stage,
        priority=spec.priority,
        version=spec.version,
        execution_interval_seconds=spec.interval_s,
        hold_policy=spec.hold_policy,
        needs=spec.needs,
        protocol_version=spec.protocol_version,
        requires_produced_fields=spec.requires,
        observation_window_seconds=spec.window_s,
    )

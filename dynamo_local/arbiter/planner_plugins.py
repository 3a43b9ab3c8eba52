"""The planner's plugins in the arbiter: there while the planner runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.notes import Tell
from dynamo_local.planner.plugins.pipeline import PluginPipeline
from dynamo_local.planner.plugins.registry import Counters, PluginRow
from dynamo_local.planner.plugins.service import PluginService

NOBODY: Mapping[str, Any] = {"plugins": [], "not_taken": {}, "gateway": None, "last_tick": None}


class PlannerPlugins:
    """The plugins of one run. `runtime` is where the gateway's socket is; secrets are read from `environ` and files."""

    def __init__(self, clock: Clock, *, environ: Mapping[str, str], runtime: Path, tell: Tell) -> None:
        self._clock = clock
        self._environ = environ
        self._runtime = runtime
        self._tell = tell
        self._service: PluginService | None = None

    async def start(self, options: PlannerConfig) -> PluginPipeline:
        """Those of these options. Raises `ConfigError` where the gateway cannot listen, or a secret cannot be read."""
        service = PluginService(
            options.scheduling,
            options.plugin_registration,
            clock=self._clock,
            environ=self._environ,
            runtime=self._runtime,
            tell=self._tell,
        )
        try:
            await service.start()
        except BaseException:
            await service.stop()
            raise
        self._service = service
        return service.pipeline

    async def stop(self) -> None:
        """All plugins leave."""
        service, self._service = self._service, None
        if service is not None:
            await service.stop()

    def status(self) -> dict[str, Any]:
        """For the planner's status."""
        return dict(NOBODY) if self._service is None else self._service.status()

    def rows(self) -> tuple[PluginRow, ...]:
        """For metrics."""
        return () if self._service is None else self._service.rows()

    @property
    def counters(self) -> Counters:
        """The plugin service of this start of the planner."""
        return Counters() if self._service is None else self._service.registry.counters

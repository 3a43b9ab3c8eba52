"""How a plugin is asked, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_local.errors import DynamoError
from dynamo_local.planner.pipeline.context import PipelineContext
from dynamo_local.planner.pipeline.stages import Answer, Stage
from dynamo_local.planner.values.proposals import Proposal


class PluginFailed(DynamoError):
    """A plugin gave no answer that can be used: it was too late, away, or wrong. It contributes nothing."""

    code = "plugin_failed"


class Plugin(Protocol):
    """One plugin. At most one call to it is under way."""

    @property
    def transport(self) -> str:
        """`in_process`, `unix` or `grpc`."""
        ...

    @property
    def where(self) -> str:
        """Where it runs: its endpoint, or its class."""
        ...

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        """Its answer. `proposals` are for RECONCILE. Raises `PluginFailed`, and never takes longer than `timeout_s`."""
        ...

    async def reset(self, reason: str, timeout_s: float) -> None:
        """The planner lets go of it: it may forget what it has learned. Raises nothing."""
        ...

    async def close(self) -> None:
        """End the connection to it."""
        ...

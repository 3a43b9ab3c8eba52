"""Plugins as processes of their own, and a planner's side for them without a planner."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from dynamo_local.clock import AsyncioClock
from dynamo_local.config.planner import PluginRegistrationConfig, SchedulingConfig
from dynamo_local.planner.plugins import codec as wire
from dynamo_local.planner.plugins.registration import CircuitState
from dynamo_local.planner.plugins.service import PluginService
from dynamo_local.planner.values import Proposal
from tests.fakes.planner.plugins import observation

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "planner_plugin" / "office_hours.py"
HOSTILE = ROOT / "tests" / "fakes" / "planner" / "hostile_plugin.py"
LINE_S = 60.0


@asynccontextmanager
async def process(*words: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Process]:
    """`python WORDS`, killed at the end if it still runs."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def ready(made: Process) -> str:
    """The rest of the line by which it says that it can be called."""
    assert made.stdout is not None
    async with asyncio.timeout(LINE_S):
        line = (await made.stdout.readline()).decode()
    assert line, f"it ended with {await made.wait()}"
    return line.partition(" ")[2].strip()


class PlannerSide:
    """A `PluginService` and ticks of a graph with two workers of each role. `folder` is short enough for sockets."""

    def __init__(self, folder: Path, scheduling: Mapping[str, Any], registration: Mapping[str, Any], **environ: str):
        self.folder = folder
        self.told: list[str] = []
        self._clock = AsyncioClock()
        self.service = PluginService(
            SchedulingConfig(**scheduling),
            PluginRegistrationConfig(**registration),
            clock=self._clock,
            environ=environ,
            runtime=folder,
            tell=lambda text, about=None: self.told.append(text),
        )

    async def tick(self, *own: Proposal, **more: Any) -> dict[str, int]:
        pipeline, seen = self.service.pipeline, observation(self._clock.now_s(), **more)
        prediction = await pipeline.predict(seen, None)
        return {t.sub_component_type: t.replicas for t in await pipeline.targets(seen, prediction, own)}

    @property
    def gateway(self) -> str:
        where = self.service.status()["gateway"]
        assert isinstance(where, str)
        return where

    def row(self, plugin_id: str) -> dict[str, Any]:
        """As it is shown; {} for one that is not there."""
        rows = {row["plugin_id"]: row for row in self.service.status()["plugins"]}
        return rows.get(plugin_id, {})

    def circuit(self, plugin_id: str) -> CircuitState:
        return CircuitState[self.row(plugin_id)["circuit_state"]]


@asynccontextmanager
async def planner_side(
    scheduling: Mapping[str, Any] | None = None, registration: Mapping[str, Any] | None = None, **environ: str
) -> AsyncIterator[PlannerSide]:
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    side = PlannerSide(folder, scheduling or {}, registration or {}, **environ)
    try:
        await side.service.start()
        yield side
    finally:
        await side.service.stop()
        shutil.rmtree(folder)


async def call(gateway: str, method: str, raw: bytes | None = None, **fields: Any) -> Any:
    """A call of the registry, with these fields or these bytes. Raises `grpc.aio.AioRpcError`."""
    path, request, response = wire.methods("PluginRegistry")[method]
    target = "unix:" + gateway[7:] if gateway.startswith("unix://") else gateway.removeprefix("grpc://")
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        sent = request(**fields).SerializeToString() if raw is None else raw
        return response.FromString(await channel.unary_unary(path)(sent, timeout=LINE_S))

"""The runtime `none`: a process. It is ready when it has lived for a moment, or answers at a URL; SIGTERM ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.child import Child
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.launch import NONE
from dynamo_local.components.commands.probe import get, wait_ok
from dynamo_local.components.commands.runner import ChildSilent, CommandWorker, Sample, UnroutedDriver
from dynamo_local.core.types import Load, Role
from dynamo_local.sdk.context import WorkerContext

HTTP_ERROR = 500


class NoneConfig(CommandConfig):
    """Keys of a section with `runtime: none`."""

    settle_s: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Without a `health_url`: seconds that it must have lived to be taken for ready."""
    health_url: str | None = None
    """Ready when this answers 200, e.g. `http://127.0.0.1:{port:http}/health`; silent: hung."""

    @model_validator(mode="after")
    def _url_fits(self) -> Self:
        if self.health_url is None:
            return self
        if not self.health_url.startswith("http://"):
            raise ValueError(f"health_url must begin with http://, not {self.health_url!r}")
        placeholders.check([self.health_url], model=self.model)
        missing = set(placeholders.port_names([self.health_url])) - set(placeholders.port_names(self.words))
        if missing:
            raise ValueError(f"health_url has {{port:{min(missing)}}}, but the command does not listen there")
        return self


class NoneDriver(UnroutedDriver):
    """`base.Driver` of a process of which only its life is known: it has no requests of ours to finish."""

    def __init__(self, context: WorkerContext, child: Child) -> None:
        config: NoneConfig = context.settings
        self._settle_s = config.settle_s
        self._role = config.role
        self._url: str | None = None
        if config.health_url is not None:
            (self._url,) = placeholders.fill(
                [config.health_url],
                namespace=context.namespace,
                watcher=context.watcher_name,
                model=config.model,
                ports=child.launch.ports,
            )

    async def wait_ready(self) -> None:
        if self._url is not None:
            await wait_ok(self._url)
        else:
            await asyncio.sleep(self._settle_s)

    def facts(self) -> Mapping[str, str]:
        if self._role is Role.FRONTEND and self._url is not None:
            return {"frontend_url": f"http://{urlsplit(self._url).netloc}"}
        return {}

    async def sample(self) -> Sample:
        if self._url is not None:
            status, _body = await get(self._url)
            if status >= HTTP_ERROR:
                raise ChildSilent(f"{self._url} answers {status}")
        return Sample(Load(), in_flight=0)


class ProcessWorker(CommandWorker):
    """A worker that is a process."""

    runtime = NONE

    def make_driver(self, context: WorkerContext, child: Child) -> NoneDriver:
        return NoneDriver(context, child)


CONFIG: Any = NoneConfig
COMPONENT = ProcessWorker

"""An application on a Frontend's port, as part of a worker process: its start, drain and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from starlette.types import ASGIApp

from dynamo_local.components.http_metrics import HttpMetrics
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import access
from dynamo_local.components.openai.port.shared import SharedPort
from dynamo_local.components.openai.port.siblings import Siblings
from dynamo_local.components.openai.route import Activity, HttpDeps
from dynamo_local.components.openai.server import HttpServer
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.sdk.context import Work, WorkerContext
from dynamo_local.system.cancelling import ended

logger = logging.getLogger(__name__)


class Serving:
    """Held by a Frontend's component. `stop` may be called at any time, also after a start that failed."""

    def __init__(self) -> None:
        self._server: HttpServer | None = None
        self._port: SharedPort | None = None
        self._follow: list[asyncio.Task[None]] = []

    async def open(self, context: WorkerContext, settings: FrontendConfig) -> SharedPort:
        """The port, which siblings may have, too. Raises `ConfigError` where it cannot be had."""
        port = SharedPort(settings, HttpMetrics(), _siblings(context))
        try:
            await port.open()
        except BaseException:
            await port.close()
            raise
        self._port = port
        return port

    async def start(self, context: WorkerContext, deps: HttpDeps, app: ASGIApp, *more_models: ModelsView) -> None:
        """After `open`: follow the models, listen, announce the URL, and take part in the worker's drain."""
        port = self._port
        assert port is not None
        server = self._server = HttpServer(app, port.sock, tls=access.tls_of(deps.settings), shared=True)
        views = (deps.models, *more_models)
        self._follow = [asyncio.create_task(view.follow(context.kv), name="models-view") for view in views]
        if deps.keys is not None:
            self._follow.append(asyncio.create_task(deps.keys.follow(), name="api-keys"))
        await server.start()
        port.served_by(server)
        self._follow.append(asyncio.create_task(port.follow(), name="shared-port"))
        context.vital(server.wait_failed(), "the HTTP server")
        context.on_ready(port.ready)
        context.on_resume(port.resume)

        async def drained() -> None:
            # The socket stays open until the shutdown: the drain may be taken back.
            await port.leave()
            await _quiet(deps.activity, port)

        context.on_drain(drained)
        context.set_work_source(lambda: Work(deps.activity.request_ids))
        context.set_load_source(deps.load)

        async def counters() -> Mapping[str, float]:
            return deps.metrics.counters()

        context.observe(counters, requests=lambda window_s: deps.metrics.recent.of(window_s, deps.clock.now_s()))
        await context.announce(frontend_url=server.url)
        logger.info("serving OpenAI's API at %s/v1", server.url)

    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        if self._server is not None:
            await self._server.stop()
        elif self._port is not None:
            self._port.sock.close()
        await ended(*self._follow)
        if self._port is not None:
            await self._port.close()


def _siblings(context: WorkerContext) -> Siblings | None:
    """None where this worker cannot have any: its port is its own then."""
    folder = context.siblings_folder
    try:
        return None if folder is None else Siblings(folder, context.watcher_name)
    except OSError as error:
        logger.warning("the port cannot be shared with other workers of this component: %s", error)
        return None


async def _quiet(activity: Activity, port: SharedPort) -> None:
    """Return when nothing is under way, and connections that clients have kept had their time."""
    await activity.wait_idle()
    await port.kept_connections()
    await activity.wait_idle()

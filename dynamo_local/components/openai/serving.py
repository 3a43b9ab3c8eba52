"""An application on a Frontend's port, as part of a worker process: its start, drain and stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

from starlette.types import ASGIApp

from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import access
from dynamo_local.components.openai.route import HttpDeps
from dynamo_local.components.openai.server import HttpServer
from dynamo_local.sdk.context import Work, WorkerContext

logger = logging.getLogger(__name__)


class Serving:
    """Held by a Frontend's component. `stop` may be called without `start`, or after one that failed."""

    def __init__(self) -> None:
        self._server: HttpServer | None = None
        self._follow: list[asyncio.Task[None]] = []

    async def start(
        self, context: WorkerContext, deps: HttpDeps, app: ASGIApp, sock: socket.socket, *more_models: ModelsView
    ) -> None:
        """Follow the models, listen, announce the URL, and take part in the worker's drain."""
        server = self._server = HttpServer(app, sock, tls=access.tls_of(deps.settings))
        views = (deps.models, *more_models)
        self._follow = [asyncio.create_task(view.follow(context.kv), name="models-view") for view in views]
        if deps.keys is not None:
            self._follow.append(asyncio.create_task(deps.keys.follow(), name="api-keys"))
        await server.start()
        context.vital(server.wait_failed(), "the HTTP server")
        # The socket stays open until the shutdown: while draining it answers 503, and the drain may be taken back.
        context.on_drain(deps.activity.wait_idle)
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
        for task in self._follow:
            task.cancel()
        await asyncio.gather(*self._follow, return_exceptions=True)

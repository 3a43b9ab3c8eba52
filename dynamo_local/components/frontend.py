"""The `Frontend` service: OpenAI's HTTP API in front of the Processor."""

from __future__ import annotations

import asyncio
import logging

from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai.app import FrontendConfig, FrontendDeps, create_app
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.components.processor import Processor
from dynamo_local.core.types import Load
from dynamo_local.sdk import async_on_start, depends, on_shutdown, service
from dynamo_local.sdk.context import Work, WorkerContext, current_context

logger = logging.getLogger(__name__)

__all__ = ["Frontend", "FrontendConfig"]


@service(dynamo={"namespace": "dynamo"}, config=FrontendConfig)
class Frontend:
    """Serves HTTP itself; it has no endpoints of its own on the data plane."""

    processor = depends(Processor)

    max_workers = 1
    """A second worker could not listen on the same port."""

    def __init__(self) -> None:
        self._server: HttpServer | None = None
        self._follow: asyncio.Task[None] | None = None

    @async_on_start
    async def start(self) -> None:
        """Bind, listen, announce the URL. Raises `ConfigError` when the port or the host cannot be had."""
        context: WorkerContext = current_context()
        settings: FrontendConfig = context.settings or FrontendConfig()
        sock = bind_socket(settings.host, settings.port)
        models = ModelsView(context.namespace, expected=settings.served_model_name)
        deps = FrontendDeps(
            chat=self.processor.endpoint("chat/completions"),
            completions=self.processor.endpoint("completions"),
            models=models,
            settings=settings,
            draining=context.draining,
        )
        server = HttpServer(create_app(deps), sock)
        self._server = server
        self._follow = asyncio.create_task(models.follow(context.kv), name="models-view")
        await server.start()
        context.vital(server.wait_failed(), "the HTTP server")
        # The socket stays open until the shutdown: while draining it answers 503, and the drain may be taken back.
        context.on_drain(deps.activity.wait_idle)
        context.set_work_source(lambda: Work(deps.activity.request_ids))
        context.set_load_source(lambda: _load(deps))
        await context.announce(frontend_url=server.url)
        logger.info("serving OpenAI's API at %s/v1", server.url)

    @on_shutdown
    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        if self._server is not None:
            await self._server.stop()
        if self._follow is not None:
            self._follow.cancel()
            await asyncio.gather(self._follow, return_exceptions=True)


def _load(deps: FrontendDeps) -> Load:
    """HTTP requests: `num_requests_waiting` have no token yet, `request_active_slots` are the others in the house."""
    waiting = deps.metrics.queued
    return Load(
        request_active_slots=max(0, deps.activity.open - waiting),
        request_total_slots=deps.settings.max_inflight,
        num_requests_waiting=waiting,
    )

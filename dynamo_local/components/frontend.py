"""The `Frontend` service: OpenAI's HTTP API in front of the Processor."""

from __future__ import annotations

import asyncio
import logging

from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai.app import FrontendConfig, FrontendDeps, create_app
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.components.processor import Processor
from dynamo_local.sdk import async_on_start, depends, on_shutdown, service
from dynamo_local.sdk.context import WorkerContext, current_context

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

        async def drain() -> None:
            await deps.activity.wait_idle()
            await server.stop()

        context.on_drain(drain)
        await context.announce(frontend_url=server.url)
        logger.info("serving OpenAI's API at %s/v1", server.url)

    @on_shutdown
    async def stop(self) -> None:
        """Close what a drain has not closed already."""
        if self._server is not None:
            await self._server.stop()
        if self._follow is not None:
            self._follow.cancel()
            await asyncio.gather(self._follow, return_exceptions=True)

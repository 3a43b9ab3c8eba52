"""The `Frontend` service: OpenAI's HTTP API in front of the Processor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.components.processor import Processor
from dynamo_local.sdk import service
from dynamo_local.sdk.context import WorkerContext, current_context
from dynamo_local.sdk.service import async_on_start, depends, on_shutdown

if TYPE_CHECKING:
    from dynamo_local.components.openai.port import Serving

__all__ = ["Frontend", "FrontendConfig"]


@service(dynamo={"namespace": "dynamo"}, config=FrontendConfig)
class Frontend:
    """Serves HTTP itself. It has no endpoints on the data plane."""

    processor = depends(Processor)

    max_workers = None
    """Any number: they share one listening socket (`components.openai.port`)."""

    def __init__(self) -> None:
        self._serving: Serving | None = None

    @async_on_start
    async def start(self) -> None:
        """Bind, listen, announce the URL. Raises `ConfigError` where port, keys or certificate cannot be had."""
        from dynamo_local.components.models_view import ModelsView, adapters_prefix
        from dynamo_local.components.openai import access
        from dynamo_local.components.openai.app import create_app
        from dynamo_local.components.openai.generation import FrontendDeps
        from dynamo_local.components.openai.port import Serving

        context: WorkerContext = current_context()
        settings: FrontendConfig = context.settings or FrontendConfig()
        keys = access.take_keys(settings, os.environ)
        serving = self._serving = Serving()
        port = await serving.open(context, settings)
        adapters = ModelsView(context.namespace, prefix=adapters_prefix(context.namespace))
        clock = AsyncioClock()
        deps = FrontendDeps(
            chat=self.processor.endpoint("chat/completions"),
            completions=self.processor.endpoint("completions"),
            api=self.processor.endpoint("api"),
            texts=self.processor.endpoint("texts"),
            models=ModelsView(context.namespace, expected=settings.served_model_name),
            adapters=adapters,
            settings=settings,
            keys=keys,
            metrics=port.metrics,
            draining=port.refusing,
            page=port.page,
            clock=clock,
            recorder=serving.recorder(context, settings, clock),
        )
        await serving.start(context, deps, create_app(deps), adapters)

    @on_shutdown
    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        if self._serving is not None:
            await self._serving.stop()

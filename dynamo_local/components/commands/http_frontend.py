"""The `Frontend` of a graph of HTTP servers (`runtime: http`): OpenAI's API, passed on to them.

It finds them by the models that their workers have registered, so it depends on no service, and new ones need no
configuration here.
"""

from __future__ import annotations

import contextlib
import os

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.models_view import ModelsView, prefill_models_prefix
from dynamo_local.components.openai import access
from dynamo_local.components.openai.held import HeldRequests
from dynamo_local.components.openai.port import Serving
from dynamo_local.components.proxy.app import ProxyDeps, create_app
from dynamo_local.components.proxy.messages import HttpFrontendConfig
from dynamo_local.components.proxy.pool import DispatcherFactory, ModelDispatchers
from dynamo_local.sdk import service
from dynamo_local.sdk.context import current_context
from dynamo_local.sdk.service import async_on_start, on_shutdown


@service(name="Frontend", dynamo={"role": "frontend"}, config=HttpFrontendConfig)
class ProxyFrontend:
    """Serves HTTP itself. It has no endpoints on the data plane."""

    max_workers = None
    """Any number: they share one listening socket (`components.openai.port`)."""

    def __init__(self) -> None:
        self._serving = Serving()
        self._stack = contextlib.AsyncExitStack()

    @async_on_start
    async def start(self) -> None:
        """Bind, listen, announce the URL. Raises `ConfigError` where port, keys or certificate cannot be had."""
        context = current_context()
        settings: HttpFrontendConfig = context.settings or HttpFrontendConfig()
        keys = access.take_keys(settings, os.environ)
        port = await self._serving.open(context, settings)
        maker = DispatcherFactory(context, settings.router, settings.max_tries)
        self._stack.push_async_callback(maker.close)
        models = ModelsView(context.namespace, expected=settings.served_model_name)
        prefilling = ModelsView(context.namespace, prefix=prefill_models_prefix(context.namespace))
        clock = AsyncioClock()
        deps = ProxyDeps(
            servers=ModelDispatchers(models, maker.make),
            prefill=ModelDispatchers(prefilling, maker.make),
            options=settings,
            models=models,
            settings=settings,
            keys=keys,
            metrics=port.metrics,
            draining=port.refusing,
            page=port.page,
            clock=clock,
            recorder=self._serving.recorder(context, settings, clock),
            page_feed=self._serving.page_feed(context, settings, clock),
            held=HeldRequests(settings.models, models, None, clock) if settings.models else None,
        )
        await self._serving.start(context, deps, create_app(deps), prefilling)

    @on_shutdown
    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        await self._serving.stop()
        await self._stack.aclose()

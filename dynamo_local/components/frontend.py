"""The `Frontend` service: OpenAI's HTTP API in front of the Processor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.components.processor import Processor
from dynamo_local.sdk import service
from dynamo_local.sdk.context import WorkerContext, current_context
from dynamo_local.sdk.service import Dependency, async_on_start, depends, on_shutdown

if TYPE_CHECKING:
    from dynamo_local.components.models_view import ModelsView
    from dynamo_local.components.openai.port import Serving
    from dynamo_local.ports import EndpointClient
    from dynamo_local.sdk.service import DynamoService

__all__ = ["Frontend", "FrontendConfig"]


def _processors(frontend: type) -> dict[str, DynamoService[Any]]:
    """The Frontend's attributes that are clients of Processors; several where it serves several models."""
    members = {name: member for base in reversed(frontend.__mro__) for name, member in vars(base).items()}
    return {
        attribute: member.on
        for attribute, member in members.items()
        if isinstance(member, Dependency) and issubclass(member.on.inner, cast(Any, Processor).inner)
    }


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
        from dynamo_local.components.openai.held import HeldRequests
        from dynamo_local.components.openai.port import Serving

        context: WorkerContext = current_context()
        settings: FrontendConfig = context.settings or FrontendConfig()
        keys = access.take_keys(settings, os.environ)
        serving = self._serving = Serving()
        port = await serving.open(context, settings)
        models = ModelsView(context.namespace, expected=settings.served_model_name)
        adapters = ModelsView(context.namespace, prefix=adapters_prefix(context.namespace))
        clock = AsyncioClock()

        def endpoint_of(name: str) -> EndpointClient:
            return self._endpoint(name, models, adapters)

        deps = FrontendDeps(
            chat=endpoint_of("chat/completions"),
            completions=endpoint_of("completions"),
            api=endpoint_of("api"),
            texts=endpoint_of("texts"),
            models=models,
            adapters=adapters,
            settings=settings,
            keys=keys,
            metrics=port.metrics,
            draining=port.refusing,
            page=port.page,
            clock=clock,
            recorder=serving.recorder(context, settings, clock),
            page_feed=serving.page_feed(context, settings, clock),
            held=HeldRequests(settings.models, models, adapters, clock) if settings.models else None,
        )
        await serving.start(context, deps, create_app(deps), adapters)

    def _endpoint(self, name: str, models: ModelsView, adapters: ModelsView) -> EndpointClient:
        """That endpoint of the Processor; of several, the one whose model a request names."""
        processors = _processors(type(self))
        if len(processors) == 1:
            only: EndpointClient = getattr(self, next(iter(processors))).endpoint(name)
            return only
        from dynamo_local.components.openai.by_model import EndpointByModel

        clients: dict[str, EndpointClient] = {}
        for attribute, processor in processors.items():
            client = getattr(self, attribute).endpoint(name)
            clients[processor.name] = clients[processor.depends["worker"].on.name] = client
        return EndpointByModel(clients, models, adapters)

    @on_shutdown
    async def stop(self) -> None:
        """Stop listening, and end the connections that are idle."""
        if self._serving is not None:
            await self._serving.stop()

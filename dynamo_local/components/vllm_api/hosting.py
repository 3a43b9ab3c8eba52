"""A Processor's vLLM API, asked by the Frontend. It is made for the first request that needs it: its import takes
seconds, in which the process does little else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from dynamo_local.components import messages
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.routing.dispatch import Batch, Dispatcher
from dynamo_local.components.vllm_api.exchange import Exchange, answer, current
from dynamo_local.components.vllm_api.messages import ApiRequest
from dynamo_local.engines.vllm.api import logs
from dynamo_local.errors import ConfigError, DynamoError, NoWorkers
from dynamo_local.runtime.requests.context import current_request

if TYPE_CHECKING:  # its import takes seconds
    from dynamo_local.engines.vllm.api.graph_core import CoreCall
    from dynamo_local.engines.vllm.api.serving import VllmApi

log = logging.getLogger(__name__)


class ApiHost:
    """Answers what vLLM's API answers. `serve_args` are options of `vllm serve`, as the section gives them."""

    def __init__(
        self, dispatcher: Dispatcher, models: ModelsView, model: str, serve_args: Mapping[str, Any] | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._models = models
        self._model = model
        self._serve_args = dict(serve_args or {})
        self._building: asyncio.Task[ASGIApp] | None = None
        self._api: VllmApi | None = None

    async def run(self, request: ApiRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The items of `vllm_api.messages`. Raises `NoWorkers`, `ConfigError`, or what `answer` raises."""
        app = await self._app()
        async with contextlib.aclosing(answer(app, request, Exchange(request.request_id))) as items:
            async for item in items:
                yield item

    async def close(self) -> None:
        """End what is under way."""
        if self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
        if self._api is not None:
            self._api.close()

    async def _app(self) -> ASGIApp:
        if self._building is None:
            self._building = asyncio.create_task(self._build(), name="vLLM's API")
        building = self._building
        try:
            return await asyncio.shield(building)
        except DynamoError:
            if self._building is building:
                self._building = None  # with the next request, workers may say something else
            raise

    async def _build(self) -> ASGIApp:
        served = self._models.get(self._model)
        if served is None or served.engine is None or served.max_model_len is None:
            raise NoWorkers(f"no ready worker serves the model {self._model!r} with vLLM")
        told, max_model_len = served.engine, served.max_model_len
        started_s = asyncio.get_running_loop().time()

        def made() -> VllmApi:
            from dynamo_local.engines.vllm.api.serving import Engine, VllmApi
            from dynamo_local.engines.vllm.options import words_of

            engine = Engine(told.words, max_model_len, told.tasks, told.version)
            return VllmApi.build(engine, words_of(self._serve_args), self._send)

        try:
            with logs.as_they_were():
                self._api = await asyncio.to_thread(made)
                app = await self._api.app()
        except ImportError as error:
            raise ConfigError(f"the workers run vLLM, whose API needs it in the Processor, too: {error}") from error
        except ConfigError as error:
            log.error("vLLM's API cannot be served: %s", error)
            raise
        log.info("vLLM's API was ready after %.1f s", asyncio.get_running_loop().time() - started_s)
        return app

    async def _send(self, call: CoreCall) -> AsyncGenerator[Batch, None]:
        """A request to a worker, for the HTTP request in whose context this runs."""
        exchange, request = current.get(), current_request()
        request_id = exchange.next_id()
        exchange.asked(len(call.token_ids))
        payload = {
            **messages.generate_request(request_id, list(call.token_ids), call.sampling),
            "core": call.core,
            "prefill_here": call.prefill_here,
        }
        timeout_s = None if request is None else request.remaining_s()
        batches = self._dispatcher.send(
            payload, request_id=request_id, tokens=call.sampling.max_tokens, timeout_s=timeout_s
        )
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    exchange.came(batch)
                    yield batch
        except DynamoError as error:
            exchange.failure = exchange.failure or error
            raise

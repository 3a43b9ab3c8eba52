"""A Processor's vLLM API, asked by the Frontend. It is made for the first request that needs it: its import takes
seconds, in which the process does little else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from starlette.types import ASGIApp, Message

from dynamo_local.components import messages
from dynamo_local.components.dispatcher import Batch, Dispatcher
from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.models_view import ModelsView
from dynamo_local.errors import ConfigError, DynamoError, EngineError, NoWorkers
from dynamo_local.system import tracing
from dynamo_local.transport.requests.handlers import current_request
from dynamo_local.transport.requests.stream import Take, batches_of

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.api_server import CoreCall, VllmApi


# --- One HTTP request that vLLM's API answers in this process, and its requests to workers.
#
# An ASGI application sends its status before it knows whether there will be an answer. The status is held until the
# first bytes of the body. An error of a worker or the graph comes in their place: "full" must be able to become a 429.

_KEPT: Final = frozenset({"content-length", "transfer-encoding", "connection"})
"""Headers that whoever sends the answer to the client says itself."""

MAX_UNREAD: Final = 256
"""Pieces of an answer that wait for a Frontend that does not keep up; then the answer waits."""


class Exchange:
    """One HTTP request, as the task that answers it and those that ask workers know it."""

    def __init__(self, request_id: str, lost: int = 0) -> None:
        self.request_id = request_id
        self.lost = lost
        self.failure: DynamoError | None = None
        self._calls = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens: int | None = None
        self._kv_hit_rate: float | None = None
        self._migrations = 0

    def next_id(self) -> str:
        """A name for one more request to a worker: the client's for the first, so that logs can be followed."""
        self._calls += 1
        return self.request_id if self._calls == 1 else f"{self.request_id}.{self._calls}"

    def sent(self, prompt_tokens: int) -> None:
        """A prompt went to a worker. Several answers to one prompt share it; the longest counts."""
        self._prompt_tokens = max(self._prompt_tokens, prompt_tokens)

    def came(self, items: list[Mapping[str, Any]]) -> None:
        """From a worker."""
        for item in items:
            self._tokens += len(item["token_ids"])
            self._kv_hit_rate = item.get("kv_hit_rate", self._kv_hit_rate)
            if (cached := item.get("num_cached_tokens")) is not None:
                self._cached_tokens = max(cached, self._cached_tokens or 0)

    def migrated(self) -> None:
        """An answer goes on at another worker."""
        self._migrations += 1

    def news(self) -> dict[str, Any]:
        """The counts since the last call."""
        counted = {
            "tokens": self._tokens,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "migrations": self._migrations,
        }
        item: dict[str, Any] = {name: count for name, count in counted.items() if count}
        if self._kv_hit_rate is not None:
            item["kv_hit_rate"] = self._kv_hit_rate
        self._tokens = self._prompt_tokens = self._migrations = 0
        self._cached_tokens = self._kv_hit_rate = None
        return item


current: ContextVar[Exchange] = ContextVar("dynamo_exchange")


async def answer(app: ASGIApp, request: ApiRequest, exchange: Exchange) -> AsyncGenerator[dict[str, Any], None]:
    """The items of the answer; closed, it cancels the application.

    Raises what a worker failed with, or `EngineError` where the application ended without an answer.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_UNREAD)
    current.set(exchange)
    task = asyncio.create_task(_run(app, request, messages), name=f"vLLM API {request.request_id}")
    start: dict[str, Any] | None = None
    begun = False
    try:
        while (message := await messages.get()) is not None:
            if exchange.failure is not None:
                raise exchange.failure
            if message["type"] == "http.response.start":
                start = _start(message)
                continue
            body, more = message.get("body", b""), message.get("more_body", False)
            if start is not None and not begun and (body or not more):
                begun = True
                yield start
            if body:
                yield {"body": body, **exchange.news()}
            if not more:
                return
        if exchange.failure is not None:
            raise exchange.failure
        raise EngineError(f"vLLM's API gave no answer to {request.path}; the Processor's log says why")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # it is told as the missing end of the answer
            await task


async def _run(app: ASGIApp, request: ApiRequest, messages: asyncio.Queue[Message | None]) -> None:
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # a client that leaves is told by the end of this task
        raise AssertionError("unreachable: only a cancellation ends the wait")

    try:
        await app(_scope(request), receive, messages.put)
    finally:
        with contextlib.suppress(asyncio.QueueFull):
            messages.put_nowait(None)


def _start(message: Message) -> dict[str, Any]:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
    return {
        "status": message["status"],
        "headers": {name: value for name, value in headers.items() if name not in _KEPT},
        "stream": headers.get("content-type", "").startswith("text/event-stream"),
    }


def _scope(request: ApiRequest) -> dict[str, Any]:
    headers = [*request.headers]
    if (carrier := tracing.carrier()) is not None:  # ours, in the place of the client's
        headers = [pair for pair in headers if pair[0] not in carrier] + list(carrier.items())
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
        "state": {},
    }


# --- Restores the process's log settings, which vLLM changes when its API is made. Imports no vLLM.


@contextlib.contextmanager
def as_they_were() -> Iterator[None]:
    """vLLM's `suppress_logging`, which its parser uses, is not undone after an error: nobody could log any more."""
    disabled = logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(disabled)


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
        async with contextlib.aclosing(answer(app, request, Exchange(request.request_id, request.lost))) as items:
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
        api, max_model_len = served.engine, served.max_model_len
        started_s = asyncio.get_running_loop().time()

        def made() -> VllmApi:
            from dynamo_local.engines.vllm.api_server import Engine, VllmApi
            from dynamo_local.engines.vllm.options import words_of

            engine = Engine(api.words, max_model_len, api.tasks, api.version)
            return VllmApi.build(engine, words_of(self._serve_args), self._send)

        try:
            with as_they_were():
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
        exchange.sent(len(call.token_ids))
        timeout_s = None if request is None else request.remaining_s()
        tokens = call.sampling.max_tokens
        given: list[int] = []

        def resume() -> dict[str, Any] | None:
            if (rest := call.continued(given)) is None:
                return None
            exchange.migrated()
            return {**_payload(request_id, rest), "generated": len(given)}

        async def pumping(take: Take) -> None:
            def taken(batch: Batch) -> Awaitable[None] | None:
                for item in batch:
                    given.extend(item["token_ids"])
                return take(batch)

            await self._dispatcher.pump(
                _payload(request_id, call),
                taken,
                request_id=request_id,
                tokens=tokens,
                timeout_s=timeout_s,
                resume=resume,
                lost=exchange.lost,
            )

        try:
            async with contextlib.aclosing(batches_of(pumping)) as batches:
                async for batch in batches:
                    exchange.came(batch)
                    yield batch
        except DynamoError as error:
            exchange.failure = exchange.failure or error
            raise


def _payload(request_id: str, call: CoreCall) -> dict[str, Any]:
    return {
        **messages.generate_request(request_id, list(call.token_ids), call.sampling),
        "core": call.core,
        "prefill_here": call.prefill_here,
        "lora_id": call.lora_id,
    }

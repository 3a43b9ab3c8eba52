"""The Frontend's side: a POST for a model whose engine has an API of its own goes to the Processor as it came.

Which parameters there are, what is wrong with them, and what the answer looks like, is the engine's business alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_local.components.http_metrics import Endpoint, RequestObserver
from dynamo_local.components.limits import shortened
from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.models_view import Availability
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.openai.generation import (
    FrontendDeps,
    GenerationRoute,
    close,
    migrations_header,
    until_answered,
)
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.requests import ParsedRequest
from dynamo_local.components.openai.route import ModelRoute
from dynamo_local.errors import DeadlineExceeded, WorkerLost
from dynamo_local.ports import EndpointClient, ResponseStream
from dynamo_local.transport.requests.stream import pump

PATHS: Final[Mapping[str, Endpoint]] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "tokenize",
    "/v1/embeddings": "embeddings",
    "/pooling": "pooling",
    "/classify": "pooling",
    "/score": "pooling",
    "/v1/score": "pooling",
    "/rerank": "pooling",
    "/v1/rerank": "pooling",
    "/v2/rerank": "pooling",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
}
"""The paths on which `vllm serve` answers about a model, and how each is counted."""

_CONNECTION: Final = frozenset(
    {"authorization", "proxy-authorization", "cookie", "connection", "host", "transfer-encoding", "expect", "upgrade"}
)
"""Headers that are not passed on."""


class _Known(msgspec.Struct):
    """The two things that the Frontend wants to know of a body."""

    model: Any = None
    stream: Any = None


_decoder: Final = msgspec.json.Decoder(_Known)
_keys: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

PLAIN: Final = frozenset(
    {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop", "seed"}
    | {"temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos"}
    | {"min_tokens", "user"}
)
"""Parameters of a request that may be answered without the engine's API (`plain-requests: light`)."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    """The request that is passed on. `model` is a served one, or one for whose worker the request is held. The engine's
    API judges the name that the client gave."""

    model: str
    stream: bool
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    method: str = "POST"
    query: str = ""


def with_engine_api(light: Mapping[str, ASGIApp], deps: FrontendDeps) -> dict[str, ASGIApp]:
    """The routes, by path: each asks the engine's API where a model has one, else the light one, if any."""
    client = deps.api
    if client is None:
        return dict(light)
    routes: dict[str, ASGIApp] = dict(light)
    for path, endpoint in PATHS.items():
        engine, own = EngineApiRoute(endpoint, client, deps), light.get(path)
        if deps.settings.plain_requests == "light" and isinstance(own, GenerationRoute):
            engine = PlainOrEngine(endpoint, client, deps, own)
        routes[path] = _either(engine, own)
    return routes


def _either(engine: EngineApiRoute, light: ASGIApp | None) -> ASGIApp:
    class Either:
        """A class, not a function: Starlette calls functions as endpoints, and these are applications."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if engine.model() is not None:
                await engine(scope, receive, send)
            elif light is not None:
                await light(scope, receive, send)
            else:
                message = f"{scope['method']} {scope['path']}: no model that is served here has this endpoint."
                await Reply(send).fail(ApiError(404, message, code="unknown_url"), scope["path"])

    return Either()


def is_plain(body: bytes) -> bool:
    """Whether it says only what any engine understands. A body that is no JSON object is not plain: the engine says
    why."""
    try:
        return _keys.decode(body).keys() <= PLAIN
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


class EngineApiRoute(ModelRoute[RawRequest | ParsedRequest]):
    """The ASGI application of one path."""

    def __init__(self, endpoint: Endpoint, client: EndpointClient, deps: FrontendDeps) -> None:
        super().__init__(endpoint, deps)
        self._client = client

    def served(self) -> str | None:
        """A served model whose engine has an API of its own; None: there is none."""
        return next((model.name for model in self._deps.models.models() if model.engine is not None), None)

    def model(self) -> str | None:
        """As `served`. Where it finds none: a model of such an engine that shares the GPUs and has no worker now."""
        if (served := self.served()) is not None or self._deps.held is None:
            return served
        return self._deps.held.model_with_engine_api()

    def parse(self, body: bytes, scope: Scope) -> RawRequest | ParsedRequest:
        try:
            known = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            known = _Known()
        served = self._needed(known.model) or self.served()
        if served is None and self._deps.held is not None and not isinstance(known.model, str):
            # No worker can be asked what is wrong, and no model is to be woken for it.
            message = "No model has a worker now, and the body is no JSON object that names one: give `model`."
            raise bad_param("model", message, "missing_required_parameter")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        passed = [(name, value) for name, value in headers if name not in _CONNECTION]
        # A drain may have taken the last worker since the route was chosen: then "come back later".
        query = scope.get("query_string", b"").decode("latin-1")
        name, stream = served or str(known.model), known.stream is True
        return RawRequest(name, stream, scope["path"], passed, body, scope["method"], query)

    def _needed(self, name: Any) -> str | None:
        """The model whose worker a request for `name` needs. None: no model of this deployment has that name."""
        if not isinstance(name, str):
            return None
        if self._deps.held is not None and (shared := self._deps.held.model_of(name)) is not None:
            return shared
        named = self._deps.models.get(name)
        return None if named is None else named.name

    async def answer(
        self, request: RawRequest | ParsedRequest, request_id: str, observer: RequestObserver, reply: Reply
    ) -> Whole | None:
        assert isinstance(request, RawRequest)
        timeout_s = self._deps.settings.request_timeout_s
        asked = ApiRequest(request_id, request.path, request.headers, request.body, request.method, request.query)

        async def once(lost: int) -> Whole | None:
            payload = msgspec.structs.replace(asked, lost=lost)
            stream = await self._client.call(payload, request_id=request_id, timeout_s=timeout_s)
            try:
                return await self._relay(stream, observer, reply)
            finally:
                await close(stream, request_id)

        try:
            async with asyncio.timeout(timeout_s):
                return await until_answered(once, reply, observer, request_id)
        except TimeoutError as error:
            message = f"The request did not end within {timeout_s:g} s, this Frontend's `request_timeout_s`."
            raise DeadlineExceeded(message) from error

    async def _relay(self, stream: ResponseStream, observer: RequestObserver, reply: Reply) -> Whole | None:
        start: Mapping[str, Any] | None = None
        bodies: list[bytes] = []

        def take(batch: list[Any]) -> Awaitable[None] | None:
            nonlocal start
            for item in batch:
                start = item if "status" in item else start
                self._observe(item, observer)
                if body := item.get("body"):
                    bodies.append(body)
            if start is None or not start["stream"] or not bodies:
                return None
            events = b"".join(bodies)
            bodies.clear()
            return reply.push(events)

        await pump(stream, take)
        if start is None:
            raise WorkerLost("The answer ended before it began: a Processor was lost; send the request again.")
        if start["stream"]:
            return None
        return Whole(start["status"], b"".join(bodies), {**start["headers"], **migrations_header(observer)})

    def _observe(self, item: Mapping[str, Any], observer: RequestObserver) -> None:
        if (prompt_tokens := item.get("prompt_tokens")) is not None:
            observer.on_prompt(prompt_tokens)
        if (hit_rate := item.get("kv_hit_rate")) is not None:
            observer.on_routed(hit_rate)
        if (cached := item.get("cached_tokens")) is not None:
            observer.on_cached(cached)
        if (migrations := item.get("migrations")) is not None:
            observer.on_migrated(migrations)
        if tokens := item.get("tokens"):
            observer.on_tokens(tokens, self._deps.clock.now_s())


class StoredResponseRoute(EngineApiRoute):
    """An answer of `/v1/responses` that was to be kept: vLLM keeps some if its environment says so."""

    def __init__(self, client: EndpointClient, deps: FrontendDeps) -> None:
        super().__init__("responses", client, deps)

    def model(self) -> str | None:
        return self.served()  # an engine without a worker keeps nothing

    def check_kind(self, scope: Scope) -> None:
        if scope["method"] != "GET":  # which has no body, and starts nothing
            super().check_kind(scope)


class NothingIsKept:
    """The answer of other engines, in vLLM's words."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = shortened(scope["path_params"]["response_id"])
        raise ApiError(404, f"Response with id {name!r} not found.", param="response_id", code="response_not_found")


def stored_responses(deps: FrontendDeps) -> list[Route]:
    """`GET /v1/responses/ID`, and what cancels one."""
    app: ASGIApp = NothingIsKept()
    if deps.api is not None:
        app = _either(StoredResponseRoute(deps.api, deps), app)
    paths = {"/v1/responses/{response_id}": "GET", "/v1/responses/{response_id}/cancel": "POST"}
    return [Route(path, app, methods=[method]) for path, method in paths.items()]


class PlainOrEngine(EngineApiRoute):
    """The same, where plain requests that the light route takes are its own."""

    def __init__(self, endpoint: Endpoint, client: EndpointClient, deps: FrontendDeps, light: GenerationRoute) -> None:
        super().__init__(endpoint, client, deps)
        self._light = light

    def parse(self, body: bytes, scope: Scope) -> RawRequest | ParsedRequest:
        if is_plain(body):
            try:
                request = self._light.parse(body, scope)
            except ApiError:
                pass  # the engine may take it, and else says what is wrong in its own words
            else:
                if self._deps.models.availability(request.model) is not Availability.UNKNOWN:
                    return request  # else it may be an adapter, whose name the engine alone knows
        return super().parse(body, scope)

    async def answer(
        self, request: RawRequest | ParsedRequest, request_id: str, observer: RequestObserver, reply: Reply
    ) -> Whole | None:
        if isinstance(request, ParsedRequest):
            return await self._light.answer(request, request_id, observer, reply)
        return await super().answer(request, request_id, observer, reply)

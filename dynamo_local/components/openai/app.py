"""A Frontend's ASGI application: routes, and the answers that need no worker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo_local.components import http_metrics
from dynamo_local.components.models_view import ServedModel
from dynamo_local.components.openai import access
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.generation import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    FrontendDeps,
    GenerationRoute,
)
from dynamo_local.components.openai.route import HttpDeps
from dynamo_local.components.sim_api.texts_api import TextsRoute, parse_detokenize, parse_embeddings, parse_tokenize
from dynamo_local.components.vllm_api.relay import stored_responses, with_engine_api
from dynamo_local.system import request_log

# --- A model as `/v1/models` shows it.

_PERMISSION: Final[Mapping[str, Any]] = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


def model_object(model: ServedModel) -> dict[str, Any]:
    """OpenAI's object, with vLLM's `max_model_len` (tokens) and `root`, which its clients take for the tokenizer's
    place where nobody has told them. Where the engine is vLLM, or the model an adapter, it has all that vLLM says."""
    words = () if model.engine is None else model.engine.words
    folders = (word.removeprefix("--model=") for word in words if word.startswith("--model="))
    members: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "dynamo",
        "root": model.root or next(folders, model.name),
        "max_model_len": model.max_model_len,
    }
    if model.engine is None and model.parent is None:
        return members
    permission = {"id": f"modelperm-{model.name}", "created": model.created_s, **_PERMISSION}
    return {**members, "owned_by": "vllm", "parent": model.parent, "permission": [permission]}


logger = logging.getLogger(__name__)


def create_app(deps: FrontendDeps) -> Application:
    """The Frontend's application. It needs no infrastructure beyond what `deps` holds, and starts nothing."""
    light: dict[str, ASGIApp] = {
        "/v1/chat/completions": GenerationRoute(CHAT, deps.chat, deps),
        "/v1/completions": GenerationRoute(COMPLETIONS, deps.completions, deps),
        "/v1/responses": GenerationRoute(RESPONSES, deps.chat, deps),
        "/v1/messages": GenerationRoute(MESSAGES, deps.chat, deps),
    }
    if deps.texts is not None:
        light |= {
            "/tokenize": TextsRoute(parse_tokenize, deps.texts, deps),
            "/detokenize": TextsRoute(parse_detokenize, deps.texts, deps),
            "/v1/embeddings": TextsRoute(parse_embeddings, deps.texts, deps),
        }
    return make_app(deps, with_engine_api(light, deps), stored_responses(deps))


def make_app(deps: HttpDeps, posts: Mapping[str, ASGIApp], others: Sequence[Route] = ()) -> Application:
    """An application with these routes for POST, by path, `others`, and the routes that need no worker."""
    views = _Views(deps)
    before = access.middleware(deps.settings, deps.keys)
    starlette = Starlette(
        routes=[
            *(Route(path, route, methods=["POST"]) for path, route in posts.items()),
            *others,
            Route("/v1/models", views.models),
            Route("/v1/models/{model:path}", views.model),
            Route("/health", views.health),
            Route("/live", views.live),
            Route("/metrics", views.metrics),
        ],
        middleware=before,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _unexpected},
    )
    return Application({path: _behind(before, route) for path, route in posts.items()}, starlette)


def _behind(middleware: Sequence[Middleware], app: ASGIApp) -> ASGIApp:
    for each in reversed(middleware):
        app = each.cls(app, *each.args, **each.kwargs)
    return app


class Application:
    """Every answer has an `x-request-id`: the client's own, or a new one. Log lines about the request carry it, too.

    A POST to one of these paths goes straight to its route. Starlette's routing and middleware cost a tenth of a
    request's time in this process. Starlette handles all other requests, wrong methods included.
    """

    def __init__(self, posts: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        self._posts = posts
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        x_request_id = request_log.accept_or_make(_given(scope["headers"]))
        header = (_HEADER, x_request_id.encode())

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                others = [pair for pair in message.get("headers", ()) if pair[0] != _HEADER]
                message = {**message, "headers": [*others, header]}
            return send(message)

        app = self._posts.get(scope["path"], self._rest) if scope["method"] == "POST" else self._rest
        with request_log.bound(x_request_id):
            await app(scope, receive, send_with_id)


_HEADER: Final = request_log.HEADER.encode()


def _given(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id; empty where it has sent none."""
    return next((value.decode("latin-1") for name, value in headers if name == _HEADER), "")


class _Views:
    """The answers that need no worker."""

    def __init__(self, deps: HttpDeps) -> None:
        self._deps = deps
        self._since_s = deps.clock.wall_s()

    async def models(self, _: Request) -> Response:
        served = [model_object(model) for model in (*self._deps.models.models(), *self._adapters())]
        return _json({"object": "list", "data": [*served, *self._without_worker()]})

    def _without_worker(self) -> list[dict[str, Any]]:
        """Models that share the GPUs and have no worker now: a request for one is held until it has."""
        held = self._deps.held
        states = {} if held is None else held.states()
        since_s = int(self._since_s)
        return [
            {**model_object(ServedModel(name, since_s, None, 0)), "state": state}
            for name, state in states.items()
            if state != "ready"
        ]

    def _adapters(self) -> list[ServedModel]:
        """Those of models that are served."""
        view, models = self._deps.adapters, self._deps.models
        return [] if view is None else [each for each in view.models() if each.parent and models.get(each.parent)]

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        model = self._deps.models.get(name) or next((each for each in self._adapters() if each.name == name), None)
        if model is not None:
            return _json(model_object(model))
        for each in self._without_worker():
            if each["id"] == name:
                return _json(each)
        raise api_errors.no_model(self._deps.models, name)

    async def health(self, _: Request) -> Response:
        """200 while a model is served and requests are taken, else 503: for load balancers and scripts."""
        status = _status(self._deps)
        served = self._deps.models.models()
        body = {
            "status": status,
            "models": [model.name for model in served],
            "instances": sum(model.instances for model in served),
        }
        return _json(body, 200 if status == "ready" else 503)

    async def live(self, _: Request) -> Response:
        """200 as long as the process answers at all."""
        return _json({"status": "live"})

    async def metrics(self, _: Request) -> Response:
        page = self._deps.metrics.exposition() if self._deps.page is None else await self._deps.page()
        return Response(page, headers={"content-type": http_metrics.CONTENT_TYPE})


def _status(deps: HttpDeps) -> str:
    if deps.draining.is_set():
        return "draining"
    return "ready" if deps.models.models() or deps.held is not None else "starting"


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    answer = api_errors.from_error(error)
    return Response(answer.body(request.url.path), answer.status, headers=answer.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's format."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    answer = ApiError(error.status_code, message, code="unknown_url", headers=error.headers)
    return await _api_error(request, answer)


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it with its traceback.
    return await _api_error(request, error)

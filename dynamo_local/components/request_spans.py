"""Attributes of a request's spans, by OpenTelemetry's semantic conventions for HTTP and for generative AI. Pure.

None of them holds text that a client has sent, but for the name of the model. Names that begin with `dynamo.` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope

from dynamo_local.components.http_metrics import EndedRequest, Endpoint
from dynamo_local.system.spans import Value

PROVIDER: Final = "dynamo"
OPERATIONS: Final[Mapping[Endpoint, str]] = {
    "chat_completions": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""The other endpoints generate nothing."""
_ASKED: Final[Mapping[str, str]] = {
    name: f"gen_ai.request.{name}"
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
}
SERVER_ERROR: Final = 500


def name_of(scope: Scope) -> str:
    """A span's name has no part that a client chooses."""
    method: str = scope["method"]
    return f"{method} {scope['path']}" if method == "POST" and not scope.get("path_params") else method


def received(scope: Scope, endpoint: Endpoint, request_id: str) -> dict[str, Value]:
    """The request, before anything of its body is known."""
    found: dict[str, Value] = {
        "http.request.method": scope["method"],
        "url.scheme": scope["scheme"],
        "url.path": scope["path"],
        "dynamo.request_id": request_id,
    }
    if (server := scope.get("server")) is not None:
        found |= {"server.address": server[0], "server.port": server[1] or 0}
    if (operation := OPERATIONS.get(endpoint)) is not None:
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    return found


def asked(model: str, stream: bool, payload: Mapping[str, Any]) -> dict[str, Value]:
    """The parameters of the request. `payload` is empty where nobody here reads the body."""
    found: dict[str, Value] = {"gen_ai.request.model": model, "gen_ai.request.stream": stream}
    found |= {name: payload[field] for field, name in _ASKED.items() if field in payload}
    if (extras := payload.get("extras")) is not None and extras.get("n", 1) > 1:
        found["gen_ai.request.choice.count"] = extras["n"]
    return found


def responded(status: int) -> dict[str, Value]:
    """The answer's status line. A server's own error may be passed on as an answer."""
    failed: dict[str, Value] = {"error.type": str(status)} if status >= SERVER_ERROR else {}
    return {"http.response.status_code": status, **failed}


def answered(request: EndedRequest, *, stream: bool) -> dict[str, Value]:
    """The size and the times of the answer; an unknown one is left out."""
    known: dict[str, Value | None] = {
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.tokens or None,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.response.time_to_first_chunk": request.ttft_s if stream else None,
        "dynamo.ttft_ms": _ms(request.ttft_s),
        "dynamo.itl_ms": _ms(request.itl_s),
        "dynamo.kv_hit_rate": request.kv_hit_rate,
        "dynamo.cancelled": request.gone or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)

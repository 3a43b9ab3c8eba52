"""What a Frontend must know of a request that it passes on: little, all else is the server's to judge. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.components.http_metrics import Endpoint
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.proxy.wire import Ask
from dynamo_local.core import kv_handover


@dataclass(frozen=True, slots=True)
class Path:
    """A route that is passed on. `handed_over`: it generates, so a prefill server may do its first half."""

    path: str
    endpoint: Endpoint
    handed_over: bool


PATHS = (
    Path("/v1/chat/completions", "chat_completions", True),
    Path("/v1/completions", "completions", True),
    Path("/v1/embeddings", "embeddings", False),
)

SENT_ON = ("authorization", "traceparent", "tracestate")
"""Of the client's headers. Others are about its connection to us, or could steer a server past our routing."""

SENT_BACK = ("content-type", "retry-after", "www-authenticate", "openai-processing-ms")
"""Of the server's headers."""

REQUEST_ID = "x-request-id"
"""vLLM names its request after this header; prefill and decode servers must be told the same."""

_ERROR_EVENT = re.compile(rb'^data:\s*\{\s*("error"|"object"\s*:\s*"error")', re.MULTILINE)
_ROLE = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"')
_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{')

_STREAM_BOUNDS = ("max_completion_tokens", "max_tokens")


class _Told(msgspec.Struct):
    """Everything else in the body is not looked at. The types are loose where a server's own error says it better."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


_decoder = msgspec.json.Decoder(_Told)


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """`tokens` bounds what it may generate; None where it does not say. `headers` are those that go on."""

    model: str
    stream: bool
    tokens: int | None
    body: bytes
    headers: Mapping[str, str]

    def ask(self, path: Path, request_id: str, body: bytes | None = None) -> Ask:
        """For a server; with another body, for a step of a hand-over."""
        headers = {**self.headers, "content-type": "application/json", REQUEST_ID: request_id}
        return Ask(path.path, self.body if body is None else body, headers, self.tokens)


def parse(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> ProxyRequest:
    """Raises `ApiError` 400 for what is no JSON object, or names no model."""
    try:
        told = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if told.model is None:
        raise bad_param("model", "Missing required parameter: `model`.", "missing_required_parameter")
    if not isinstance(told.model, str) or not 0 < len(told.model) <= 512:
        raise bad_param("model", "Invalid value for `model`: expected the name of a model.", "invalid_type")
    bounds = [value for name in _STREAM_BOUNDS if isinstance(value := getattr(told, name), int) and value > 0]
    return ProxyRequest(
        model=told.model,
        stream=told.stream is True,
        tokens=bounds[0] if bounds else None,
        body=body,
        headers=pick_headers(((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers), SENT_ON),
    )


def pick_headers(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, str]:
    """Those of these names, in lower case."""
    wanted = set(names)
    return {name.lower(): value for name, value in headers if name.lower() in wanted}


def prefill_body(request: ProxyRequest) -> bytes | str:
    """The body of a hand-over's first step; or, as text, why there is none."""
    content = msgspec.json.decode(request.body)
    if why := kv_handover.why_not(content):
        return why
    return msgspec.json.encode(kv_handover.prefill_request(content))


def decode_body(request: ProxyRequest, prefilled: bytes) -> bytes | str:
    """The body of the second step, from the prefill server's answer; or, as text, why there is none."""
    try:
        params = kv_handover.params_of(msgspec.json.decode(prefilled))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the prefill server's answer is no JSON: {error}"
    if params is None:
        return f"the prefill server's answer has no {kv_handover.PARAMS}: is its KV connector configured?"
    return msgspec.json.encode(kv_handover.decode_request(msgspec.json.decode(request.body), params))


def has_error_event(data: bytes) -> bool:
    """Whether one of these events of a stream is an error: so says vLLM that it could not pull the KV."""
    return _ERROR_EVENT.search(data) is not None


def says_nothing(data: bytes) -> bool:
    """Whether this beginning of a stream is at most a chat's first event, which has a role and no text yet."""
    events = data.count(b"\n\n")
    return events == 0 or (events == 1 and _ROLE.search(data) is not None and _TEXT.search(data) is None)

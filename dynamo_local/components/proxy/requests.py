"""The few things that a Frontend must know of a request that it passes on; the server checks all others. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from dynamo_local.components.http_metrics import Endpoint
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.proxy.ask import Ask
from dynamo_local.core.kv import handover as kv_handover
from dynamo_local.system.logs import request_log


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
"""The client's headers that go on. Others are about its connection to us, or could bypass our routing."""

SENT_BACK = ("content-type", "retry-after", "www-authenticate", "openai-processing-ms")
"""The server's headers that go back to the client."""

_ERROR_EVENT = re.compile(rb'^data:\s*\{\s*("error"|"object"\s*:\s*"error")', re.MULTILINE)
_ROLE = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"assistant"')
_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{')

_STREAM_BOUNDS = ("max_completion_tokens", "max_tokens")


class _BodyFields(msgspec.Struct):
    """Everything else in the body is not looked at, and these only as far as they are what they should be: a server's
    own error says it better."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_BodyFields)
_model_decoder = msgspec.json.Decoder(Annotated[str, msgspec.Meta(min_length=1, max_length=512)])
_MOST_DIGITS = 10


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """`tokens` bounds what it may generate; None where it does not say. `headers` are those that go on."""

    model: str
    stream: bool
    tokens: int | None
    body: bytes
    headers: Mapping[str, str]

    def ask(self, path: Path, request_id: str, body: bytes | None = None) -> Ask:
        """For a server; with another body, for a step of a hand-over.

        vLLM names its request after the `x-request-id`: prefill and decode servers must get the same one, and no two
        requests at a time may share it. So it is our `request_id`, which begins with the client's.
        """
        headers = {**self.headers, "content-type": "application/json", request_log.HEADER: request_id}
        return Ask(path.path, self.body if body is None else body, headers, self.tokens)


def parse(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> ProxyRequest:
    """Raises `ApiError` 400 for what is no JSON object, or names no model."""
    try:
        told = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    bounds = [int(text) for name in _STREAM_BOUNDS if _is_count(text := bytes(getattr(told, name)))]
    return ProxyRequest(
        model=_model(told.model),
        stream=bytes(told.stream) == b"true",
        tokens=bounds[0] if bounds else None,
        body=body,
        headers=pick_headers(((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers), SENT_ON),
    )


def _model(raw: msgspec.Raw) -> str:
    if bytes(raw) in (b"", b"null"):
        raise bad_param("model", "Missing required parameter: `model`.", "missing_required_parameter")
    try:
        return _model_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = "Invalid value for `model`: expected the name of a model."
        raise bad_param("model", message, "invalid_type") from error


def _is_count(text: bytes) -> bool:
    return len(text) <= _MOST_DIGITS and text.isdigit() and int(text) > 0


def pick_headers(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, str]:
    """Those of these names, in lower case."""
    wanted = set(names)
    return {name.lower(): value for name, value in headers if name.lower() in wanted}


def prefill_body(request: ProxyRequest) -> bytes | str:
    """The body of a hand-over's first step; or, as text, why there is none."""
    try:
        content = _members(request.body)
    except _UNREADABLE as error:
        return f"its body cannot be read: {error}"
    if why := kv_handover.why_not({**content, "prompt": _judged_prompt(content.get("prompt"))}):
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
    return msgspec.json.encode(kv_handover.decode_request(_members(request.body), params))


_SMALL_BYTES = 1024
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_one_prompt_decoders = tuple(msgspec.json.Decoder(kind) for kind in (str, list[int], tuple[str], tuple[list[int]]))


def _members(body: bytes) -> dict[str, Any]:
    """The body's members. What is long stays as it is written: it goes on, and nobody looks at it."""
    raw = _members_decoder.decode(body)
    small = {name: msgspec.json.decode(value) for name, value in raw.items() if len(bytes(value)) <= _SMALL_BYTES}
    return {**raw, **small}


def _judged_prompt(prompt: Any) -> Any:
    """A prompt as the rules of a hand-over need it: of one that is long, whether it is one prompt or several."""
    if not isinstance(prompt, msgspec.Raw):
        return prompt
    for decoder in _one_prompt_decoders:
        with contextlib.suppress(*_UNREADABLE):
            decoder.decode(prompt)
            return ""
    return [None, None]


def has_error_event(data: bytes) -> bool:
    """Whether one of these events of a stream is an error: vLLM reports so that it could not pull the KV."""
    return _ERROR_EVENT.search(data) is not None


def says_nothing(data: bytes) -> bool:
    """Whether this beginning of a stream is at most a chat's first event, which has a role and no text yet."""
    events = data.count(b"\n\n")
    return events == 0 or (events == 1 and _ROLE.search(data) is not None and _TEXT.search(data) is None)

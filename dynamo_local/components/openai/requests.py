"""Requests: from bytes to what the Processor is sent.

msgspec checks them: it is the fastest of the libraries at hand, and a request is parsed on the event loop
that also carries everybody's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from dynamo_local.components.openai import params
from dynamo_local.components.openai.errors import ApiError, bad_param

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PartType = Literal["text"]
MessageRole = Literal["system", "developer", "user", "assistant", "tool"]

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]*)`")
_CHOICES = {".type": get_args(PartType), ".role": get_args(MessageRole)}
_MAP_INDEX = re.compile(r"\[\.\.\.\]")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content; text is the only kind there is here."""

    type: PartType
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message. What an assistant's own answer holds besides text is accepted as long as it is empty."""

    role: MessageRole
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    annotations: list[Any] | None = None
    function_call: None = None
    audio: None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` pads chunks against traffic analysis; over loopback it is accepted and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=512)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """`POST /v1/completions`. The prompt is text or token ids, one per request."""

    prompt: str | list[str | TokenId | list[TokenId]]


R = TypeVar("R", bound=_Common)

_PASSED_ON = (
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "min_tokens",
    "top_k",
)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that is right in itself. `payload` is what the Processor gets, without its `request_id`.

    `payload` holds only what the client set, under one name each: `model`, `messages` (each `{"role", "content",
    "name"?}` with content a string) or `prompt` (a string or a list of token ids), `max_tokens`, `stop` (a list),
    `stop_token_ids`, `temperature`, `top_p`, `top_k`, `seed`, `presence_penalty`, `frequency_penalty`,
    `ignore_eos`, `min_tokens`.
    """

    model: str
    stream: bool
    include_usage: bool
    payload: Mapping[str, Any]


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    request = _convert(_decode(body), ChatRequest, params.UNSUPPORTED_CHAT)
    payload = _common_payload(request, request.max_completion_tokens or request.max_tokens)
    payload["messages"] = [_message(message, n) for n, message in enumerate(request.messages)]
    return _parsed(request, payload)


def parse_completion(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    request = _convert(_decode(body), CompletionRequest, params.UNSUPPORTED_COMPLETION)
    payload = _common_payload(request, request.max_tokens)
    payload["prompt"] = _prompt(request.prompt)
    return _parsed(request, payload)


Parser = Callable[[bytes], ParsedRequest]


def _decode(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _convert(raw: dict[str, Any], schema: type[R], unsupported: Mapping[str, tuple[Any, ...]]) -> R:
    kept = params.strip(params.merge_nvext(raw), schema.__struct_fields__, unsupported)
    try:
        request = msgspec.convert(kept, schema)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    if request.stream_options is not None and not request.stream:
        raise bad_param("stream_options", "`stream_options` is only allowed when `stream` is true.")
    return request


def _invalid(text: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.max_tokens`" in OpenAI's manner, with the parameter named."""
    found = _PATH.search(text)
    path = _MAP_INDEX.sub("", found["path"]) if found else ""
    detail = _PATH.sub("", text)
    for pattern, code, verb in (
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
    ):
        if member := pattern.search(detail):
            param = f"{path}.{member['name']}" if path else member["name"]
            return bad_param(param, f"{verb}: `{param}`.", code)
    for end, choices in _CHOICES.items():
        if path.endswith(end) and "enum value" in detail:
            detail += f" (allowed: {', '.join(choices)})"
    code = "invalid_type" if ", got `" in detail else "invalid_value"
    return bad_param(path, f"Invalid value for `{path}`: {detail[:1].lower()}{detail[1:]}.", code)


def _common_payload(request: _Common, max_tokens: int | None) -> dict[str, Any]:
    payload: dict[str, Any] = {"model": request.model}
    for name in _PASSED_ON:
        value = getattr(request, name)
        if value is not None:
            payload[name] = value
    if max_tokens is not None:
        payload["max_tokens"] = max_tokens
        if request.min_tokens is not None and request.min_tokens > max_tokens:
            message = f"`min_tokens` ({request.min_tokens}) must not be above `max_tokens` ({max_tokens})."
            raise bad_param("min_tokens", message)
    if request.stop:
        payload["stop"] = [request.stop] if isinstance(request.stop, str) else list(request.stop)
    if request.stop_token_ids:
        payload["stop_token_ids"] = request.stop_token_ids
    return payload


def _message(message: Message, n: int) -> dict[str, Any]:
    content = message.content
    if content is None and message.role != "assistant":
        param = f"messages[{n}].content"
        raise bad_param(param, f"Missing required parameter: `{param}`.", "missing_required_parameter")
    if isinstance(content, list):
        # As vLLM joins the parts for a template that takes strings (chat_utils, "string" content format).
        content = "\n".join(part.text for part in content)
    out: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        out["name"] = message.name
    return out


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a batch of one
    if not prompt:
        raise bad_param("prompt", "`prompt` must not be empty.")
    if isinstance(prompt, str):
        return prompt
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return prompt
    if int in kinds:
        raise bad_param("prompt", "`prompt` must be a string or a list of token ids, not a mixture.", "invalid_type")
    message = f"`prompt` holds {len(prompt)} prompts; this server takes one per request."
    raise bad_param("prompt", message, "unsupported_parameter")


def _parsed(request: _Common, payload: dict[str, Any]) -> ParsedRequest:
    options = request.stream_options
    return ParsedRequest(
        model=request.model,
        stream=request.stream,
        include_usage=options is not None and options.include_usage,
        payload=payload,
    )

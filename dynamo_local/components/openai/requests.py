"""Requests: from bytes to what the Processor is sent.

msgspec checks them: it is the fastest of the libraries at hand, and a request is parsed on the event loop
that also carries everybody's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.extras.asked import Extras
from dynamo_local.components.openai import params
from dynamo_local.components.openai.decoding import MessageRole, PartType, TokenId, decode, values_of
from dynamo_local.components.openai.errors import bad_param
from dynamo_local.components.openai.rich import extras
from dynamo_local.components.openai.rich.prompts import read_prompt

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]


# gc=False: there is no way from a message back to itself, and without it a body of half a million messages has the
# garbage collector walk through all of them again and again.


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a message's content; text is the only kind there is here."""

    type: PartType
    text: str
    cache_control: msgspec.Raw = msgspec.Raw()


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """What an assistant called; `arguments` is JSON."""

    name: Annotated[str, Meta(max_length=128)]
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call in an assistant's message."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] | None = "function"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One message. `audio` and `function_call` of an assistant's own answer are accepted as long as they are empty;
    marks for caches are not read."""

    role: MessageRole
    content: str | Annotated[list[TextPart], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=limits.MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    cache_control: msgspec.Raw = msgspec.Raw()
    function_call: None = None
    audio: None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` pads chunks against traffic analysis; over loopback it is accepted and not done."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
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
    stop: StopText | Annotated[list[StopText], Meta(max_length=limits.MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: msgspec.Raw
    max_completion_tokens: Count | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """`POST /v1/completions`. The prompt is text or token ids, or a list of either."""

    prompt: msgspec.Raw


R = TypeVar("R", bound=_Common)
T = TypeVar("T")

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
    """A request that passed the checks. `payload` is what the Processor gets, without its `request_id`.

    `payload` holds only what the client set, under one name each: `model`, `messages` (each `{"role", "content",
    "name"?}` with content a string) or `prompt` (a string or a list of token ids), `max_tokens`, `stop` (a list),
    `stop_token_ids`, `temperature`, `top_p`, `top_k`, `seed`, `presence_penalty`, `frequency_penalty`,
    `ignore_eos`, `min_tokens`; and `extras` (`components.extras.asked`) where there are some.
    """

    model: str
    stream: bool
    include_usage: bool
    payload: Mapping[str, Any]
    continuous_usage: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)
    """What the answer repeats of the request (`POST /v1/responses`)."""


_CHAT_EXTRAS = frozenset(extras.ChatExtras.__struct_fields__)
_COMPLETION_EXTRAS = frozenset(extras.CompletionExtras.__struct_fields__)
_CHAT_FIELDS = params.Fields({*ChatRequest.__struct_fields__, *_CHAT_EXTRAS}, params.UNSUPPORTED_CHAT)
_COMPLETION_FIELDS = params.Fields(
    {*CompletionRequest.__struct_fields__, *_COMPLETION_EXTRAS}, params.UNSUPPORTED_COMPLETION
)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_extras_decoder = msgspec.json.Decoder(extras.ChatExtras)
_completion_extras_decoder = msgspec.json.Decoder(extras.CompletionExtras)


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _CHAT_FIELDS.split(body)
    asked = {name: fields.pop(name) for name in fields.keys() & _CHAT_EXTRAS}
    request = _typed(_chat_decoder, fields)
    payload = _common_payload(request, request.max_completion_tokens or request.max_tokens)
    payload["messages"] = [_message(message, n) for n, message in enumerate(_messages(request.messages))]
    return _parsed(request, payload, extras.of_chat(decoded(_chat_extras_decoder, asked)) if asked else None)


def parse_completion(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _COMPLETION_FIELDS.split(body)
    asked = {name: fields.pop(name) for name in fields.keys() & _COMPLETION_EXTRAS}
    request = _typed(_completion_decoder, fields)
    payload = _common_payload(request, request.max_tokens)
    prompt, prompts = read_prompt(request.prompt)
    if prompt is not None:
        payload["prompt"] = prompt
    found = extras.of_completion(decoded(_completion_extras_decoder, asked), prompts) if asked or prompts else None
    return _parsed(request, payload, found)


Parser = Callable[[bytes], ParsedRequest]


def decoded(decoder: msgspec.json.Decoder[T], fields: Mapping[str, msgspec.Raw]) -> T:
    """Parameters that are still JSON, of their types. Raises `ApiError` 400 that names the parameter."""
    return decode(decoder, msgspec.json.encode(fields))


def _typed(decoder: msgspec.json.Decoder[R], fields: Mapping[str, msgspec.Raw]) -> R:
    request = decoded(decoder, fields)
    if request.stream_options is not None and not request.stream:
        raise bad_param("stream_options", "`stream_options` is only allowed when `stream` is true.")
    return request


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


class _Content(msgspec.Struct, frozen=True, gc=False):
    content: msgspec.Raw = msgspec.Raw()


_messages_decoder = msgspec.json.Decoder(Annotated[list[Message], Meta(min_length=1, max_length=limits.MAX_MESSAGES)])
_message_decoder = msgspec.json.Decoder(Message)
_content_decoder = msgspec.json.Decoder(_Content)


def _messages(raw: msgspec.Raw) -> list[Message]:
    """Many of them are made one by one: between two the interpreter may turn to the event loop's thread."""
    if len(params.bytes_of(raw)) <= limits.LARGE_BYTES:
        return decode(_messages_decoder, raw, "messages")
    return [_one_message(value, f"messages[{n}]") for n, value in enumerate(values_of(raw, "messages"))]


def _one_message(raw: msgspec.Raw, param: str) -> Message:
    if len(params.bytes_of(raw)) > limits.LARGE_BYTES:
        content = decode(_content_decoder, raw, param).content
        if params.bytes_of(content)[:1] == b"[":
            values_of(content, f"{param}.content")
    return decode(_message_decoder, raw, param)


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
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        out["reasoning_content"] = reasoning
    return out


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or ""}
    return {"id": call.id or "", "type": "function", "function": function}


def _parsed(request: _Common, payload: dict[str, Any], found: Extras | None) -> ParsedRequest:
    options = request.stream_options
    continuous = options is not None and options.continuous_usage_stats
    if continuous:
        found = found or Extras()
    if found is not None:
        payload["extras"] = msgspec.to_builtins(found)
    return ParsedRequest(
        model=request.model,
        stream=request.stream,
        include_usage=options is not None and options.include_usage,
        payload=payload,
        continuous_usage=continuous,
    )

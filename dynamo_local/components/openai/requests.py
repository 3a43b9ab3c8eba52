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

from dynamo_local.components import limits
from dynamo_local.components.openai import params
from dynamo_local.components.openai.errors import ApiError, bad_param

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PartType = Literal["text"]
MessageRole = Literal["system", "developer", "user", "assistant", "tool"]

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]*)`")
_ERROR_ENDS = 200
_CHOICES = {".type": get_args(PartType), ".role": get_args(MessageRole)}
_MAP_INDEX = re.compile(r"\[\.\.\.\]")


# gc=False: there is no way from a message back to itself, and without it a body of half a million messages has the
# garbage collector walk through all of them again and again.


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a message's content; text is the only kind there is here."""

    type: PartType
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One message. What an assistant's own answer holds besides text is accepted as long as it is empty."""

    role: MessageRole
    content: str | Annotated[list[TextPart], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: tuple[()] | None = None
    annotations: msgspec.Raw = msgspec.Raw()
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
    """`POST /v1/completions`. The prompt is text or token ids, one per request."""

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
    `ignore_eos`, `min_tokens`.
    """

    model: str
    stream: bool
    include_usage: bool
    payload: Mapping[str, Any]


_CHAT_FIELDS = params.Fields(ChatRequest.__struct_fields__, params.UNSUPPORTED_CHAT)
_COMPLETION_FIELDS = params.Fields(CompletionRequest.__struct_fields__, params.UNSUPPORTED_COMPLETION)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    request = _typed(_chat_decoder, _CHAT_FIELDS.split(body))
    payload = _common_payload(request, request.max_completion_tokens or request.max_tokens)
    payload["messages"] = [_message(message, n) for n, message in enumerate(_messages(request.messages))]
    return _parsed(request, payload)


def parse_completion(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    request = _typed(_completion_decoder, _COMPLETION_FIELDS.split(body))
    payload = _common_payload(request, request.max_tokens)
    payload["prompt"] = _prompt(request.prompt)
    return _parsed(request, payload)


Parser = Callable[[bytes], ParsedRequest]


def _typed(decoder: msgspec.json.Decoder[R], fields: Mapping[str, msgspec.Raw]) -> R:
    request = _decoded(decoder, msgspec.json.encode(fields))
    if request.stream_options is not None and not request.stream:
        raise bad_param("stream_options", "`stream_options` is only allowed when `stream` is true.")
    return request


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, param: str = "") -> T:
    """Raises `ApiError` 400 that names the parameter; `param` is where the body is from, if it is a part."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise params.not_json(error) from error


def _invalid(text: str, param: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.max_tokens`" in OpenAI's manner, with the parameter named."""
    if len(text) > 2 * _ERROR_ENDS:  # it repeats a value of the client's
        text = f"{text[:_ERROR_ENDS]}…{text[-_ERROR_ENDS:]}"
    found = _PATH.search(text)
    inner = _MAP_INDEX.sub("", found["path"]) if found else ""
    path = f"{param}.{inner}" if param and inner and not inner.startswith("[") else param + inner
    detail = _PATH.sub("", text)
    for pattern, code, verb in (
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
    ):
        if member := pattern.search(detail):
            name = limits.shortened(member["name"])
            param = f"{path}.{name}" if path else name
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


class _Content(msgspec.Struct, frozen=True, gc=False):
    content: msgspec.Raw = msgspec.Raw()


def _bounded_array() -> msgspec.json.Decoder[msgspec.Struct]:
    """Of 1 to `MAX_MESSAGES` values, none of which is made. It stops at the first beyond them; a list would be
    measured when all of it has been read."""
    fields = [(f"_{n}", msgspec.Raw, msgspec.Raw()) for n in range(1, limits.MAX_MESSAGES)]
    array = msgspec.defstruct("Array", [("_0", msgspec.Raw), *fields], array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(array)


_messages_decoder = msgspec.json.Decoder(Annotated[list[Message], Meta(min_length=1, max_length=limits.MAX_MESSAGES)])
_message_decoder = msgspec.json.Decoder(Message)
_content_decoder = msgspec.json.Decoder(_Content)
_bounded_decoder = _bounded_array()


def _messages(raw: msgspec.Raw) -> list[Message]:
    """Many of them are made one by one: between two the interpreter may turn to the event loop's thread."""
    if len(params.bytes_of(raw)) <= limits.LARGE_BYTES:
        return _decoded(_messages_decoder, raw, "messages")
    values = msgspec.structs.astuple(_decoded(_bounded_decoder, raw, "messages"))
    return [_one_message(value, f"messages[{n}]") for n, value in enumerate(values) if params.bytes_of(value)]


def _one_message(raw: msgspec.Raw, param: str) -> Message:
    if len(params.bytes_of(raw)) > limits.LARGE_BYTES:
        content = _decoded(_content_decoder, raw, param).content
        if params.bytes_of(content)[:1] == b"[":
            _decoded(_bounded_decoder, content, f"{param}.content")
    return _decoded(_message_decoder, raw, param)


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


_text_decoder = msgspec.json.Decoder(str)
_ids_decoder = msgspec.json.Decoder(list[TokenId])
_one_text_decoder = msgspec.json.Decoder(tuple[str])
_one_ids_decoder = msgspec.json.Decoder(tuple[list[TokenId]])


_BEGINNING_BYTES = 64
"""Enough for the two characters that say what a prompt is, and for white space between them."""


def _prompt(raw: msgspec.Raw) -> str | list[int]:
    """Text or token ids, also as a batch of one. What it is is seen from its beginning: only that is made of it."""
    begins = b"".join(bytes(params.bytes_of(raw)[:_BEGINNING_BYTES]).split())[:2]
    prompt: str | list[int]
    if begins[:1] != b"[":
        prompt = _decoded(_text_decoder, raw, "prompt")
    elif begins[1:] == b'"':
        prompt = _decoded_batch(_one_text_decoder, raw)[0]
    elif bytes(raw).count(b",") >= limits.MAX_PROMPT_IDS:
        raise bad_param("prompt", f"`prompt` holds more than {limits.MAX_PROMPT_IDS:,} token ids.")
    elif begins[1:] == b"[":
        prompt = _decoded_batch(_one_ids_decoder, raw)[0]
    else:
        prompt = _decoded(_ids_decoder, raw, "prompt")
    if not prompt:
        raise bad_param("prompt", "`prompt` must not be empty.")
    return prompt


def _decoded_batch(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if "length 1" not in str(error):
            raise _invalid(str(error), "prompt") from error
        message = "`prompt` holds several prompts; this server takes one per request: a string or a list of token ids."
        raise bad_param("prompt", message, "unsupported_parameter") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise params.not_json(error) from error


def _parsed(request: _Common, payload: dict[str, Any]) -> ParsedRequest:
    options = request.stream_options
    return ParsedRequest(
        model=request.model,
        stream=request.stream,
        include_usage=options is not None and options.include_usage,
        payload=payload,
    )

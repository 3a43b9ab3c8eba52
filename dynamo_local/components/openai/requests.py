"""Requests: from bytes to what the Processor is sent.

msgspec checks them: it is the fastest of the libraries at hand, and a request is parsed on the event loop
that also carries everybody's tokens.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.sim_api.requests import Extras, Form, FunctionTool, Sampling, Tools

# --- Which of OpenAI's (and vLLM's) parameters are taken, ignored or refused.
#
# A parameter that would change the answer, and that we do not implement, is refused by name. Its neutral value
# (`best_of: 1`, `suffix: ""`) is taken, because that asks for what we do anyway. A parameter that changes nothing in
# the answer is accepted and ignored. A parameter that is in no table is unknown and refused: a misspelt `max_token`
# must not be silently dropped.
#
# Source: https://platform.openai.com/docs/api-reference/chat/create and …/completions/create (read 2025), and
# vLLM's `ChatCompletionRequest`.

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Bookkeeping and hints: the answer is the same without them."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
}

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": (),
    "web_search_options": (),
}
"""Name -> the values that ask for nothing (null is always one of them)."""

UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = _BOTH | {
    "suffix": ("",),
}

NVEXT = ("ignore_eos", "min_tokens", "stop_token_ids", "top_k")
"""vLLM's sampling extras. Taken at the top level, or in Dynamo's `nvext` object (the top level wins)."""


Raw = msgspec.Raw
Unsupported = Mapping[str, tuple[Any, ...]]


class Fields:
    """Splits a body into its parameters, each still as JSON: what is not looked at costs no more than being skipped.

    `known` are the parameters of the request's schema.
    """

    def __init__(self, known: Iterable[str], unsupported: Unsupported) -> None:
        self._known = frozenset(known)
        self._unsupported = unsupported
        names = sorted(self._known | unsupported.keys() | IGNORED | {"nvext"})
        self._decoder = msgspec.json.Decoder(_raw_struct("Body", names))

    def split(self, body: bytes) -> dict[str, Raw]:
        """Only what the request schema knows and the client really set (null means "not set" throughout OpenAI's API).

        Raises `ApiError` 400: no JSON object, a parameter that is unsupported or unknown, one that is too long.
        """
        given = _given(_object(self._decoder, body, self._known | IGNORED))
        if (nvext := given.pop("nvext", None)) is not None:
            given = {**_nvext(nvext), **given}
        for name, value in given.items():
            if name in self._unsupported and name not in self._known:
                self._check_neutral(name, value)
        kept = {name: value for name, value in given.items() if name in self._known}
        for name, value in kept.items():
            if len(bytes_of(value)) > _MAX_BYTES.get(name, limits.MAX_FIELD_BYTES):
                raise bad_param(name, f"`{name}` is too long: {len(bytes_of(value)):,} bytes.")
        return kept

    def _check_neutral(self, name: str, value: Raw) -> None:
        neutral = self._unsupported[name]
        if len(bytes_of(value)) > _NEUTRAL_BYTES or not any(_same(_decoded(value), item) for item in neutral):
            raise _unsupported(name, neutral)


_NEUTRAL_BYTES = 256
"""No value that asks for nothing is longer than this."""

_MAX_BYTES: Mapping[str, int] = {
    "messages": sys.maxsize,
    "input": sys.maxsize,
    "instructions": sys.maxsize,
    "system": sys.maxsize,
    "tokens": sys.maxsize,
    "prompt": sys.maxsize,
    "stop": limits.MAX_STOP_BYTES,
    "bad_words": limits.MAX_STOP_BYTES,
    "tools": limits.MAX_TOOLS_BYTES,
    "response_format": limits.MAX_SCHEMA_BYTES,
    "structured_outputs": limits.MAX_SCHEMA_BYTES,
}
"""The first ones are what a body is for: `max_body_bytes` is their bound."""

_UNKNOWN = re.compile(r"contains unknown field `(?P<name>.*)`", re.DOTALL)


_ABSENT = Raw()


def bytes_of(value: Raw) -> memoryview:
    """A parameter's JSON, without a copy."""
    return memoryview(value)


def _raw_struct(name: str, fields: Iterable[str]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(field, Raw, _ABSENT) for field in fields], forbid_unknown_fields=True, gc=False)


def _given(fields: msgspec.Struct) -> dict[str, Raw]:
    # A hundred names, of which a request has five: those are told from the others without reading any.
    values = zip(fields.__struct_fields__, msgspec.structs.astuple(fields), strict=True)
    return {name: value for name, value in values if value is not _ABSENT and bytes_of(value) not in (b"", b"null")}


def _object(decoder: msgspec.json.Decoder[msgspec.Struct], body: bytes | Raw, near: Iterable[str]) -> msgspec.Struct:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            raise _unknown(unknown["name"], near) from None
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def not_json(error: Exception) -> ApiError:
    """The body cannot be read at all."""
    return ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json")


_nvext_decoder = msgspec.json.Decoder(_raw_struct("Nvext", NVEXT))


def _nvext(value: Raw) -> dict[str, Raw]:
    """The members of Dynamo's `nvext` object. Raises `ApiError` for one we do not know."""
    try:
        return _given(_nvext_decoder.decode(value))
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            name = f"nvext.{limits.shortened(unknown['name'])}"
            message = f"`{name}` is not supported; `nvext` may hold {', '.join(NVEXT)}."
            raise ApiError(400, message, param=name, code="unsupported_parameter") from None
        raise ApiError(400, "`nvext` must be an object.", param="nvext", code="invalid_type") from None


def _decoded(value: Raw) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def _same(value: Any, neutral: Any) -> bool:
    # In Python True == 1 and False == 0, but `logprobs: 0` is not `logprobs: false`.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _unsupported(name: str, neutral: tuple[Any, ...]) -> ApiError:
    allowed = "leave it out" + "".join(f" or send {item!r}" for item in neutral)
    message = f"The parameter `{name}` is not supported by this server; {allowed}."
    return ApiError(400, message, param=name, code="unsupported_parameter")


def _unknown(name: str, known: Iterable[str]) -> ApiError:
    # Looking for a near name takes time that grows with the square of its length.
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= limits.MAX_NAME_LENGTH else []
    name = limits.shortened(name)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return ApiError(400, f"Unknown parameter: `{name}`{hint}", param=name, code="unknown_parameter")


# --- msgspec decodes JSON to typed values. Its errors are rewritten in OpenAI's form, which names the parameter.

T = TypeVar("T")

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PartType = Literal["text"]
MessageRole = Literal["system", "developer", "user", "assistant", "tool"]

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_UNKNOWN_FIELD = re.compile(r"contains unknown field `(?P<name>[^`]*)`")
_ERROR_ENDS = 200
_CHOICES = {"].type": get_args(PartType), "].role": get_args(MessageRole)}
_MAP_INDEX = re.compile(r"\[\.\.\.\]")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, param: str = "") -> T:
    """Raises `ApiError` 400 that names the parameter; `param` is where the body is from, if it is a part."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from error


def invalid(text: str, param: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.max_tokens`" in OpenAI's manner, with the parameter named."""
    if len(text) > 2 * _ERROR_ENDS:  # it repeats a value of the client's
        text = f"{text[:_ERROR_ENDS]}…{text[-_ERROR_ENDS:]}"
    found = _PATH.search(text)
    inner = _MAP_INDEX.sub("", found["path"]) if found else ""
    path = f"{param}.{inner}" if param and inner and not inner.startswith("[") else param + inner
    detail = _PATH.sub("", text)
    for pattern, code, verb in (
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
        (_UNKNOWN_FIELD, "unknown_parameter", "Unknown parameter"),
    ):
        if member := pattern.search(detail):
            name = limits.shortened(member["name"])
            param = f"{path}.{name}" if path else name
            return bad_param(param, f"{verb}: `{param}`.", code)
    for end, choices in _CHOICES.items():
        if path.startswith("messages") and path.endswith(end) and "enum value" in detail:
            detail += f" (allowed: {', '.join(choices)})"
    code = "invalid_type" if ", got `" in detail else "invalid_value"
    return bad_param(path, f"Invalid value for `{path}`: {detail[:1].lower()}{detail[1:]}.", code)


def _bounded_array() -> msgspec.json.Decoder[msgspec.Struct]:
    """An array of 1 to `MAX_MESSAGES` values, none of which is made. It stops at the first one beyond them. A list
    would be measured only after all of it has been read."""
    fields = [(f"_{n}", msgspec.Raw, msgspec.Raw()) for n in range(1, limits.MAX_MESSAGES)]
    array = msgspec.defstruct("Array", [("_0", msgspec.Raw), *fields], array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(array)


_bounded_decoder = _bounded_array()


def values_of(raw: msgspec.Raw, param: str) -> list[msgspec.Raw]:
    """The values of a list, none of which is made; `MAX_MESSAGES` at most. Raises `ApiError` 400."""
    return [value for value in msgspec.structs.astuple(decode(_bounded_decoder, raw, param)) if bytes_of(value)]


# --- The `prompt` of a completions request: one or several, each text or token ids.

Prompt = str | list[int]

_text_decoder = msgspec.json.Decoder(str)
_ids_decoder = msgspec.json.Decoder(list[TokenId])

_BEGINNING_BYTES = 64
"""Enough for the two characters that say what a prompt is, and for white space between them."""


def read_prompt(raw: msgspec.Raw) -> tuple[Prompt | None, list[Prompt]]:
    """One prompt (also as a batch of one), or several. Its beginning says what it is: only that is made of it."""
    begins = b"".join(bytes(bytes_of(raw)[:_BEGINNING_BYTES]).split())[:2]
    if begins[:1] != b"[":
        return _not_empty(decode(_text_decoder, raw, "prompt")), []
    if begins[1:] == b'"':
        return _several(raw, _text_decoder)
    if bytes(raw).count(b",") >= limits.MAX_PROMPT_IDS:
        raise bad_param("prompt", f"`prompt` holds more than {limits.MAX_PROMPT_IDS:,} token ids.")
    if begins[1:] == b"[":
        return _several(raw, _ids_decoder)
    return _not_empty(decode(_ids_decoder, raw, "prompt")), []


def _several(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> tuple[Prompt | None, list[Prompt]]:
    values = values_of(raw, "prompt")
    if len(values) > limits.MAX_CHOICES:
        raise bad_param("prompt", f"`prompt` holds more than {limits.MAX_CHOICES} prompts.")
    prompts = [_not_empty(decode(decoder, value, f"prompt[{n}]")) for n, value in enumerate(values)]
    return (prompts[0], []) if len(prompts) == 1 else (None, prompts)


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt:
        raise _empty()
    return prompt


def _empty() -> ApiError:
    return bad_param("prompt", "`prompt` must not be empty.")


# --- Parameters that few requests have: their types, and what is passed on to the Processor.

TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Word = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
Alternatives = Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]


class JsonSchema(msgspec.Struct, frozen=True):
    """OpenAI's wrapping of a schema."""

    name: str = ""
    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of the fields. None stands for a field that is not given. A grammar is
    refused."""

    json: dict[str, Any] | str | None = None
    regex: Annotated[str, Meta(max_length=limits.MAX_PATTERN_LENGTH)] | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json_object: bool | None = None
    grammar: msgspec.Raw = msgspec.Raw()
    structural_tag: msgspec.Raw = msgspec.Raw()
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """OpenAI's wrapping of a function."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(msgspec.Struct, frozen=True):
    """The name alone."""

    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    """`tool_choice` as an object: this one is to be called."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class _Both(msgspec.Struct, frozen=True, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] = 1
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=limits.MAX_BAD_WORDS)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=limits.MAX_BAD_WORDS)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatExtras(_Both, frozen=True, kw_only=True):
    """Those of `POST /v1/chat/completions`."""

    tools: Annotated[list[Tool], Meta(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None


class CompletionExtras(_Both, frozen=True, kw_only=True):
    """Those of `POST /v1/completions`."""

    echo: bool = False
    logprobs: Alternatives | None = None


def of_chat(given: ChatExtras) -> Extras | None:
    """The extras that are passed on. None if all of them are neutral. Raises `ApiError` 400 that names the
    parameter."""
    if given.top_logprobs and not given.logprobs:
        raise bad_param("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
    template = dict(given.chat_template_kwargs or {})
    if given.reasoning_effort is not None:
        template["reasoning_effort"] = given.reasoning_effort
    _shallow("chat_template_kwargs", template)
    return _given_extras(
        _common(
            given,
            logprobs=given.top_logprobs if given.logprobs else None,
            tools=_tools(given),
            template=template or None,
        )
    )


def of_completion(given: CompletionExtras, prompts: Sequence[str | list[int]]) -> Extras | None:
    """As `of_chat`; `prompts` where there are several."""
    if len(prompts) * given.n > limits.MAX_CHOICES:
        message = f"{len(prompts)} prompts with {given.n} choices each: at most {limits.MAX_CHOICES} in all."
        raise bad_param("n" if given.n > 1 else "prompt", message)
    return _given_extras(_common(given, logprobs=given.logprobs, echo=given.echo, prompts=list(prompts) or None))


def _given_extras(extras: Extras) -> Extras | None:
    return None if extras == Extras() else extras


def _common(given: _Both, **more: Any) -> Extras:
    sampling = Sampling(
        min_p=given.min_p or None,
        repetition_penalty=None if given.repetition_penalty == 1 else given.repetition_penalty,
        logit_bias=given.logit_bias or None,
        bad_words=given.bad_words or None,
    )
    return Extras(
        n=given.n,
        form=_form(given),
        sampling=None if sampling == Sampling() else sampling,
        keep_special=not given.skip_special_tokens,
        include_stop=given.include_stop_str_in_output,
        **more,
    )


def _form(given: _Both) -> Form | None:
    one, other = _of_response_format(given.response_format), _of_structured(given.structured_outputs)
    if one is not None and other is not None:
        raise bad_param("structured_outputs", "`response_format` and `structured_outputs` exclude each other.")
    return one or other


ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}


def _of_response_format(wanted: ResponseFormat | None) -> Form | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Form("response_format", json=ANY_OBJECT)
    if wanted.json_schema is None:
        raise bad_param("response_format", "`response_format` of type json_schema needs a `json_schema`.")
    schema = ANY_OBJECT if wanted.json_schema.schema is None else wanted.json_schema.schema
    return Form("response_format", json=_shallow("response_format", schema))


def _of_structured(wanted: StructuredOutputs | None) -> Form | None:
    if wanted is None:
        return None
    name = "structured_outputs"
    for unknown in ("grammar", "structural_tag"):
        if bytes(getattr(wanted, unknown)) not in (b"", b"null"):
            message = f"`{name}.{unknown}` is not supported by this server; ask for json, json_object, regex or choice."
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    given = [wanted.json is not None, wanted.regex is not None, wanted.choice is not None, bool(wanted.json_object)]
    if sum(given) != 1:
        raise bad_param(name, f"`{name}` must hold one of json, json_object, regex and choice.")
    if wanted.json_object:
        return Form(name, json=ANY_OBJECT)
    if wanted.json is not None:
        return Form(name, json=_shallow(name, _schema(wanted.json)))
    return Form(name, regex=wanted.regex, choice=wanted.choice)


def _schema(schema: dict[str, Any] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_param("structured_outputs", f"`structured_outputs.json` is no JSON: {error}.") from None


def _tools(given: ChatExtras) -> Tools | None:
    tool_choice = given.tool_choice
    name = tool_choice.function.name if isinstance(tool_choice, ChosenTool) else None
    choice = "required" if isinstance(tool_choice, ChosenTool) else tool_choice
    if not given.tools:
        if choice == "required":
            raise bad_param("tool_choice", "When using `tool_choice`, `tools` must be set.")
        return None
    functions = [tool.function for tool in given.tools]
    if name is not None and name not in [function.name for function in functions]:
        shown = limits.shortened(name)
        raise bad_param("tool_choice", f"The tool specified in `tool_choice` ({shown}) is none of `tools`.")
    for function in functions:
        _shallow("tools", function.parameters)
    return Tools(functions, choice or "auto", name)


def _shallow(param: str, value: Any) -> Any:
    if limits.nested_deeper(value):
        raise bad_param(param, f"`{param}` is nested deeper than {limits.MAX_NESTING}.")
    return value


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]


# gc=False: no message refers back to itself. With the collector on, a body of half a million messages has it walk
# through all of them again and again.


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a message's content; text is the only kind there is here."""

    type: PartType
    text: str
    cache_control: msgspec.Raw = msgspec.Raw()


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """An assistant's call. `arguments` is JSON."""

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

    `payload` holds only fields that the client set, under one name each. They are `model`, `messages` or `prompt`.
    A message is `{"role", "content", "name"?}` with content a string. A prompt is a string or a list of token ids.
    Further fields: `max_tokens`, `stop` (a list),
    `stop_token_ids`, `temperature`, `top_p`, `top_k`, `seed`, `presence_penalty`, `frequency_penalty`,
    `ignore_eos`, `min_tokens`; and `extras` (`components.sim_api.requests`) where there are some.
    """

    model: str
    stream: bool
    include_usage: bool
    payload: Mapping[str, Any]
    continuous_usage: bool = False
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """The members of the request that the answer repeats (`POST /v1/responses`)."""


_CHAT_EXTRAS = frozenset(ChatExtras.__struct_fields__)
_COMPLETION_EXTRAS = frozenset(CompletionExtras.__struct_fields__)
_CHAT_FIELDS = Fields({*ChatRequest.__struct_fields__, *_CHAT_EXTRAS}, UNSUPPORTED_CHAT)
_COMPLETION_FIELDS = Fields({*CompletionRequest.__struct_fields__, *_COMPLETION_EXTRAS}, UNSUPPORTED_COMPLETION)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_extras_decoder = msgspec.json.Decoder(ChatExtras)
_completion_extras_decoder = msgspec.json.Decoder(CompletionExtras)


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _CHAT_FIELDS.split(body)
    extras = {name: fields.pop(name) for name in fields.keys() & _CHAT_EXTRAS}
    request = _typed(_chat_decoder, fields)
    payload = _common_payload(request, request.max_completion_tokens or request.max_tokens)
    payload["messages"] = [_message(message, n) for n, message in enumerate(_messages(request.messages))]
    return _parsed(request, payload, of_chat(decoded(_chat_extras_decoder, extras)) if extras else None)


def parse_completion(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _COMPLETION_FIELDS.split(body)
    extras = {name: fields.pop(name) for name in fields.keys() & _COMPLETION_EXTRAS}
    request = _typed(_completion_decoder, fields)
    payload = _common_payload(request, request.max_tokens)
    prompt, prompts = read_prompt(request.prompt)
    if prompt is not None:
        payload["prompt"] = prompt
    found = of_completion(decoded(_completion_extras_decoder, extras), prompts) if extras or prompts else None
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
    if len(bytes_of(raw)) <= limits.LARGE_BYTES:
        return decode(_messages_decoder, raw, "messages")
    return [_one_message(value, f"messages[{n}]") for n, value in enumerate(values_of(raw, "messages"))]


def _one_message(raw: msgspec.Raw, param: str) -> Message:
    if len(bytes_of(raw)) > limits.LARGE_BYTES:
        content = decode(_content_decoder, raw, param).content
        if bytes_of(content)[:1] == b"[":
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

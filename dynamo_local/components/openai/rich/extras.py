"""The parameters of a body that few requests have: their types, and what of them is passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.extras.asked import Extras, Form, FunctionTool, Sampling, Tools
from dynamo_local.components.openai.errors import ApiError, bad_param

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
    """vLLM's `structured_outputs`: one of them. What is None is not wanted; a grammar is not known here."""

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
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None


class CompletionExtras(_Both, frozen=True, kw_only=True):
    """Those of `POST /v1/completions`."""

    echo: bool = False
    logprobs: Alternatives | None = None


def of_chat(asked: ChatExtras) -> Extras | None:
    """What is passed on; None where all of it is neutral. Raises `ApiError` 400 that names the parameter."""
    if asked.top_logprobs and not asked.logprobs:
        raise bad_param("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
    template = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        template["reasoning_effort"] = asked.reasoning_effort
    _shallow("chat_template_kwargs", template)
    return _given(
        _common(
            asked,
            logprobs=asked.top_logprobs if asked.logprobs else None,
            tools=_tools(asked),
            template=template or None,
        )
    )


def of_completion(asked: CompletionExtras, prompts: Sequence[str | list[int]]) -> Extras | None:
    """As `of_chat`; `prompts` where there are several."""
    if len(prompts) * asked.n > limits.MAX_CHOICES:
        message = f"{len(prompts)} prompts with {asked.n} choices each: at most {limits.MAX_CHOICES} in all."
        raise bad_param("n" if asked.n > 1 else "prompt", message)
    return _given(_common(asked, logprobs=asked.logprobs, echo=asked.echo, prompts=list(prompts) or None))


def _given(extras: Extras) -> Extras | None:
    return None if extras == Extras() else extras


def _common(asked: _Both, **more: Any) -> Extras:
    sampling = Sampling(
        min_p=asked.min_p or None,
        repetition_penalty=None if asked.repetition_penalty == 1 else asked.repetition_penalty,
        logit_bias=asked.logit_bias or None,
        bad_words=asked.bad_words or None,
    )
    return Extras(
        n=asked.n,
        form=_form(asked),
        sampling=None if sampling == Sampling() else sampling,
        keep_special=not asked.skip_special_tokens,
        include_stop=asked.include_stop_str_in_output,
        **more,
    )


def _form(asked: _Both) -> Form | None:
    one, other = _of_response_format(asked.response_format), _of_structured(asked.structured_outputs)
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


def _tools(asked: ChatExtras) -> Tools | None:
    asked_for = asked.tool_choice
    name = asked_for.function.name if isinstance(asked_for, ChosenTool) else None
    choice = "required" if isinstance(asked_for, ChosenTool) else asked_for
    if not asked.tools:
        if choice == "required":
            raise bad_param("tool_choice", "When using `tool_choice`, `tools` must be set.")
        return None
    functions = [tool.function for tool in asked.tools]
    if name is not None and name not in [function.name for function in functions]:
        shown = limits.shortened(name)
        raise bad_param("tool_choice", f"The tool specified in `tool_choice` ({shown}) is none of `tools`.")
    for function in functions:
        _shallow("tools", function.parameters)
    return Tools(functions, choice or "auto", name, asked.parallel_tool_calls)


def _shallow(param: str, value: Any) -> Any:
    if limits.nested_deeper(value):
        raise bad_param(param, f"`{param}` is nested deeper than {limits.MAX_NESTING}.")
    return value

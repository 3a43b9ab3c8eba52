"""`POST /v1/responses`: OpenAI's newer API. Nothing is kept: a conversation is sent whole.

Source: https://platform.openai.com/docs/api-reference/responses (read 2025), and the models of the `openai` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.extras.asked import FunctionTool
from dynamo_local.components.openai import params
from dynamo_local.components.openai.decoding import decode, values_of
from dynamo_local.components.openai.errors import bad_param
from dynamo_local.components.openai.requests import ParsedRequest
from dynamo_local.components.openai.rich.as_chat import call_of, joined, optional, parsed_as_chat, text_of

_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls")
_OWN = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning")
_IGNORED = ("include", "store", "truncation", "max_tool_calls", "top_logprobs", "stream_options")
_UNSUPPORTED = {"background": (False,), "conversation": (), "previous_response_id": (), "prompt": ()}
_fields = params.Fields({*_SAME, *_OWN, *_IGNORED}, _UNSUPPORTED)
_NAMES = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}


class _Item(msgspec.Struct, frozen=True, gc=False):
    type: str = "message"
    role: str | None = None
    content: msgspec.Raw = msgspec.Raw()
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: msgspec.Raw = msgspec.Raw()


class _Tool(FunctionTool, frozen=True, kw_only=True):
    type: Literal["function"]


class _Named(msgspec.Struct, frozen=True):
    name: str
    type: Literal["function"] = "function"


class _Format(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | bool | None = None


class _Text(msgspec.Struct, frozen=True):
    format: _Format = _Format()


class _Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None


_item = msgspec.json.Decoder(_Item)
_text = msgspec.json.Decoder(str)
_tools = msgspec.json.Decoder(Annotated[list[_Tool], Meta(max_length=limits.MAX_TOOLS)])
_choice = msgspec.json.Decoder(Literal["none", "auto", "required"] | _Named)
_form = msgspec.json.Decoder(_Text)
_reasoning = msgspec.json.Decoder(_Reasoning)


def parse_responses(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _fields.split(body)
    if "input" not in fields:
        raise bad_param("input", "Missing required parameter: `input`.", "missing_required_parameter")
    instructions = optional(_text, fields, "instructions")
    tools = optional(_tools, fields, "tools") or []
    choice = optional(_choice, fields, "tool_choice")
    form = (optional(_form, fields, "text") or _Text()).format
    reasoning = optional(_reasoning, fields, "reasoning") or _Reasoning()
    system = [] if not instructions else [{"role": "system", "content": instructions}]
    chat: dict[str, Any] = {
        **{name: fields[name] for name in _SAME if name in fields},
        "max_tokens": fields.get("max_output_tokens"),
        "messages": [*system, *joined(_messages(fields["input"]))],
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools] or None,
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, _Named)
        else choice,
        "response_format": _response_format(form),
        "reasoning_effort": reasoning.effort,
    }
    told = {
        "instructions": instructions,
        "max_output_tokens": fields.get("max_output_tokens"),
        "temperature": fields.get("temperature", 1.0),
        "top_p": fields.get("top_p", 1.0),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": form},
        "tools": tools,
        "tool_choice": choice or "auto",
        "metadata": {},
    }
    return parsed_as_chat(chat, told, _NAMES)


def _function(tool: _Tool) -> FunctionTool:
    return FunctionTool(tool.name, tool.description, tool.parameters, tool.strict)


def _response_format(form: _Format) -> dict[str, Any] | None:
    if form.type == "text":
        return None
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema}}


def _messages(raw: msgspec.Raw) -> Iterator[dict[str, Any]]:
    if params.bytes_of(raw)[:1] != b"[":
        yield {"role": "user", "content": decode(_text, raw, "input")}
        return
    for n, value in enumerate(values_of(raw, "input")):
        param = f"input[{n}]"
        item = decode(_item, value, param)
        if item.type == "message":
            content = text_of(item.content, f"{param}.content", ("input_text", "output_text", "text"))
            yield {"role": item.role or "user", "content": content}
        elif item.type == "function_call":
            yield call_of(item.call_id, item.name, item.arguments)
        elif item.type == "function_call_output":
            content = text_of(item.output, f"{param}.output", ("input_text", "output_text", "text"))
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif item.type != "reasoning":  # it came from a model, and goes to none here
            kind = limits.shortened(item.type)
            raise bad_param(f"{param}.type", f"`{param}` is of type {kind}, which this server does not know.")

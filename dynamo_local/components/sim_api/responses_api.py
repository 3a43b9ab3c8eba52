"""`POST /v1/responses`: OpenAI's newer API. Nothing is kept: a conversation is sent whole.

Source: https://platform.openai.com/docs/api-reference/responses (read 2025), and the models of the `openai` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.openai import requests as params
from dynamo_local.components.openai.errors import bad_param
from dynamo_local.components.openai.requests import ParsedRequest, decode, values_of
from dynamo_local.components.openai.responses import ResponseHead
from dynamo_local.components.sim_api.chats import call_of, joined, optional, parsed_as_chat, text_of
from dynamo_local.components.sim_api.formats import Gathered, Item
from dynamo_local.components.sim_api.requests import FunctionTool

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


# --- responses_format
# Answers of `POST /v1/responses`: output items, each with its own events while it grows.

_encode = msgspec.json.Encoder().encode


class ResponsesFormat:
    """One response's shape. There is one choice; its text is a message, and each call an item of its own."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        self._head = head
        self._told = request.told
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = 0

    def first(self) -> bytes:
        begun = self._response("in_progress", None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def events(self, items: Sequence[Item], gathered: Gathered) -> bytes:
        # `first` is asked for after this, and its events come before: their numbers are kept free.
        self._number = self._number or 2
        return b"".join(self._of(item) for item in items)

    def last(self, gathered: Gathered) -> bytes:
        status = _status(gathered)
        return self._closed() + self._event(f"response.{status}", response=self._response(status, gathered))

    def whole(self, gathered: Gathered) -> bytes:
        for choice in gathered.choices.values():
            if choice.text or not choice.calls:
                self._output.append(self._message(choice.text))
            for call in choice.calls:
                self._output.append(self._call(call.id, call.name, "".join(call.arguments)))
        return _encode(self._response(_status(gathered), gathered))

    def _of(self, item: Item) -> bytes:
        out = b""
        if item["text"]:
            out += self._text(item["text"])
        for _, id_, name, piece in item.get("calls", ()):
            if id_ is not None:
                out += self._closed() + self._opened(self._call(id_, name, ""))
            assert self._open is not None
            self._open["arguments"] += piece
            out += self._event("response.function_call_arguments.delta", **self._place(), delta=piece)
        return out

    def _text(self, piece: str) -> bytes:
        out = b""
        if self._open is None or self._open["type"] != "message":
            out = self._closed() + self._opened(self._message(""))
            out += self._event("response.content_part.added", **self._place(), content_index=0, part=_part(""))
        assert self._open is not None
        self._open["content"][0]["text"] += piece
        delta = {"content_index": 0, "delta": piece, "logprobs": []}
        return out + self._event("response.output_text.delta", **self._place(), **delta)

    def _opened(self, item: dict[str, Any]) -> bytes:
        self._open = item
        self._output.append(item)
        shown = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {})
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)

    def _closed(self) -> bytes:
        item, out = self._open, b""
        if item is None:
            return out
        if item["type"] == "message":
            text = item["content"][0]["text"]
            out += self._event("response.output_text.done", **self._place(), content_index=0, text=text, logprobs=[])
            out += self._event("response.content_part.done", **self._place(), content_index=0, part=_part(text))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            out += self._event("response.function_call_arguments.done", **self._place(), **done)
        out += self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._open = None
        return out

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1}

    def _message(self, text: str) -> dict[str, Any]:
        name = f"msg_{self._head.request_id}"
        return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": [_part(text)]}

    def _call(self, id_: str, name: str, arguments: str) -> dict[str, Any]:
        members = {"type": "function_call", "id": f"fc_{id_}", "call_id": id_, "status": "completed"}
        return {**members, "name": name, "arguments": arguments}

    def _event(self, kind: str, **members: Any) -> bytes:
        # The first two are encoded after those that follow them.
        number = {"response.created": 0, "response.in_progress": 1}.get(kind, self._number)
        self._number += kind not in ("response.created", "response.in_progress")
        data = _encode({"type": kind, "sequence_number": number, **members})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, status: str, gathered: Gathered | None) -> dict[str, Any]:
        return {
            "id": f"resp_{self._head.request_id}",
            "object": "response",
            "created_at": self._head.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head.model,
            "output": [] if gathered is None else self._output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if gathered is None else _usage(gathered.usage or {}),
            **self._told,
        }


def _status(gathered: Gathered) -> str:
    cut = any(choice.finish_reason == "length" for choice in gathered.choices.values())
    return "incomplete" if cut else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }

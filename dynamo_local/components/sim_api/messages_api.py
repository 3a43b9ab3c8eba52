"""`POST /v1/messages`: Anthropic's API, which `vllm serve` has, too; and its format of errors (`openai.errors`).

Source: https://docs.anthropic.com/en/api/messages (read 2025), and vLLM's `entrypoints/anthropic`.
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

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "max_tokens")
_fields = params.Fields({*_SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking"}, {})
_NAMES = {"stop": "stop_sequences"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_encode = msgspec.json.Encoder().encode


class _Message(msgspec.Struct, frozen=True, gc=False):
    role: Literal["user", "assistant"]
    content: msgspec.Raw


class _Block(msgspec.Struct, frozen=True, gc=False):
    type: str
    text: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: msgspec.Raw = msgspec.Raw()


class _Tool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


_message = msgspec.json.Decoder(_Message)
_block = msgspec.json.Decoder(_Block)
_tools = msgspec.json.Decoder(Annotated[list[_Tool], Meta(max_length=limits.MAX_TOOLS)])
_choice = msgspec.json.Decoder(_Choice)


def parse_messages(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _fields.split(body)
    for name in ("messages", "max_tokens"):
        if name not in fields:
            raise bad_param(name, f"Missing required parameter: `{name}`.", "missing_required_parameter")
    tools = optional(_tools, fields, "tools") or []
    choice = optional(_choice, fields, "tool_choice") or _Choice("auto")
    system = text_of(fields["system"], "system", ("text",)) if "system" in fields else ""
    chat: dict[str, Any] = {
        **{name: fields[name] for name in _SAME if name in fields},
        "messages": [*([{"role": "system", "content": system}] if system else []), *_messages(fields["messages"])],
        "stop": fields.get("stop_sequences"),
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools] or None,
        "tool_choice": _tool_choice(choice) if tools else None,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }
    return parsed_as_chat(chat, {}, _NAMES)


def _function(tool: _Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}


def _tool_choice(choice: _Choice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"any": "required"}.get(choice.type, choice.type)


def _messages(raw: msgspec.Raw) -> Iterator[dict[str, Any]]:
    for n, value in enumerate(values_of(raw, "messages")):
        message = decode(_message, value, f"messages[{n}]")
        param = f"messages[{n}].content"
        if params.bytes_of(message.content)[:1] == b"[":
            yield from joined(_of_blocks(message.role, message.content, param))
        else:
            yield {"role": message.role, "content": text_of(message.content, param, ("text",))}


def _of_blocks(role: str, raw: msgspec.Raw, param: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, value in enumerate(values_of(raw, param)):
        block = decode(_block, value, f"{param}[{n}]")
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_use" and role == "assistant":
            calls.append(call_of(block.id, block.name, bytes(block.input).decode()))
        elif block.type == "tool_result" and role == "user":
            content = text_of(block.content, f"{param}[{n}].content", ("text",))
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif block.type not in ("thinking", "redacted_thinking"):
            kind = limits.shortened(block.type)
            raise bad_param(f"{param}[{n}].type", f"`{param}[{n}]` is of type {kind}, which this server does not take.")
    if texts or role == "assistant":
        yield {"role": role, "content": "\n".join(texts)}
    yield from calls


class MessagesFormat:
    """One response's shape: content blocks, each with its own events."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        self._head = head
        self._blocks = 0
        self._open: str | None = None
        self._prompt_tokens = 0

    def first(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, usage))

    def events(self, items: Sequence[Item], gathered: Gathered) -> bytes:
        self._prompt_tokens = gathered.prompt_tokens
        return b"".join(self._of(item) for item in items)

    def _of(self, item: Item) -> bytes:
        out = b""
        if item["text"]:
            out += self._opened("text", {"type": "text", "text": ""}) if self._open != "text" else b""
            out += self._delta({"type": "text_delta", "text": item["text"]})
        for _, id_, name, piece in item.get("calls", ()):
            if id_ is not None:
                out += self._opened("tool_use", {"type": "tool_use", "id": id_, "name": name, "input": {}})
            out += self._delta({"type": "input_json_delta", "partial_json": piece})
        return out

    def last(self, gathered: Gathered) -> bytes:
        out = self._closed()
        delta = {"stop_reason": _stop_reason(gathered), "stop_sequence": None}
        return out + _event("message_delta", delta=delta, usage=_usage(gathered)) + _event("message_stop")

    def whole(self, gathered: Gathered) -> bytes:
        blocks: list[dict[str, Any]] = []
        for choice in gathered.choices.values():
            if choice.text or not choice.calls:
                blocks.append({"type": "text", "text": choice.text})
            for call in choice.calls:
                arguments = "".join(call.arguments)
                complete = choice.finish_reason != "length" or call is not choice.calls[-1]
                value = msgspec.Raw(arguments.encode()) if complete else {}
                blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
        return _encode(self._message(blocks, _stop_reason(gathered), _usage(gathered)))

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        out = self._closed()
        self._open = kind
        return out + _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _message(self, content: list[Any], stop_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(kind: str, **members: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **members}) + b"\n\n"


def _stop_reason(gathered: Gathered) -> str:
    """As OpenAI's reason; where one tool was named that is `stop`, but here a call is always told."""
    reasons = [choice for choice in gathered.choices.values()]
    reason = reasons[0].finish_reason or "stop" if reasons else "stop"
    called = reason == "stop" and bool(reasons and reasons[0].calls)
    return "tool_use" if called else _STOP_REASONS[reason]


def _usage(gathered: Gathered) -> dict[str, Any]:
    usage = gathered.usage or {}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    fresh = usage["prompt_tokens"] - cached
    return {"input_tokens": fresh, "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}

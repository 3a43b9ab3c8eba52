"""In the Frontend: `POST /v1/responses` (OpenAI's newer API) and `POST /v1/messages` (Anthropic's).

Both are read as a chat, whose parser checks them, and answered from the items of a chat. Nothing is kept: a client
sends the whole conversation. Sources: https://platform.openai.com/docs/api-reference/responses and
https://docs.anthropic.com/en/api/messages (both read in 2025).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.openai.errors import ApiError, bad_param
from dynamo_local.components.openai.requests import Fields, ParsedRequest, decoded, parse_chat
from dynamo_local.components.openai.responses import ResponseHead
from dynamo_local.components.sim_api.formats import Item, OneChoice, RichFormat
from dynamo_local.components.sim_api.requests import FunctionTool

_encode = msgspec.json.Encoder().encode
_Text = Literal["text", "input_text", "output_text"]


class _Part(msgspec.Struct, frozen=True, gc=False):
    type: Literal[_Text, "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: msgspec.Raw = msgspec.Raw(b'""')


_Parts = Annotated[list[_Part], Meta(max_length=limits.MAX_MESSAGES)]


class _Turn(msgspec.Struct, frozen=True, gc=False):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = "user"
    content: str | _Parts = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | _Parts = ""


_Turns = Annotated[list[_Turn], Meta(max_length=limits.MAX_MESSAGES)]


class _ResponsesTool(FunctionTool, frozen=True, kw_only=True):
    type: Literal["function"]


class _MessagesTool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    type: Literal["function", "auto", "any", "tool", "none"] = "auto"
    name: str = ""


class _Format(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | bool | None = None


class _TextOptions(msgspec.Struct, frozen=True):
    format: _Format = _Format()


class _Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None


class _Responses(msgspec.Struct, frozen=True):
    input: str | _Turns
    instructions: str | None = None
    tools: Annotated[list[_ResponsesTool], Meta(max_length=limits.MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"null")


class _Messages(msgspec.Struct, frozen=True):
    messages: _Turns
    max_tokens: msgspec.Raw
    system: str | _Parts = ""
    tools: Annotated[list[_MessagesTool], Meta(max_length=limits.MAX_TOOLS)] = []
    tool_choice: _Choice = _Choice()
    stop_sequences: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSES_SAME = ("model", "stream", "temperature", "top_p")
_MESSAGES_SAME = ("model", "stream", "temperature", "top_p", "top_k")
_IGNORED = {"include", "store", "truncation", "max_tool_calls", "top_logprobs", "stream_options"}
_UNSUPPORTED = {"background": (False,), "conversation": (), "previous_response_id": (), "prompt": ()}
_responses_fields = Fields({*_RESPONSES_SAME, *_Responses.__struct_fields__, *_IGNORED}, _UNSUPPORTED)
_messages_fields = Fields({*_MESSAGES_SAME, *_Messages.__struct_fields__, "thinking"}, {})
_responses, _messages = msgspec.json.Decoder(_Responses), msgspec.json.Decoder(_Messages)
_RESPONSES_NAMES = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}


def _parsed(chat: Mapping[str, Any], echoed: Mapping[str, Any], names: Mapping[str, str]) -> ParsedRequest:
    """The chat as a request with extras. `names` are what this API calls a chat's parameters."""
    try:
        request = parse_chat(_encode({name: value for name, value in chat.items() if value is not None}))
    except ApiError as error:
        param = names.get((error.param or "").split(".")[0].split("[")[0], error.param)
        message = error.message.replace(f"`{error.param}`", f"`{param}`")
        raise ApiError(error.status, message, param=param, code=error.code) from None
    return replace(request, payload={"extras": {}, **request.payload}, echoed=echoed)


def parse_responses(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _responses_fields.split(body)
    given = decoded(_responses, {name: fields[name] for name in fields if name not in _IGNORED})
    same = {name: fields[name] for name in _RESPONSES_SAME if name in fields}
    form, choice = given.text.format, given.tool_choice
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, _Choice) else choice
    schema = {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema}}
    tools = [FunctionTool(one.name, one.description, one.parameters, one.strict) for one in given.tools]
    turns = [_Turn(content=given.input)] if isinstance(given.input, str) else given.input
    chat = {
        **same,
        "max_tokens": given.max_output_tokens,
        "messages": [*_system(given.instructions or ""), *_joined(m for turn in turns for m in _of_item(turn))],
        "tools": _wrapped(tools),
        "tool_choice": named,
        "response_format": None if form.type == "text" else schema,
        "reasoning_effort": given.reasoning.effort,
    }
    echoed = {
        **{"temperature": 1.0, "top_p": 1.0, "parallel_tool_calls": True},
        **{name: value for name, value in same.items() if name not in ("model", "stream")},
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "reasoning": {"effort": given.reasoning.effort, "summary": None},
        "text": {"format": form},
        "tools": given.tools,
        "tool_choice": choice or "auto",
        "metadata": {},
    }
    return _parsed(chat, echoed, _RESPONSES_NAMES)


def parse_messages(body: bytes) -> ParsedRequest:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _messages_fields.split(body)
    given = decoded(_messages, fields)
    choice = given.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    tools = [FunctionTool(one.name, one.description, one.input_schema) for one in given.tools]
    chat = {
        **{name: fields[name] for name in _MESSAGES_SAME if name in fields},
        "max_tokens": given.max_tokens,
        "messages": [*_system(_text(given.system)), *(m for turn in given.messages for m in _joined(_of_blocks(turn)))],
        "stop": given.stop_sequences,
        "tools": _wrapped(tools),
        "tool_choice": (named if choice.type == "tool" else choice.type.replace("any", "required")) if tools else None,
    }
    return _parsed(chat, {}, {"stop": "stop_sequences"})


def _wrapped(tools: list[FunctionTool]) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": tool} for tool in tools] or None


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _called(id_: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id_, "type": "function", "function": function}]}


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow an assistant's message, or each other, become one message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and out and out[-1]["role"] == "assistant":
            out[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            out.append(message)
    return out


def _of_item(turn: _Turn) -> Iterator[dict[str, Any]]:
    if turn.type == "message":
        yield {"role": turn.role, "content": _text(turn.content)}
    elif turn.type == "function_call":
        yield _called(turn.call_id, turn.name, turn.arguments)
    elif turn.type == "function_call_output":
        yield {"role": "tool", "tool_call_id": turn.call_id, "content": _text(turn.output)}


_content = msgspec.json.Decoder(str | _Parts)


def _of_blocks(turn: _Turn) -> Iterator[dict[str, Any]]:
    if turn.role not in ("user", "assistant"):
        raise bad_param("messages", "`role` must be user or assistant.")
    blocks = [_Part("text", turn.content)] if isinstance(turn.content, str) else turn.content
    for block in blocks:
        if block.type == "tool_result":
            content = _text(decoded(_content, block.content))  # type: ignore[arg-type]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    texts = [block.text for block in blocks if block.type == "text"]
    if texts or turn.role == "assistant":
        yield {"role": turn.role, "content": "\n".join(texts)}
    for block in blocks:
        if block.type == "tool_use":
            yield _called(block.id, block.name, bytes(block.input).decode())


class _OneBlock(RichFormat):
    """An answer of one choice as one block: its text, or its call."""

    _begun = False

    @property
    def choice(self) -> OneChoice:
        return self.choices.get(0) or OneChoice()

    def events(self, items: Sequence[Item]) -> bytes:
        out = b""
        for item in items:
            if piece := item["call"][2] if "call" in item else item["text"]:
                out += self._delta(piece) if self._begun else self._start() + self._delta(piece)
                self._begun = True
        return out

    def last(self) -> bytes:
        return (self._stop() if self._begun else b"") + self._end()

    def _event(self, kind: str, **members: Any) -> bytes:
        return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **members}) + b"\n\n"

    def _start(self) -> bytes:
        raise NotImplementedError

    def _delta(self, piece: str) -> bytes:
        raise NotImplementedError

    def _stop(self) -> bytes:
        raise NotImplementedError

    def _end(self) -> bytes:
        raise NotImplementedError


class MessagesFormat(_OneBlock):
    """Anthropic's message with one content block."""

    def first(self) -> bytes:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        return self._event("message_start", message=self._message([], None, usage))

    def whole(self) -> bytes:
        complete = self.choice.finish_reason != "length"
        block = self._block(self.choice.text, self.choice.call.arguments if self.choice.call and complete else "{}")
        return _encode(self._message([block], self._stop_reason(), self._counts()))

    def _block(self, text: str, arguments: str) -> dict[str, Any]:
        if (call := self.choice.call) is None:
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(arguments.encode())}

    def _start(self) -> bytes:
        return self._event("content_block_start", index=0, content_block=self._block("", "{}"))

    def _delta(self, piece: str) -> bytes:
        if self.choice.call is None:
            return self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
        return self._event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": piece})

    def _stop(self) -> bytes:
        return self._event("content_block_stop", index=0)

    def _end(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return self._event("message_delta", delta=delta, usage=self._counts()) + self._event("message_stop")

    def _message(self, content: list[Any], stop_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **{"id": f"msg_{self.head.request_id}", "type": "message", "role": "assistant", "model": self.head.model},
            **{"content": content, "stop_reason": stop_reason, "stop_sequence": None, "usage": usage},
        }

    def _stop_reason(self) -> str:
        """A call always ends with `tool_use`, also one of a named tool."""
        if self.choice.finish_reason == "length":
            return "max_tokens"
        return "end_turn" if self.choice.call is None else "tool_use"

    def _counts(self) -> dict[str, Any]:
        usage = self.usage or {}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        fresh = usage["prompt_tokens"] - cached
        return {"input_tokens": fresh, "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}


class ResponsesFormat(_OneBlock):
    """OpenAI's response with one output item."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        super().__init__(head, request)
        self._numbers = itertools.count()

    def first(self) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def whole(self) -> bytes:
        return _encode(self._response(self._status(), [self._item()]))

    def _item(self, status: str = "completed") -> dict[str, Any]:
        if (call := self.choice.call) is None:
            content = [] if status == "in_progress" else [_part(self.choice.text)]
            members = {"type": "message", "id": f"msg_{self.head.request_id}", "role": "assistant", "content": content}
        else:
            arguments = "" if status == "in_progress" else call.arguments
            members = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
            members["arguments"] = arguments
        return {**members, "status": status}

    def _place(self) -> dict[str, Any]:
        item = {"item_id": self._item()["id"], "output_index": 0}
        return item if self.choice.call is not None else {**item, "content_index": 0}

    def _start(self) -> bytes:
        out = self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        if self.choice.call is None:
            out += self._event("response.content_part.added", **self._place(), part=_part(""))
        return out

    def _delta(self, piece: str) -> bytes:
        if self.choice.call is not None:
            return self._event("response.function_call_arguments.delta", **self._place(), delta=piece)
        return self._event("response.output_text.delta", **self._place(), delta=piece, logprobs=[])

    def _stop(self) -> bytes:
        place, text = self._place(), self.choice.text
        if (call := self.choice.call) is not None:
            done = {"name": call.name, "arguments": call.arguments}
            out = self._event("response.function_call_arguments.done", **place, **done)
        else:
            out = self._event("response.output_text.done", **place, text=text, logprobs=[])
            out += self._event("response.content_part.done", **place, part=_part(text))
        return out + self._event("response.output_item.done", output_index=0, item=self._item())

    def _end(self) -> bytes:
        response = self._response(self._status(), [self._item()] if self._begun else [])
        return self._event(f"response.{self._status()}", response=response)

    def _status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def _event(self, kind: str, **members: Any) -> bytes:
        return super()._event(kind, sequence_number=next(self._numbers), **members)

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        usage = None
        if self.usage and status != "in_progress":  # a short answer may be complete before its first event is written
            usage = {
                "input_tokens": self.usage["prompt_tokens"],
                "input_tokens_details": self.usage["prompt_tokens_details"],
                "output_tokens": self.usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage["total_tokens"],
            }
        return {
            "id": f"resp_{self.head.request_id}",
            "object": "response",
            "created_at": self.head.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.head.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self.request.echoed,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

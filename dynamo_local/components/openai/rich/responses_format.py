"""Answers of `POST /v1/responses`: output items, each with its own events while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_local.components.openai.requests import ParsedRequest
from dynamo_local.components.openai.responses import ResponseHead
from dynamo_local.components.openai.rich.formats import Gathered, Item

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

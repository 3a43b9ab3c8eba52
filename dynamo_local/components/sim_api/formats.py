"""Answers of requests with extras, in OpenAI's two oldest forms: choices, tool calls, logprobs, usage as it grows.

They are made from what `components.sim_api.choices` sends, which the formats of other APIs read, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dynamo_local.components.openai.requests import ParsedRequest
from dynamo_local.components.openai.responses import DONE, ResponseHead

Item = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Call:
    """A tool call, as far as it has come."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OneChoice:
    """One choice, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    tokens: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Gathered:
    """All choices, by index, and the usage once they are complete."""

    def __init__(self) -> None:
        self.choices: dict[int, OneChoice] = {}
        self.prompt_tokens = 0
        self.usage: dict[str, Any] | None = None

    def take(self, batch: Sequence[Item]) -> list[Item]:
        """Notes the items; returns those that say something."""
        items: list[Item] = []
        for item in batch:
            if item["usage"] is not None:
                self.usage = item["usage"]
                continue
            self.prompt_tokens = item.get("prompt_tokens", self.prompt_tokens)
            if item["num_tokens"] or item["text"] or item["finish_reason"]:
                self._note(item)
                items.append(item)
        return items

    def _note(self, item: Item) -> None:
        choice = self.choices.setdefault(item["index"], OneChoice())
        choice.tokens += item["num_tokens"]
        choice.finish_reason = item["finish_reason"]
        if item["text"]:
            choice.texts.append(item["text"])
        if (logprobs := item.get("logprobs")) is not None:
            choice.logprobs = [*(choice.logprobs or ()), *logprobs]
        for _, id_, name, piece in item.get("calls", ()):
            if id_ is not None:
                choice.calls.append(Call(id_, name))
            choice.calls[-1].arguments.append(piece)

    def in_order(self) -> Iterable[tuple[int, OneChoice]]:
        """(index, choice)"""
        return sorted(self.choices.items())


class RichFormat(Protocol):
    """One response's shape; made once per request."""

    def first(self) -> bytes:
        """Events before the first of a choice."""
        ...

    def events(self, items: Sequence[Item], gathered: Gathered) -> bytes:
        """Of these items, which `gathered` has noted."""
        ...

    def last(self, gathered: Gathered) -> bytes:
        """What ends the stream."""
        ...

    def whole(self, gathered: Gathered) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class _Rich:
    def __init__(self, head: ResponseHead, request: ParsedRequest, prefix: str, kind: str, chunk_kind: str) -> None:
        self._members = head.members(prefix, kind)
        self._chunk = head.members(prefix, chunk_kind)
        self._usage = head.include_usage
        self._continuous = head.include_usage and request.continuous_usage

    def first(self) -> bytes:
        return b""

    def last(self, gathered: Gathered) -> bytes:
        end = self._event([], gathered.usage) if self._usage else b""
        return end + DONE

    def _event(self, choices: list[Any], usage: Any) -> bytes:
        chunk = {**self._chunk, "choices": choices}
        if self._usage:
            chunk["usage"] = usage
        return b"data: " + _encode(chunk) + b"\n\n"

    def _choice_event(self, choice: dict[str, Any], gathered: Gathered) -> bytes:
        usage = None
        if self._continuous:
            done = gathered.choices[choice["index"]].tokens
            usage = {"prompt_tokens": gathered.prompt_tokens, "completion_tokens": done}
            usage["total_tokens"] = gathered.prompt_tokens + done
        return self._event([choice], usage)

    def _whole(self, choices: list[Any], gathered: Gathered) -> bytes:
        return _encode({**self._members, "choices": choices, "usage": gathered.usage})


class RichChat(_Rich):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        super().__init__(head, request, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._begun: set[int] = set()

    def events(self, items: Sequence[Item], gathered: Gathered) -> bytes:
        return b"".join(self._choice_event(choice, gathered) for item in items for choice in self._choices(item))

    def _choices(self, item: Item) -> Iterable[dict[str, Any]]:
        index = item["index"]
        if index not in self._begun:
            self._begun.add(index)
            yield _delta(index, {"role": "assistant", "content": ""})
        logprobs = _chat_logprobs(item.get("logprobs"))
        if item["text"] or logprobs is not None:
            yield _delta(index, {"content": item["text"]}, logprobs)
        for number, id_, name, piece in item.get("calls", ()):
            call: dict[str, Any] = {"index": number, "function": {"arguments": piece}}
            if id_ is not None:
                call = {"index": number, "id": id_, "type": "function", "function": {"name": name, "arguments": piece}}
            yield _delta(index, {"tool_calls": [call]})
        if item["finish_reason"] is not None:
            yield _delta(index, {}, None, item["finish_reason"])

    def whole(self, gathered: Gathered) -> bytes:
        return self._whole([self._of(index, choice) for index, choice in gathered.in_order()], gathered)

    def _of(self, index: int, choice: OneChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]
        logprobs = _chat_logprobs(choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _delta(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(logprobs: list[Any] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    found = [
        {**_one(token, value), "top_logprobs": [_one(*other) for other in others]} for token, value, others in logprobs
    ]
    return {"content": found, "refusal": None}


def _one(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


class RichCompletion(_Rich):
    """`text_completion`, streamed or not."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        super().__init__(head, request, "cmpl", "text_completion", "text_completion")
        self._offsets: dict[int, int] = {}

    def events(self, items: Sequence[Item], gathered: Gathered) -> bytes:
        return b"".join(self._choice_event(self._choice(item), gathered) for item in items)

    def _choice(self, item: Item) -> dict[str, Any]:
        index = item["index"]
        logprobs = self._logprobs(index, item.get("logprobs"))
        return {"index": index, "text": item["text"], "logprobs": logprobs, "finish_reason": item["finish_reason"]}

    def whole(self, gathered: Gathered) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": self._logprobs(index, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in gathered.in_order()
            ],
            gathered,
        )

    def _logprobs(self, index: int, logprobs: list[Any] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        at = self._offsets.get(index, 0)
        for token, value, others in logprobs:
            found["text_offset"].append(at)
            found["tokens"].append(token)
            found["token_logprobs"].append(value)
            found["top_logprobs"].append(None if value is None else dict(others) or {token: value})
            at += len(token)
        self._offsets[index] = at
        return found

"""In the Frontend: answers of requests with extras, in OpenAI's two oldest forms.

`other_apis` writes the same items for the Responses and the Messages API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    arguments: str = ""

    @property
    def for_chat(self) -> dict[str, Any]:
        """As OpenAI's chat has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class OneChoice:
    """One choice, as far as it has come. It is text, or a call."""

    text: str = ""
    call: Call | None = None
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    tokens: int = 0


class RichFormat:
    """One response's shape; made once per request. It notes the items, and writes them as the client's API has them."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        self.head, self.request = head, request
        self.choices: dict[int, OneChoice] = {}
        self.prompt_tokens = 0
        self.usage: dict[str, Any] | None = None
        """Known once all choices are complete."""

    def note(self, batch: Sequence[Item]) -> list[Item]:
        """Returns the items that say something to a client."""
        items: list[Item] = []
        for item in batch:
            if item["usage"] is not None:
                self.usage = item["usage"]
                continue
            self.prompt_tokens = item.get("prompt_tokens", self.prompt_tokens)
            if item["num_tokens"] or item["text"] or item["finish_reason"]:
                self._add(self.choices.setdefault(item["index"], OneChoice()), item)
                items.append(item)
        return items

    def _add(self, choice: OneChoice, item: Item) -> None:
        choice.tokens += item["num_tokens"]
        choice.finish_reason = item["finish_reason"]
        choice.text += item["text"]
        if (logprobs := item.get("logprobs")) is not None:
            choice.logprobs = [*(choice.logprobs or ()), *logprobs]
        if "call" in item:
            id_, name, piece = item["call"]
            choice.call = choice.call or Call(id_, name)
            choice.call.arguments += piece

    def first(self) -> bytes:
        """Events before the first of a choice."""
        return b""

    def events(self, items: Sequence[Item]) -> bytes:
        """The events of items that `note` returned."""
        raise NotImplementedError

    def last(self) -> bytes:
        """The stream's end."""
        raise NotImplementedError

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        raise NotImplementedError


class _OpenAi(RichFormat):
    PREFIX, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"

    def events(self, items: Sequence[Item]) -> bytes:
        return b"".join(self._choice_event(choice) for item in items for choice in self._deltas(item))

    def _deltas(self, item: Item) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _of(self, index: int, choice: OneChoice) -> dict[str, Any]:
        raise NotImplementedError

    def last(self) -> bytes:
        return (self._event([], self.usage) if self.head.include_usage else b"") + DONE

    def whole(self) -> bytes:
        choices = [self._of(index, choice) for index, choice in sorted(self.choices.items())]
        members = self.head.members(self.PREFIX, self.KIND)
        return _encode({**members, "choices": choices, "usage": self.usage})

    def _event(self, choices: list[Any], usage: Any) -> bytes:
        chunk = {**self.head.members(self.PREFIX, self.CHUNK_KIND), "choices": choices}
        if self.head.include_usage:
            chunk["usage"] = usage
        return b"data: " + _encode(chunk) + b"\n\n"

    def _choice_event(self, choice: dict[str, Any]) -> bytes:
        usage = None
        if self.request.continuous_usage:
            counts = (self.prompt_tokens, self.choices[choice["index"]].tokens)
            usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
        return self._event([choice], usage)


class RichChat(_OpenAi):
    """`chat.completion` and `chat.completion.chunk`."""

    PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        super().__init__(head, request)
        self._begun: set[int] = set()

    def _deltas(self, item: Item) -> Iterable[dict[str, Any]]:
        index = item["index"]
        if index not in self._begun:
            self._begun.add(index)
            yield _delta(index, {"role": "assistant", "content": ""})
        logprobs = _chat_logprobs(item.get("logprobs"))
        if item["text"] or logprobs is not None:
            yield _delta(index, {"content": item["text"]}, logprobs)
        if "call" in item:
            id_, name, piece = item["call"]
            call = {"function": {"arguments": piece}} if id_ is None else Call(id_, name, piece).for_chat
            yield _delta(index, {"tool_calls": [{"index": 0, **call}]})
        if item["finish_reason"] is not None:
            yield _delta(index, {}, None, item["finish_reason"])

    def _of(self, index: int, choice: OneChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.call is not None:
            message |= {"content": None, "tool_calls": [choice.call.for_chat]}
        logprobs = _chat_logprobs(choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _delta(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(logprobs: list[Any] | None) -> dict[str, Any] | None:
    def one(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    if logprobs is None:
        return None
    content = [
        {**one(token, value), "top_logprobs": [one(*each) for each in others]} for token, value, others in logprobs
    ]
    return {"content": content, "refusal": None}


class RichCompletion(_OpenAi):
    """`text_completion`, streamed or not."""

    def __init__(self, head: ResponseHead, request: ParsedRequest) -> None:
        super().__init__(head, request)
        self._offsets: dict[int, int] = {}

    def _deltas(self, item: Item) -> Iterable[dict[str, Any]]:
        yield self._choice(item["index"], item["text"], item.get("logprobs"), item["finish_reason"])

    def _of(self, index: int, choice: OneChoice) -> dict[str, Any]:
        return self._choice(index, choice.text, choice.logprobs, choice.finish_reason)

    def _choice(self, index: int, text: str, numbers: list[Any] | None, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None if numbers is None else self._logprobs(index, numbers)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: list[Any]) -> dict[str, Any]:
        at, offsets = self._offsets.get(index, 0), []
        for token, _, _ in logprobs:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "text_offset": offsets,
            "tokens": [token for token, _, _ in logprobs],
            "token_logprobs": [value for _, value, _ in logprobs],
            "top_logprobs": [None if v is None else dict(others) or {t: v} for t, v, others in logprobs],
        }

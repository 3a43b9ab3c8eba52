"""Responses: one JSON object, or server-sent events put together from parts that are encoded once.

A token costs one encoding of its text and one concatenation. At 5,000 tokens/s through one process,
building and encoding a dict for each would be most of the Frontend's work (benchmarks/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from dynamo_local.components.openai.errors import ANTHROPICS, ApiError

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class ResponseFormat(Protocol):
    """One response's shape; made once per request."""

    def first(self) -> bytes:
        """Events before the first text."""
        ...

    def texts(self, texts: Iterable[str]) -> bytes:
        """One event per text."""
        ...

    def last(self, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        """The event with the finish reason, the usage where it was asked for, and `[DONE]`."""
        ...

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def error_event(error: ApiError, path: str = "") -> bytes:
    """The end of a stream that has begun, instead of `[DONE]`. Anthropic's client reads named events only."""
    name = b"event: error\n" if path.startswith(ANTHROPICS) else b""
    return name + b"data: " + error.body(path) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The members that all chunks of a response share. `created_s` is in seconds since the Unix epoch."""

    request_id: str
    model: str
    created_s: int
    include_usage: bool

    def members(self, prefix: str, kind: str) -> dict[str, Any]:
        """The first members of every object of the answer; `prefix` is the beginning of its id."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": None,
        }


def _event_head(members: dict[str, Any]) -> bytes:
    """`data: {"id": …, "system_fingerprint": null,"choices":[`"""
    return b"data: " + _encode(members)[:-1] + b',"choices":['


def _event_tail(head: ResponseHead) -> bytes:
    # With include_usage every chunk has the member, null in all but the last (OpenAI's reference, stream_options).
    return b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"


class _Format:
    """The two APIs differ in what stands around a piece of text. The parts of a stream are made for streams only."""

    PREFIX: str
    """How the answer's id begins."""
    KIND: str
    CHUNK_KIND: str
    BEFORE: bytes
    AFTER: bytes
    """Around a text in its choice."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head

    @cached_property
    def _open(self) -> bytes:
        return _event_head(self._head.members(self.PREFIX, self.CHUNK_KIND))

    @cached_property
    def _close(self) -> bytes:
        return _event_tail(self._head)

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        return self._open + self.BEFORE, self.AFTER + self._close

    def texts(self, texts: Iterable[str]) -> bytes:
        before, after = self._around
        return b"".join([before + _encode(text) + after for text in texts])

    def _usage_event(self, usage: dict[str, Any] | None) -> bytes:
        return self._open + b'],"usage":' + _encode(usage) + b"}\n\n" if self._head.include_usage else b""

    def _whole(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        return _encode({**self._head.members(self.PREFIX, self.KIND), "choices": [choice], "usage": usage})


class ChatFormat(_Format):
    """`chat.completion` and `chat.completion.chunk`."""

    PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"
    BEFORE, AFTER = b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

    def first(self) -> bytes:
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._open + delta + self._close

    def last(self, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        choice = b'{"index":0,"delta":{},"logprobs":null,"finish_reason":' + _encode(finish_reason) + b"}"
        return self._open + choice + self._close + self._usage_event(usage) + DONE

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._whole({"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}, usage)


class CompletionFormat(_Format):
    """`text_completion`, streamed or not."""

    PREFIX, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"
    BEFORE, AFTER = b'{"index":0,"text":', b',"logprobs":null,"finish_reason":null}'

    def first(self) -> bytes:
        return b""

    def last(self, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        choice = b'{"index":0,"text":"","logprobs":null,"finish_reason":' + _encode(finish_reason) + b"}"
        return self._open + choice + self._close + self._usage_event(usage) + DONE

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        return self._whole({"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}, usage)

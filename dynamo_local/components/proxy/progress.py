"""Reports a proxied answer to the metrics: tokens as the server counts them, or one per event."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.clock import Clock
from dynamo_local.components.http_metrics import RequestObserver

_DONE = b"data: [DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


class ProxyProgress:
    """The progress of one answer."""

    def __init__(self, observer: RequestObserver, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self._line_ended = False

    def on_stream(self, data: bytes) -> None:
        """A piece of a stream. Each event counts as a token, because bodies are passed on without being parsed."""
        ends = ((b"\n" if self._line_ended else b"") + data).count(b"\n\n")
        self._line_ended = data.endswith(b"\n") and not data.endswith(b"\n\n")
        if _DONE in data:
            ends -= 1
        self._observer.on_tokens(ends, self._clock.now_s())

    def on_whole(self, body: bytes) -> None:
        """A whole answer: its `usage`, where it has one."""
        usage = _usage(body)
        if usage is None:
            return
        self._observer.on_prompt(usage.prompt_tokens)
        self._observer.on_tokens(usage.completion_tokens or 0, self._clock.now_s())
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self._observer.on_cached(details.cached_tokens)


def _usage(body: bytes) -> Any:
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError):  # an answer of another shape has no usage
        return None

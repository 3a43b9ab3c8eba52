"""A client that costs little, because it shares its cores with what it measures.

The `openai` package's client takes 0.12 s of processor time for a prompt of 12,000 token ids: with twelve of these in a
second, a test measures only the client. This one sends a request that is made beforehand, and reads the bytes of the
answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tests.drivers.served import MODEL

LIMIT_S = 120.0
_TEXT = re.compile(rb'"text":"[^"]')
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_END = b"data: [DONE]\n\n"
SHOWN_BYTES = 300


class BadAnswerError(Exception):
    """No whole stream came."""


@dataclass(frozen=True, slots=True)
class Answer:
    """When its first and its last text came (`time.monotonic`), and how many tokens it is said to have."""

    first_s: float
    last_s: float
    tokens: int


def completion(prompt: Sequence[int], tokens: int) -> bytes:
    """A request for a stream of so many tokens, whole."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    return head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def ask(port: int, request: bytes) -> Answer:
    """The answer, on a connection of its own. `BadAnswerError` if it is no whole stream; `OSError`, `TimeoutError`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()
    async with asyncio.timeout(LIMIT_S):
        transport, _ = await loop.create_connection(lambda: _Stream(request, done), "127.0.0.1", port)
        try:
            return await done
        finally:
            transport.close()


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, done: asyncio.Future[Answer]) -> None:
        self._request, self._done = request, done
        self._rest = b""
        self._times_s: list[float] = []
        self._tokens: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        whole, separator, self._rest = (self._rest + data).rpartition(b"\n\n")
        whole += separator
        if _TEXT.search(whole) is not None:
            self._times_s = [*self._times_s[:1], now_s]
        if (told := _TOKENS.search(whole)) is not None:
            self._tokens = int(told[1])
        if whole.endswith(_END):
            self._end()

    def _end(self) -> None:
        if not self._times_s or self._tokens is None:
            self._fail("there was no text, or nobody said how many tokens it has")
        elif not self._done.done():
            self._done.set_result(Answer(self._times_s[0], self._times_s[-1], self._tokens))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the stream broke: {exc or self._rest[-SHOWN_BYTES:]!r}")

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(BadAnswerError(why))

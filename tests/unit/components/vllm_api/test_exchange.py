"""An ASGI application in a Processor: its answer as items, and what a worker failed with in place of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.vllm_api.host import Exchange, answer, current
from dynamo_local.errors import EngineError, WorkerBusy

REQUEST = ApiRequest("r1", "/v1/chat/completions", [("content-type", "application/json")], b'{"model": "m"}')
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def items(app: App) -> list[dict[str, Any]]:
    """All of them."""
    return [item async for item in answer(app, REQUEST, Exchange("r1"))]


async def test_an_answer_is_its_status_and_its_body():

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert (scope["path"], scope["headers"][0]) == (REQUEST.path, (b"content-type", b"application/json"))
        assert message["body"] == REQUEST.body
        await send({"type": "http.response.start", "status": 404, "headers": JSON})
        await send({"type": "http.response.body", "body": b"{}"})

    start = {"status": 404, "headers": {"content-type": "application/json"}, "stream": False}
    assert await items(app) == [start, {"body": b"{}"}]


async def test_tokens_are_told_with_the_bytes_that_they_became():

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = current.get()
        assert [exchange.next_id(), exchange.next_id()] == ["r1", "r1.2"]
        exchange.sent(7)
        exchange.sent(5)
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        exchange.came([{"token_ids": [1, 2], "num_cached_tokens": 4}])
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        exchange.came([{"token_ids": [3]}])
        await send({"type": "http.response.body", "body": b"data: b\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    start, first, second = await items(app)
    assert start["stream"]
    assert (
        first == {"body": b"data: a\n\n", "tokens": 2, "prompt_tokens": 7, "cached_tokens": 4} or first["tokens"] == 3
    )
    assert first["tokens"] + second.get("tokens", 0) == 3


@pytest.mark.parametrize("said", [b"", b'data: {"error": "internal"}\n\n'])
async def test_what_a_worker_failed_with_is_the_answer(said: bytes):
    """Not the 500, or the event in a stream of status 200, that vLLM makes of an engine's error."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        current.get().failure = WorkerBusy("full", retry_after_s=2.0)
        await send({"type": "http.response.body", "body": said, "more_body": bool(said)})

    with pytest.raises(WorkerBusy, match="full"):
        await items(app)


async def test_an_application_that_fails_is_an_error_of_the_engine():

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    with pytest.raises(EngineError, match="no answer"):
        await items(app)


async def test_a_client_that_leaves_cancels_the_application():
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with contextlib.aclosing(answer(app, REQUEST, Exchange("r1"))) as answered:
        assert "status" in await anext(answered)
        assert (await anext(answered))["body"] == b"data: a\n\n"
        assert not ended.is_set()
    assert ended.is_set()

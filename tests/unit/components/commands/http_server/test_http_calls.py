"""A worker's way to the server beside it: what comes back, what another server may do better, and being cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.components.commands.http_calls import ServerCalls
from dynamo_local.components.commands.metrics import OwnRequests
from dynamo_local.components.openai.server import bind_socket
from dynamo_local.components.proxy import messages as payloads
from dynamo_local.components.proxy.messages import Ask
from dynamo_local.errors import InvalidRequest, UpstreamError, WorkerBusy, WorkerLost
from tests.tools.openai_server import Server

PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def calling(port: int) -> AsyncIterator[ServerCalls]:
    calls = ServerCalls(f"http://127.0.0.1:{port}")
    try:
        yield calls
    finally:
        await calls.close()


def ask(**members: Any) -> dict[str, Any]:
    """What a Frontend sends."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, **members}
    return Ask(PATH, json.dumps(body).encode(), {"x-request-id": "r1"}, body["max_tokens"]).payload()


async def everything(calls: ServerCalls, payload: Any) -> list[Any]:
    return [item async for item in calls.answer(payload)]


async def test_a_whole_answer_is_a_head_and_its_parts(server: Server) -> None:
    async with calling(server.port) as calls:
        head, *parts = await everything(calls, ask())
    assert (head["status"], head["headers"]["content-type"]) == (200, "application/json")
    assert json.loads(b"".join(part["part"] for part in parts))["usage"]["completion_tokens"] == 4
    assert server.seen[0]["headers"] == {"x-request-id": "r1"}


async def test_a_stream_is_bytes_as_they_come(server: Server) -> None:
    async with calling(server.port) as calls:
        head, *pieces = await everything(calls, ask(stream=True))
    assert head["headers"]["content-type"].startswith("text/event-stream")
    assert all(isinstance(piece, bytes) for piece in pieces)
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert payloads.produced(pieces)


async def test_a_large_answer_travels_in_parts() -> None:
    body = bytes(payloads.PART_BYTES + 1)
    assert [len(part["part"]) for part in payloads.parts(body)] == [payloads.PART_BYTES, 1]


async def test_a_clients_mistake_is_an_answer(server: Server) -> None:
    async with calling(server.port) as calls:
        head, part = await everything(calls, ask(model="other"))
    assert head["status"] == 404
    assert b"no model other" in part["part"]


@pytest.mark.parametrize(("status", "error"), [(429, WorkerBusy), (503, WorkerBusy), (500, UpstreamError)])
async def test_what_another_server_may_do_better_is_an_error_with_the_answer(
    server: Server, status: int, error: type[Exception]
) -> None:
    server.refuse = status
    async with calling(server.port) as calls:
        with pytest.raises(error) as raised:
            await everything(calls, ask())
    told = payloads.answer_of(raised.value)  # type: ignore[arg-type]
    assert told is not None
    assert (told.status, json.loads(told.body)["error"]["code"]) == (status, status)
    assert raised.value.details.get("retry_after_s") == (7.0 if status != 500 else None)  # type: ignore[attr-defined]


async def test_a_server_that_is_not_there_is_lost() -> None:
    with bind_socket("127.0.0.1", 0) as unheard:
        async with calling(unheard.getsockname()[1]) as calls:
            with pytest.raises(WorkerLost, match="broke the connection off"):
                await everything(calls, ask())


async def test_a_server_that_breaks_off_is_lost() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: x\n\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(half, "127.0.0.1", 0)
    async with listener, calling(listener.sockets[0].getsockname()[1]) as calls:
        items: list[Any] = []

        async def take() -> None:
            async for item in calls.answer(ask(stream=True)):
                items.append(item)

        with pytest.raises(WorkerLost, match="send the request again"):
            await take()
    assert items[1:] == [b"data: x\n\n"]


async def test_closing_the_answer_ends_the_servers_work(server: Server) -> None:
    async with calling(server.port) as calls:
        async with contextlib.aclosing(calls.answer(ask(stream=True, max_tokens=100_000))) as items:
            async for item in items:
                if isinstance(item, bytes):
                    assert server.running == 1
                    assert calls.streams.own().streams == 1
                    break
        async with asyncio.timeout(5):
            while server.running:
                await asyncio.sleep(0.005)
        assert server.seen[-1] == {"ended": "cut"}
        assert calls.streams.own() == OwnRequests()


async def test_tokens_still_to_come_are_counted_down(server: Server) -> None:
    async with calling(server.port) as calls:
        items = calls.answer(ask(stream=True, max_tokens=50))
        async with contextlib.aclosing(items):
            left = [calls.streams.own().remaining_tokens async for _ in items]
    assert left[0] == 50
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


async def test_a_request_without_a_bound_counts_as_the_models_length(server: Server) -> None:
    payload = {**ask(stream=True), "tokens": None}
    async with calling(server.port) as calls:
        calls.streams.bound_if_unsaid = 4096
        async with contextlib.aclosing(calls.answer(payload)) as items:
            await anext(items)
            assert calls.streams.own().remaining_tokens == 4096


async def test_what_is_no_ask_is_refused() -> None:
    async with calling(1) as calls:
        with pytest.raises(InvalidRequest, match="no HTTP request"):
            await everything(calls, {"prompt": "Hi"})

"""On which socket an answer comes back to its caller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.transport.requests.frames import WIRE_VERSION, RequestHeader, decode_value, encode_value
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.listener import NAMES, ResponseListener
from dynamo_local.transport.requests.server import Exchange
from dynamo_local.transport.requests.stream import ResponseStream

NO_PORT = 1
"""Nobody listens there."""


@pytest.fixture
async def listener() -> AsyncIterator[ResponseListener]:
    made = ResponseListener()
    await made.start()
    yield made
    await made.close()


async def answered(listener: ResponseListener, *, port: int, name: str) -> list[Any]:
    """What a worker's handler answers to a request that names that port and that unix socket."""
    offer = listener.offer("the worker")

    async def echo(payload: Any, _: RequestContext) -> AsyncIterator[Any]:
        yield payload
        yield payload

    payload = encode_value("hello")
    header = RequestHeader(WIRE_VERSION, "r", None, listener.host, port, offer.token, payload, socket=name)
    exchange = Exchange("generate", header, echo, decode_value, AsyncioClock(), lambda: None)
    async with asyncio.timeout(5):
        stream = ResponseStream(1, await offer.answer)
        found = [item async for item in stream]
        await exchange.task
    return found


async def test_an_answer_takes_the_unix_socket_where_the_caller_has_one(listener: ResponseListener) -> None:
    assert await answered(listener, port=NO_PORT, name=listener.name) == ["hello", "hello"]


@pytest.mark.parametrize("name", ["", f"{NAMES}of-nobody"])
async def test_it_takes_the_port_where_there_is_none(listener: ResponseListener, name: str) -> None:
    assert await answered(listener, port=listener.port, name=name) == ["hello", "hello"]


async def test_a_message_cannot_name_a_socket_of_somebody_else(listener: ResponseListener) -> None:
    name = f"somebodys-{listener.name}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{name}")
        other.listen()
        other.setblocking(False)
        assert await answered(listener, port=listener.port, name=name) == ["hello", "hello"]
        with pytest.raises(BlockingIOError):
            other.accept()


async def test_who_shows_no_token_there_is_turned_away(listener: ResponseListener) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stranger, f"\0{listener.name}")
        await loop.sock_sendall(stranger, b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(5):
            assert await loop.sock_recv(stranger, 1) == b""
            while listener.open_connections:
                await asyncio.sleep(0.01)
    assert listener.rejected == 1

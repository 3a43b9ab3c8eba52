"""The socket: which address, what a taken port says, and an end that does not wait for idle peers."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from dynamo_local.components.openai.server import HttpServer, bind_socket, url_of
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.errors import ConfigError

Make = Callable[..., Any]
JSON = b"Content-Type: application/json\r\n"


def test_a_port_in_use_is_named_with_the_way_out():
    """A collision is told, and how to choose another port."""
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--Frontend.port="):
            bind_socket("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        bind_socket("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="no such host"):
        bind_socket("no such host", 0)


def test_a_wildcard_sockets_url_works_here():
    with bind_socket("0.0.0.0", 0) as sock:  # not listening: nothing can connect
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_an_ipv6_url_has_brackets():
    try:
        sock = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everything alike."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_request_that_has_come_but_was_not_read_is_answered_at_the_end():
    server = HttpServer(hello, bind_socket("127.0.0.1", 0), idle=True)
    await server.start()
    port = int(server.url.rpartition(":")[2])
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        await reader.readuntil(b"hello")
        writer.write(HEAD)  # the server reads nothing before it is told to stop
        await server.stop()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hello")
        writer.close()


async def test_a_new_connection_is_owed_an_answer():
    server = HttpServer(hello, bind_socket("127.0.0.1", 0))
    await server.start()
    port = int(server.url.rpartition(":")[2])
    async with asyncio.timeout(10):
        await server.wait_first_answers()
        kept, asking = await asyncio.open_connection("127.0.0.1", port)
        _, leaving = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await server.wait_first_answers()
        asking.write(HEAD)
        await kept.readuntil(b"hello")
        leaving.close()
        await server.wait_first_answers()
        asking.close()
        await server.stop()


async def test_the_port_can_be_had_again_at_once(house: Make):
    made = house()
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        await client.get("/live")
        port = int(server.url.rpartition(":")[2])
        await server.stop()
    bind_socket("127.0.0.1", port).close()


async def test_signals_stay_with_the_process(house: Make):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with house().served():
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_stopping_closes_idle_connections(house: Make):
    async with house().served() as server, asyncio.timeout(5):
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"live"}')
        await server.stop()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


async def test_stopping_is_bounded_by_cutting_what_does_not_end(house: Make, monkeypatch: pytest.MonkeyPatch):
    """A peer that never finishes its request does not hold a stop."""
    monkeypatch.setattr("dynamo_local.components.openai.server.CLOSE_TIMEOUT_S", 0.3)
    made = house()
    async with made.served() as server, asyncio.timeout(5):
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON + b"Content-Length: 10\r\n\r\n{")
        while made.deps.activity.open == 0:
            await asyncio.sleep(0.01)
        await server.stop()
        await made.deps.activity.wait_idle()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_was_never_started_gives_its_socket_back(house: Make):
    sock = bind_socket("127.0.0.1", 0)
    await HttpServer(house().app, sock).stop()
    assert sock.fileno() == -1


@pytest.mark.parametrize(
    "bad",
    [{"port": 65536}, {"port": -1}, {"max_inflight": 0}, {"request_timeout_s": 0}, {"max_body_bytes": 1}, {"prot": 1}],
)
def test_a_bad_option_is_refused(bad: dict[str, Any]):
    with pytest.raises(ValidationError):
        FrontendConfig(**bad)


def test_the_default_is_loopback_port_8000():
    assert (FrontendConfig().host, FrontendConfig().port) == ("127.0.0.1", 8000)

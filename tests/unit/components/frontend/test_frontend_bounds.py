"""Tests what a client may send, and how long it may take: the answer to each that goes beyond, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_local.components.openai import server as http_protocol
from dynamo_local.components.openai.route import BODIES_AT_ONCE
from tests.fakes.data_plane.processor import FakeEndpoint, answer

Make = Callable[..., Any]
CHAT_URL = "/v1/chat/completions"
CHAT = {"model": "sim-Model", "messages": [{"role": "user", "content": "Hi"}]}
PROTOCOL = "dynamo_local.components.openai.server"


@asynccontextmanager
async def connection(server: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain socket to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """`(status, error)` of an answer after which the connection is closed."""
    async with asyncio.timeout(10):
        raw = await reader.read()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "json"},
    ],
    ids=["none", "text", "form", "nonsense"],
)
async def test_a_body_that_is_not_said_to_be_json_is_a_415(house: Make, headers: dict[str, str]):
    made = house()
    async with made.client() as client:
        response = await client.post(CHAT_URL, content=json.dumps(CHAT), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert made.endpoint.payloads == []


@pytest.mark.parametrize("given", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
async def test_json_is_json_however_it_is_written(house: Make, given: str):
    async with house(FakeEndpoint(answer("Hi"))).client() as client:
        response = await client.post(CHAT_URL, content=json.dumps(CHAT), headers={"content-type": given})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nX-Long: " + b"x" * 100_000,
        b"GET /live HTTP/1.1\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"".join(b"X-%d: x\r\n" % n for n in range(10_000)) + b"\r\n",
        b"GET /" + b"x" * 100_000,
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["endless header", "long header", "many headers", "endless path", "long path"],
)
async def test_a_head_that_is_too_large_is_a_431(house: Make, head: bytes):
    async with house().served() as server, connection(server) as (reader, writer):
        writer.write(head)
        status, error = await refusal(reader)
        assert (status, error["code"]) == (431, "request_header_fields_too_large")


@pytest.mark.parametrize("behind", [b"0\r\nX: ", b"1;x="], ids=["trailer", "chunk extension"])
async def test_what_stands_beside_a_body_has_an_end_too(house: Make, behind: bytes):
    made = house()
    async with made.served() as server, connection(server) as (reader, writer), asyncio.timeout(10):
        head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
        writer.write(head + behind + b"x" * 2**20)
        with contextlib.suppress(ConnectionResetError):  # what it still sends is not read
            assert await reader.read() == b""
        await made.deps.activity.wait_idle()


async def test_a_large_head_that_is_allowed_is_served(house: Make):
    async with house().served() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/live", headers={"x-long": "x" * 60_000})).status_code == 200
        assert (await client.get("/live", headers={"x-long": "x" * 60_000})).status_code == 200


async def test_a_head_that_is_sent_by_halves_is_a_408(house: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{PROTOCOL}.HEAD_TIMEOUT_S", 0.2)
    async with house().served() as server:
        async with connection(server) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\nHost")
            status, error = await refusal(reader)
            assert (status, error["code"]) == (408, "request_timeout")
        async with connection(server) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"live"}')
            writer.write(b"GET /live HTTP/1.1\r\nHost")
            assert (await refusal(reader))[0] == 408


async def test_a_connection_that_says_nothing_is_closed(house: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{PROTOCOL}.SILENCE_TIMEOUT_S", 0.1)
    async with house().served() as server, connection(server) as (reader, _), asyncio.timeout(10):
        assert await reader.read() == b""


async def test_a_client_that_is_slow_to_begin_is_served(house: Make, monkeypatch: pytest.MonkeyPatch):
    """One that opens a thousand connections writes on the last of them late: a head has its time from its first byte,
    not from the connection."""
    monkeypatch.setattr(f"{PROTOCOL}.HEAD_TIMEOUT_S", 0.0)
    async with house().served() as server, connection(server) as (reader, writer), asyncio.timeout(10):
        async with connection(server) as (other, another):
            another.write(b"G")
            assert (await refusal(other))[0] == 408  # a head's time is over by now
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"live"}')


async def test_a_body_that_is_sent_by_halves_is_a_408_and_the_end_of_the_connection(
    house: Make, monkeypatch: pytest.MonkeyPatch
):
    """What is missing of it would be taken for the next request."""
    monkeypatch.setattr("dynamo_local.components.openai.http_io.BODY_TIMEOUT_S", 0.1)
    async with house().served() as server, connection(server) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
        writer.write(head + b"{")
        status, error = await refusal(reader)
        assert (status, error["code"]) == (408, "request_timeout")


async def test_a_body_that_nobody_reads_does_not_keep_its_connection(house: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{PROTOCOL}.MESSAGE_TIMEOUT_S", 0.2)
    async with house().served() as server, connection(server) as (reader, writer), asyncio.timeout(10):
        writer.write(b"GET /live HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
        assert (await reader.read()).endswith(b'{"status":"live"}')


async def test_a_body_in_tiny_chunks_is_a_body(house: Make):
    made = house(FakeEndpoint(answer("Hi")))
    body = json.dumps({**CHAT, "user": "x" * 1_000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(len(body)):
            yield body[at : at + 1]

    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(CHAT_URL, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_all_bodies_together_have_a_bound(house: Make):
    endpoint = FakeEndpoint([asyncio.Event()])
    made = house(endpoint, max_body_bytes=4096)
    body = {**CHAT, "user": "x" * 3500}
    async with made.client() as client:
        most = BODIES_AT_ONCE * 4096 // len(json.dumps(body).encode())
        waiting = [asyncio.create_task(client.post(CHAT_URL, json=body)) for _ in range(most)]
        async with asyncio.timeout(10):
            while len(endpoint.payloads) < most:
                await asyncio.sleep(0.01)
        refused = await client.post(CHAT_URL, json={**CHAT, "user": "x" * 4000})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        after = asyncio.create_task(client.post(CHAT_URL, json=body))
        async with asyncio.timeout(10):
            while len(endpoint.payloads) < most + 1:
                await asyncio.sleep(0.01)
        for task in (*waiting, after):
            task.cancel()
        await asyncio.gather(*waiting, after, return_exceptions=True)


async def test_a_client_writes_no_line_of_the_log(house: Make, caplog: pytest.LogCaptureFixture):
    forged = "x\n2026-11-22 00:00:00,000 INFO dynamo_local: all is well\x1b[2J"
    with caplog.at_level("INFO"):
        async with house().client() as client:
            assert (await client.post(CHAT_URL, json={**CHAT, "model": forged})).status_code == 404
    (line,) = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert line.isprintable()


async def test_requests_without_end_on_one_connection_are_not_kept(house: Make):
    """Each would wait for the answer to the one before, which never comes: this client does not read."""
    made = house(FakeEndpoint(None))
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    body = json.dumps(CHAT).encode()
    async with made.served() as server, connection(server) as (reader, writer), asyncio.timeout(10):
        writer.write(request % (len(body), body) * (2 + http_protocol.MAX_PIPELINED))
        assert await reader.read() == b""
        await made.deps.activity.wait_idle()
    assert len(made.endpoint.payloads) <= 1


async def test_a_body_in_tiny_chunks_is_parsed_in_many_passes_of_the_loop(house: Make, monkeypatch: pytest.MonkeyPatch):
    """In three parts, as they come from the kernel, it would hold up the streams of others."""
    monkeypatch.setattr(f"{PROTOCOL}.PARSE_PASS_S", 1e-9)
    passes, chunks = 0, 100_000

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    async with house().served() as server, connection(server) as (reader, writer), asyncio.timeout(20):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n"
        )
        counting = asyncio.create_task(count())
        writer.write(b"\r\n" + b"1\r\n \r\n" * chunks + b"0\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
        counting.cancel()
    assert passes >= 6 * chunks // http_protocol.SLICE_BYTES


def test_those_that_have_something_to_be_parsed_take_turns() -> None:
    now_s, taken = 0.0, []

    def turns_of(name: str, count: int) -> Callable[[], bool]:
        left = [*range(count)]

        def turn() -> bool:
            nonlocal now_s
            now_s += 0.4 * http_protocol.PARSE_PASS_S
            taken.append(name)
            left.pop()
            return not left

        return turn

    async def parse() -> None:
        parsing = http_protocol.Parsing(lambda: now_s)
        assert not parsing.add(turns_of("a", 4))
        assert not parsing.add(turns_of("b", 2))
        assert not parsing.add(turns_of("c", 1))
        for done in ("aaa", "aaaabc", "aaaabcb"):
            assert "".join(taken) == done
            await asyncio.sleep(0)
        assert parsing.add(turns_of("d", 1))

    asyncio.run(parse())


@pytest.mark.parametrize("bound", ["UNWANTED_TIMEOUT_S", "UNWANTED_MAX_BYTES"])
async def test_a_client_that_sends_on_after_a_413_is_cut_off(house: Make, monkeypatch: pytest.MonkeyPatch, bound: str):
    monkeypatch.setattr(f"{PROTOCOL}.{bound}", 0.2 if bound == "UNWANTED_TIMEOUT_S" else 200_000)
    async with house(max_body_bytes=4096).served() as server, connection(server) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % 2**40)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")  # Python 3.13 has another phrase
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionError):
                await _send_on(writer)


async def _send_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" " * 10_000)
        await writer.drain()
        await asyncio.sleep(0.001)

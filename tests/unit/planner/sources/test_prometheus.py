"""Asking a Prometheus server, which here answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner import prometheus
from dynamo_local.planner.prometheus import PrometheusOptions, PrometheusTraffic
from dynamo_local.planner.values import Traffic
from tests.fakes.arbiter.hand_clock import HandClock

Answer = tuple[int, bytes] | None
"""Status and body; None: none at all."""


def vector(value: str) -> Answer:
    result = [{"metric": {"model": "m"}, "value": [1000.0, value]}]
    return 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


@dataclass
class FakePrometheus:
    """Answers each query by `answer`; `asked` has queries and headers as they came."""

    answer: Callable[[str], Answer] = lambda _query: vector("6")
    asked: list[tuple[dict[str, list[str]], dict[str, str]]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                request, *lines = head.strip().split("\r\n")
                params = parse_qs(urlsplit(request.split()[1]).query)
                self.asked.append((params, {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}))
                answer = self.answer(params["query"][0])
                if answer is None:
                    await asyncio.Event().wait()
                    return
                status, body = answer
                writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.fixture
async def server() -> AsyncIterator[FakePrometheus]:
    fake, tasks = FakePrometheus(), set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await fake.serve(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield fake
    listening.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await listening.wait_closed()


async def traffic(server: FakePrometheus, **options: object) -> Traffic | Missing:
    source = PrometheusTraffic(PrometheusOptions(server.url, **options), HandClock())  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(30.0):
            return await source.traffic(60.0)
    finally:
        await source.close()


async def missing(server: FakePrometheus, **options: object) -> str:
    """Why nothing is known."""
    answer = await traffic(server, **options)
    assert isinstance(answer, Missing), answer
    return answer.reason


async def test_the_answers_become_a_window(server: FakePrometheus) -> None:
    answer = await traffic(server, extra_query_params={"tenant": "a b"})
    assert isinstance(answer, Traffic)
    assert (answer.num_req, answer.isl, answer.duration_s) == (6.0, 1.0, 60.0)
    assert {params["tenant"][0] for params, _ in server.asked} == {"a b"}
    assert not any("authorization" in headers for _, headers in server.asked)


async def test_the_token_is_read_for_each_window(server: FakePrometheus, tmp_path: Path) -> None:
    token = tmp_path / "token"
    source = PrometheusTraffic(PrometheusOptions(server.url, token_file=token), HandClock())
    shown = []
    for text in ("first\n", "second\n"):
        token.write_text(text)
        server.asked.clear()
        await source.traffic(60.0)
        shown.append({headers["authorization"] for _, headers in server.asked})
    await source.close()
    assert shown == [{"Bearer first"}, {"Bearer second"}]


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"", "no token"), (b"a b", "no token"), (b"s\xc3\xa9cret", "ASCII")]
)
async def test_a_token_that_cannot_be_read_is_named_and_not_shown(
    server: FakePrometheus, tmp_path: Path, content: bytes | None, why: str
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    reason = await missing(server, token_file=token)
    assert why in reason
    assert str(token) in reason
    assert "cret" not in reason
    assert server.asked == []


async def test_a_server_that_is_overloaded_is_asked_again(
    server: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "RETRY_S", 0.01)
    refused = set[str]()

    def once(query: str) -> Answer:
        if query in refused:
            return vector("6")
        refused.add(query)
        return 503, b"busy"

    server.answer = once
    assert isinstance(await traffic(server), Traffic)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, b"<html>"), "no answer to a query"),
        ((200, b'{"status": "success"}'), "status 200"),
        ((200, b'{"status": "success", "data": {"result": [{"metric": {}, "value": [1, "x"]}]}}'), "no answer"),
        ((200, b"[" * 100_000), "no answer to a query"),
        ((401, b"who are you"), "status 401"),
        ((302, b""), "status 302"),
        ((422, b'{"status": "error", "error": "query is too long"}'), "query is too long"),
        ((200, b" " * (prometheus.ANSWER_BYTES_MAX + 1)), "too long"),
    ],
    ids=["html", "no data", "no number", "nested", "401", "redirect", "error", "flood"],
)
async def test_whatever_else_it_answers_is_missing(server: FakePrometheus, answer: Answer, why: str) -> None:
    server.answer = lambda _query: answer
    assert why in await missing(server)


async def test_a_server_that_does_not_answer_costs_the_time_out(server: FakePrometheus) -> None:
    server.answer = lambda _query: None
    assert "within 0.2 s" in await missing(server, request_timeout_s=0.2)


async def test_where_nobody_listens_that_is_said(server: FakePrometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "RETRY_S", 0.01)
    server.url = "http://127.0.0.1:1"
    assert "http://127.0.0.1:1 cannot be asked" in await missing(server)


async def test_a_ca_bundle_that_is_none_is_named(server: FakePrometheus, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("no certificate")
    assert str(bundle) in await missing(server, ca_bundle=bundle)

"""Tests what Prometheus is asked, and what its answers mean."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner import prometheus
from dynamo_local.planner.prometheus import PrometheusOptions, PrometheusTraffic, Series, queries, traffic_of
from dynamo_local.planner.values import Traffic
from tests.fakes.arbiter.hand_clock import HandClock

OURS = {"model": "Llama", "dynamo_namespace": "dynamo-blue"}


def one(value: float, **labels: str) -> tuple[Series, ...]:
    return (Series({**OURS, **labels}, value),)


FULL = {
    "started": one(30.0),
    "started_at": one(990.0),
    "ttft_s_sum": one(6.0),
    "ttft_s_count": one(24.0),
    "isl_sum": one(60_000.0),
    "isl_count": one(30.0),
    "hit_rate_sum": one(12.0),
    "hit_rate_count": one(24.0),
    "accepted": one(50.0),
    "drafts": one(100.0),
}


def told(answers: dict[str, tuple[Series, ...]], model: str | None = "llama") -> Traffic | Missing:
    return traffic_of(answers, model=model, namespace="dynamo-blue", window_s=60.0, server_s=1000.0, now_s=50.0)


def known(answers: dict[str, tuple[Series, ...]], model: str | None = "llama") -> Traffic:
    traffic = told(answers, model)
    assert isinstance(traffic, Traffic), traffic
    return traffic


def test_the_queries_are_dynamos() -> None:
    asked = queries("frontend", 180.0)
    assert asked["started"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_frontend_requests_started_total[180000ms]))"
    )
    assert asked["ttft_s_sum"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_frontend_time_to_first_token_seconds_sum[180000ms]))"
    )
    assert queries("router", 2.5)["ended"] == (
        "sum by (model,dynamo_namespace)(increase(dynamo_component_router_requests_total[2500ms]))"
    )


def test_a_window_with_everything() -> None:
    traffic = known(FULL)
    assert (traffic.at_s, traffic.duration_s, traffic.num_req) == (40.0, 60.0, 30.0)
    assert (traffic.ttft_ms, traffic.isl) == (250.0, 2000.0)
    assert (traffic.kv_hit_rate, traffic.accept_length) == (0.5, 1.5)
    assert isinstance(traffic.osl, Missing)


def test_what_nobody_counts_is_unknown_and_what_is_counted_as_0_is_silence() -> None:
    missing = told({})
    assert isinstance(missing, Missing)
    assert "no two scrapes" in missing.reason
    quiet = known({**FULL, "started": one(0.0), "ttft_s_sum": one(0.0), "ttft_s_count": one(0.0)})
    assert quiet.num_req == 0.0
    assert isinstance(quiet.ttft_ms, Missing)


def test_where_requests_are_counted_at_their_end_that_is_taken() -> None:
    answers = {"ended": one(9.0), "ended_at": one(1000.0)}
    assert known(answers).num_req == 9.0


def test_what_is_not_scraped_any_more_is_unknown() -> None:
    assert isinstance(told({**FULL, "started_at": ()}), Missing)


@pytest.mark.parametrize("stranger", [{"model": "other"}, {"dynamo_namespace": "elsewhere"}], ids=str)
def test_another_model_or_namespace_does_not_count(stranger: dict[str, str]) -> None:
    both = {**FULL, "started": (*one(30.0), *one(1000.0, **stranger))}
    assert known(both).num_req == 30.0
    assert isinstance(told({name: one(5.0, **stranger) for name in FULL}), Missing)


def test_names_differ_by_case_and_by_dashes_and_may_be_absent() -> None:
    series = (Series({"model": "LLAMA", "dynamo_namespace": "dynamo_blue"}, 1.0), Series({}, 2.0))
    assert known({**FULL, "started": series}).num_req == 3.0
    assert known({**FULL, "started": one(4.0, model="other")}, model=None).num_req == 4.0


def test_a_number_that_is_none_is_not_there() -> None:
    assert isinstance(told({**FULL, "started": one(math.nan)}), Missing)
    assert isinstance(known({**FULL, "ttft_s_sum": one(math.inf)}).ttft_ms, Missing)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"drafts": (), "sglang:spec_accept_length": one(3.5)}, 3.5),
        ({"drafts": one(0.0), "trtllm_spec_decode_acceptance_length": one(2.0)}, 2.0),
    ],
    ids=["sglang", "trtllm"],
)
def test_other_engines_tell_the_accept_length_itself(answers: dict[str, tuple[Series, ...]], expected: float) -> None:
    assert known({**FULL, **answers}).accept_length == expected


# --- prometheus
# Asking a Prometheus server, which here answers from a script.

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

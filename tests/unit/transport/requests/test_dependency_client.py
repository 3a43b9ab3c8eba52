"""Tests what a `depends(Other)` attribute offers, over the fake endpoint client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.transport.requests.client import DependencyClient
from dynamo_local.transport.requests.handlers import RequestContext, enter_request, leave_request
from tests.fakes.data_plane.endpoints import FakeEndpointClient

KV: Any = None


class FakePlane:
    """Gives fake clients by endpoint name."""

    def __init__(self, **clients: FakeEndpointClient) -> None:
        self.clients = clients
        self.asked: list[tuple[str, str, str]] = []

    async def client(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> EndpointClient:
        self.asked.append((namespace, component, endpoint))
        return self.clients[endpoint.replace("/", "_")]


async def count(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    for n in range(payload):
        yield n


async def double(payload: Any, context: RequestContext) -> int:
    return int(payload) * 2


def make(plane: FakePlane) -> DependencyClient:
    return DependencyClient(
        plane, KV, "ns", "Worker", {"generate": "generate", "score": "score", "chat": "chat/completions"}
    )


async def test_a_streaming_endpoint_is_iterated() -> None:
    plane = FakePlane(generate=FakeEndpointClient(count))
    assert [n async for n in make(plane).generate(3)] == [0, 1, 2]
    assert plane.asked == [("ns", "Worker", "generate")]


async def test_a_unary_endpoint_is_awaited() -> None:
    assert await make(FakePlane(score=FakeEndpointClient(double))).score(21) == 42


async def test_awaiting_a_stream_is_an_error() -> None:
    with pytest.raises(errors.RequestError, match="iterate"):
        await make(FakePlane(generate=FakeEndpointClient(count))).generate(3)


async def test_method_names_map_to_endpoint_names() -> None:
    plane = FakePlane(chat_completions=FakeEndpointClient(double))
    dependency = make(plane)
    assert await dependency.chat(1) == 2
    stream = await dependency.endpoint("chat/completions").call(2)
    assert [item async for item in stream] == [4]
    assert plane.asked == [("ns", "Worker", "chat/completions")]


async def test_direct_goes_to_that_instance() -> None:
    """Dynamo's `direct(request, instance_id)`."""
    fake = FakeEndpointClient({7: count, 8: count})
    dependency = make(FakePlane(generate=fake))
    assert [n async for n in dependency.direct(1, 8)] == [0]
    assert [n async for n in dependency.round_robin(1)] == [0]
    assert fake.calls[0].instance_id == 8


async def test_random_reaches_every_instance() -> None:
    fake = FakeEndpointClient({7: count, 8: count})
    dependency = make(FakePlane(generate=fake))
    for _ in range(64):
        assert [n async for n in dependency.random(1)] == [0]
    assert {call.instance_id for call in fake.calls} == {7, 8}


async def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"generat.*Its methods: chat, generate, score"):
        make(FakePlane()).generat(1)


async def test_wait_ready_waits_for_every_endpoint() -> None:
    late = FakeEndpointClient()
    plane = FakePlane(generate=FakeEndpointClient(count), score=late, chat_completions=FakeEndpointClient(double))
    dependency = make(plane)
    with pytest.raises(errors.NoWorkers):
        await dependency.wait_ready(0.02)
    late.add_instance(1, double)
    await dependency.wait_ready(1.0)


async def test_request_id_and_deadline_go_along() -> None:
    fake = FakeEndpointClient(count)
    dependency = make(FakePlane(generate=fake))
    now_s = asyncio.get_running_loop().time()
    token = enter_request(RequestContext("outer", now_s + 10.0))
    try:
        assert [n async for n in dependency.generate(1)] == [0]
        assert [n async for n in dependency.generate(1, request_id="own", timeout_s=2.0)] == [0]
    finally:
        leave_request(token)
    inherited, own = fake.calls
    assert inherited.request_id == "outer"
    assert inherited.timeout_s == pytest.approx(10.0, abs=0.5)
    assert (own.request_id, own.timeout_s) == ("own", 2.0)


async def test_breaking_out_of_a_call_closes_the_handler() -> None:
    ended = asyncio.Event()

    async def guarded(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.set()

    async for _ in make(FakePlane(generate=FakeEndpointClient(guarded))).generate(None):
        break
    await asyncio.wait_for(ended.wait(), 1.0)

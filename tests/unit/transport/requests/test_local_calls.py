"""Calls within one process, beyond what every `EndpointClient` does (`tests/contract/test_endpoint_client.py`)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import msgspec
import pytest

from dynamo_local import errors
from dynamo_local.core.types import Instance
from dynamo_local.transport.requests.handlers import RequestContext, current_request
from dynamo_local.transport.requests.local import ColocatedPlane, LocalClient, LocalEndpoint
from tests.drivers.eventually import eventually

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


class Ask(msgspec.Struct):
    """A request of a declared model."""

    words: list[str]


def client_of(handler: Any, model: type | None = None, **options: Any) -> LocalClient:
    instance = Instance("tests", "Guest", "generate", 7, subject="")
    return LocalClient(LocalEndpoint("generate", handler, model, **options), lambda: instance)


async def forever(request: Any, context: RequestContext) -> AsyncIterator[Any]:
    """One item, and then nothing."""
    yield "first"
    await asyncio.Event().wait()


async def test_a_request_is_made_into_the_endpoints_model_and_a_wrong_one_is_refused_before_the_handler_runs() -> None:

    async def echo(request: Ask, context: RequestContext) -> AsyncIterator[Any]:
        yield request

    client = client_of(echo, Ask)
    assert [item async for item in await client.call({"words": ["a"], "unknown": 1})] == [Ask(["a"])]
    with pytest.raises(errors.InvalidRequest) as raised:
        await client.call({"words": "a"})
    assert raised.value.details["param"] == "words"


async def test_a_handler_sees_its_own_request_and_its_components_context_and_the_caller_never_does() -> None:

    async def tell(request: Any, context: RequestContext) -> AsyncIterator[Any]:
        for _ in range(2):
            await asyncio.sleep(0)
            assert current_request() is context
            yield WHOSE.get()

    stream = await client_of(tell, bindings=((WHOSE, "the guest's"),)).call(None)
    async for item in stream:
        assert (item, WHOSE.get(), current_request()) == ("the guest's", "nobody's", None)


async def test_a_deadline_that_passes_while_nobody_reads_is_told_to_the_next_read() -> None:
    ended = asyncio.Event()

    async def guarded(request: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield "first"
            yield "second"
        finally:
            ended.set()

    stream = await client_of(guarded).call(None, timeout_s=0.02)
    assert await anext(stream) == "first"
    await asyncio.sleep(0.05)
    with pytest.raises(errors.DeadlineExceeded):
        await anext(stream)
    assert ended.is_set()


async def test_the_readers_own_deadline_stays_its_own() -> None:
    stream = await client_of(forever).call(None, timeout_s=30.0)
    assert await anext(stream) == "first"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.02)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await stream.aclose()


async def test_a_handler_that_awaits_something_cancelled_is_told_as_such() -> None:

    async def unlucky(request: Any, context: RequestContext) -> AsyncIterator[Any]:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        yield await task

    with pytest.raises(errors.RequestCancelled):
        [item async for item in await client_of(unlucky).call(None)]


async def test_a_stream_that_is_dropped_half_read_is_closed() -> None:
    ended = asyncio.Event()

    async def guarded(request: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    stream = await client_of(guarded).call(None, timeout_s=60.0)
    assert await anext(stream) == "first"
    del stream
    gc.collect()
    await eventually(ended.is_set, 0.5)


async def test_only_guests_are_called_here() -> None:
    asked: list[tuple[str, str]] = []

    class Plane:
        async def client(self, kv: Any, namespace: str, component: str, endpoint: str) -> Any:
            asked.append((component, endpoint))

    plane = ColocatedPlane(Plane(), lambda component, name: Instance("tests", component, name, 7, subject=""))
    plane.add("Guest", {"generate": LocalEndpoint("generate", forever, None)})
    kv: Any = None

    here = await plane.client(kv, "tests", "Guest", "generate")
    await plane.client(kv, "tests", "Worker", "generate")
    assert [instance.instance_id for instance in here.instances()] == [7]
    assert await here.wait_for_others([7], 60.0) == ()
    assert asked == [("Worker", "generate")]
    with pytest.raises(errors.NoWorkers, match="no endpoint 'other'"):
        await plane.client(kv, "tests", "Guest", "other")

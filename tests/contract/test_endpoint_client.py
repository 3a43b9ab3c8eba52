"""Tests what every `EndpointClient` does, the fake of the component tests and the one over NATS alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.transport.requests.handlers import RequestContext, current_request
from dynamo_local.transport.requests.stream import pump
from tests.contract.endpoint_worlds import AnyWorld, FakeWorld, LocalWorld, NatsWorld, World, read_into
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import count, forever, forever_until, request_bench


@pytest.fixture(params=["fake", pytest.param("nats", marks=pytest.mark.infra)])
def nats(request: pytest.FixtureRequest) -> RealNats | None:
    """The server of the real client; None for the fake one."""
    return None if request.param == "fake" else request.getfixturevalue("nats_server")


@pytest.fixture
async def world(nats: RealNats | None, namespace: str) -> AsyncIterator[World]:
    if nats is None:
        fake = FakeWorld()
        yield fake
        await fake.close()
    else:
        async with request_bench(nats, namespace) as bench:
            yield NatsWorld(bench)


@pytest.fixture(params=["fake", "local", pytest.param("nats", marks=pytest.mark.infra)])
async def any_world(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[AnyWorld]:
    """Those, and a client of its own process: what does not need a second instance, or bytes in between."""
    if request.param == "nats":
        async with request_bench(request.getfixturevalue("nats_server"), namespace) as bench:
            yield NatsWorld(bench)
        return
    made: AnyWorld = FakeWorld() if request.param == "fake" else LocalWorld()
    yield made
    await made.close()


async def test_items_come_in_order_and_all_of_them(any_world: AnyWorld) -> None:
    await any_world.serve(count)
    stream = await any_world.client.call(10_000)
    assert [item async for item in stream] == list(range(10_000))


async def test_batches_hold_the_same_items(any_world: AnyWorld) -> None:
    await any_world.serve(count)
    batches: list[list[int]] = []
    await pump(await any_world.client.call(5000), batches.append)
    assert [item for batch in batches for item in batch] == list(range(5000))
    assert all(batches)


async def test_an_empty_stream_ends(any_world: AnyWorld) -> None:
    await any_world.serve(count)
    assert [item async for item in await any_world.client.call(0)] == []


async def test_values_take_the_way_through_msgpack(world: World) -> None:
    payload = {"text": "grüße", "ids": (1, 2), "none": None, "raw": b"\x00", "x": 1.5}

    async def echo(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield payload

    await world.serve(echo)
    stream = await world.client.call(payload)
    assert [item async for item in stream] == [{**payload, "ids": [1, 2]}]


async def test_a_coroutine_handler_gives_one_value(any_world: AnyWorld) -> None:

    async def double(payload: Any, context: RequestContext) -> int:
        return int(payload) * 2

    await any_world.serve(double)
    stream = await any_world.client.call(21)
    assert await stream.single() == 42  # type: ignore[attr-defined]


async def test_single_refuses_a_stream(any_world: AnyWorld) -> None:
    await any_world.serve(count)
    stream = await any_world.client.call(2)
    with pytest.raises(errors.RequestError, match="single value"):
        await stream.single()  # type: ignore[attr-defined]


async def test_round_robin_takes_turns(world: World) -> None:
    await world.serve(count, 1)
    await world.serve(count, 2)
    taken = []
    for _ in range(4):
        stream = await world.client.call(1)
        taken.append(stream.instance_id)
        assert [item async for item in stream] == [0]
    assert sorted(taken) == [1, 1, 2, 2]
    assert taken[:2] == taken[2:]


async def test_an_explicit_instance_is_called(world: World) -> None:
    await world.serve(count, 1)
    await world.serve(count, 2)
    for _ in range(3):
        stream = await world.client.call(1, instance_id=2)
        assert stream.instance_id == 2
        await stream.aclose()


async def test_an_unknown_instance_is_an_error(any_world: AnyWorld) -> None:
    await any_world.serve(count, 1)
    with pytest.raises(errors.WorkerLost):
        await any_world.client.call(1, instance_id=99)


async def test_without_instances_there_are_no_workers(world: World) -> None:
    with pytest.raises(errors.NoWorkers):
        await world.client.call(1)
    with pytest.raises(errors.NoWorkers):
        await world.client.wait_for_instances(0.05)


async def test_waiting_for_instances_ends_with_the_first(world: World) -> None:
    waiting = asyncio.create_task(world.client.wait_for_instances(5.0))
    await asyncio.sleep(0)
    await world.serve(count, 3)
    assert [i.instance_id for i in await waiting] == [3]
    assert [i.instance_id for i in world.client.instances()] == [3]


async def test_a_draining_instance_is_passed_over(world: World) -> None:
    await world.serve(count, 1)
    await world.serve(count, 2)
    await world.stop_accepting(1)
    for _ in range(4):
        stream = await world.client.call(1)
        assert stream.instance_id == 2
        await stream.aclose()
    with pytest.raises(errors.WorkerDraining):
        await world.client.call(1, instance_id=1)


async def test_a_call_that_all_refuse_as_leaving_waits_for_the_next_instance(world: World) -> None:
    await world.serve(count, 1)
    await world.stop_accepting(1)
    waiting = asyncio.create_task(world.client.call(1))
    assert await world.client.wait_for_others((1,), 0.05) == ()
    await world.serve(count, 2)
    stream = await waiting
    assert stream.instance_id == 2
    await stream.aclose()
    assert [i.instance_id for i in await world.client.wait_for_others((1,), 5.0)] == [2]


@pytest.mark.parametrize("error", [errors.InvalidRequest("too long", param="prompt"), errors.KvTransferError("lost")])
async def test_errors_keep_their_type_and_details(any_world: AnyWorld, error: errors.DynamoError) -> None:

    async def fails(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield 1
        yield 2
        raise error

    await any_world.serve(fails)
    stream = await any_world.client.call(None)
    found: list[Any] = []
    with pytest.raises(type(error), match=error.message) as raised:
        await read_into(found, stream)
    assert found == [1, 2]
    assert raised.value.details == error.details


async def test_a_foreign_error_is_remote_and_named(any_world: AnyWorld) -> None:

    async def fails(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield {}["missing"]

    await any_world.serve(fails)
    with pytest.raises(errors.RemoteError) as raised:
        [item async for item in await any_world.client.call(None)]
    assert raised.value.details["type"] == "KeyError"


async def test_an_item_that_cannot_travel_is_an_error(world: World) -> None:

    async def fails(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield 1
        yield object()

    await world.serve(fails)
    found: list[Any] = []
    stream = await world.client.call(None)
    with pytest.raises(errors.RemoteError, match="object"):
        await read_into(found, stream)
    assert found == [1]


async def test_closing_the_stream_cancels_the_handler(any_world: AnyWorld) -> None:
    ended = asyncio.Event()
    await any_world.serve(forever_until(ended))
    stream = await any_world.client.call(None)
    assert await anext(aiter(stream)) == "first"
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 0.5)
    await stream.aclose()


async def test_a_closed_stream_cancels_a_handler_that_waits_for_room(any_world: AnyWorld) -> None:
    ended = asyncio.Event()

    async def endless(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            while True:
                yield "x" * 1000
        finally:
            ended.set()

    await any_world.serve(endless)
    stream = await any_world.client.call(None)
    await anext(aiter(stream))
    await asyncio.sleep(0.05)
    assert not ended.is_set()
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 0.5)


async def test_a_slow_reader_holds_the_handler_back(any_world: AnyWorld) -> None:
    produced = 0

    async def bulky(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        nonlocal produced
        for n in range(2000):
            produced += 1
            yield [n, "x" * 10_000]

    await any_world.serve(bulky)
    items = aiter(await any_world.client.call(None))
    first = await anext(items)
    await asyncio.sleep(0.1)
    assert produced < 200
    rest = [item async for item in items]
    assert [item[0] for item in [first, *rest]] == list(range(2000))


async def test_the_deadline_ends_the_stream_and_the_handler(any_world: AnyWorld) -> None:
    ended = asyncio.Event()
    await any_world.serve(forever_until(ended))
    found: list[Any] = []
    stream = await any_world.client.call(None, timeout_s=0.2)
    with pytest.raises(errors.DeadlineExceeded):
        await read_into(found, stream)
    assert found == ["first"]
    await asyncio.wait_for(ended.wait(), 0.5)


async def test_a_deadline_in_the_past_is_refused(any_world: AnyWorld) -> None:
    await any_world.serve(count)
    with pytest.raises(errors.DeadlineExceeded):
        await any_world.client.call(1, timeout_s=0)


async def test_the_handler_knows_its_request(any_world: AnyWorld) -> None:

    async def tell(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        assert current_request() is context
        yield [context.request_id, context.remaining_s()]

    await any_world.serve(tell)
    stream = await any_world.client.call(None, request_id="r-7", timeout_s=30.0)
    [[request_id, remaining_s]] = [item async for item in stream]
    assert request_id == "r-7"
    assert 29.0 < remaining_s <= 30.0
    [[generated, no_deadline]] = [item async for item in await any_world.client.call(None)]
    assert generated
    assert no_deadline is None
    assert current_request() is None


async def test_a_lost_worker_ends_its_streams(world: World) -> None:
    await world.serve(forever, 5)
    stream = await world.client.call(None, instance_id=5)
    items = aiter(stream)
    assert await anext(items) == "first"
    await world.lose(5)
    with pytest.raises(errors.WorkerLost) as raised:
        await anext(items)
    assert raised.value.retryable
    with pytest.raises(errors.NoWorkers):
        await world.client.call(None)


async def test_a_handler_may_pass_a_stream_on(world: World) -> None:

    async def relay(payload: Any, context: RequestContext) -> Any:
        return await world.client.call(3, instance_id=1)

    await world.serve(count, 1)
    await world.serve(relay, 2)
    assert [item async for item in await world.client.call(None, instance_id=2)] == [0, 1, 2]


async def test_many_streams_at_once_stay_apart(world: World) -> None:
    """Lesson of the issue: 200 concurrent streams all complete and are all right."""

    async def tagged(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        for n in range(50):
            yield [payload, n]
            if n % 10 == 0:
                await asyncio.sleep(0)

    await world.serve(tagged, 1)
    await world.serve(tagged, 2)

    async def one(tag: int) -> bool:
        return [item async for item in await world.client.call(tag)] == [[tag, n] for n in range(50)]

    assert await asyncio.gather(*(one(tag) for tag in range(200))) == [True] * 200


async def test_a_cancelled_reader_can_close(any_world: AnyWorld) -> None:
    ended = asyncio.Event()
    await any_world.serve(forever_until(ended))
    started = asyncio.Event()

    async def read() -> None:
        stream = await any_world.client.call(None)
        try:
            async for _ in stream:
                started.set()
        finally:
            await stream.aclose()

    reader = asyncio.create_task(read())
    await started.wait()
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    await eventually(ended.is_set, 0.5)

"""Streams whose items are handed on where they arrive, without a task in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextvars import ContextVar
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.transport.requests.frames import FrameKind, frame
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.stream import READ_AHEAD_BYTES, Enough, ResponseStream, pump
from tests.unit.transport.requests.test_local_calls import client_of
from tests.unit.transport.requests.test_request_streams import data, make_inbound

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


async def test_items_are_handed_on_in_the_callback_in_which_they_arrive() -> None:
    """No turn of the event loop lies between the socket and the taker, and the taker sees its caller's context."""
    inbound, _ = make_inbound()
    inbound.data_received(data(0, 1))
    taken: list[tuple[list[Any], str]] = []
    WHOSE.set("the reader's")
    pumping = asyncio.create_task(pump(ResponseStream(1, inbound), lambda batch: taken.append((batch, WHOSE.get()))))
    await asyncio.sleep(0)
    assert taken == [([1], "the reader's")]
    inbound.data_received(data(1, 2) + data(2, 3))
    WHOSE.set("somebody else's")  # whatever runs the socket's callbacks has another context
    inbound.data_received(data(3, 4))
    assert taken[1:] == [([2], "the reader's"), ([3], "the reader's"), ([4], "the reader's")]
    inbound.data_received(frame(FrameKind.END, 4))
    await pumping


async def test_a_taker_that_must_catch_up_is_given_nothing_meanwhile() -> None:
    """What comes waits, bounded by the socket, and is given at once afterwards."""
    inbound, transport = make_inbound()
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taken: list[Any] = []

    def take(batch: list[Any]) -> Awaitable[None] | None:
        taken.extend(batch)
        return room if len(taken) == 1 else None

    pumping = asyncio.create_task(pump(ResponseStream(1, inbound), take))
    await asyncio.sleep(0)
    inbound.data_received(data(0, 1))
    inbound.data_received(data(1, "x" * READ_AHEAD_BYTES) + data(2, 3))
    assert taken == [1]
    assert not transport.reading
    room.set_result(None)
    await asyncio.sleep(0)
    assert taken == [1, "x" * READ_AHEAD_BYTES, 3]
    assert transport.reading
    inbound.data_received(frame(FrameKind.END, 3))
    await asyncio.wait_for(pumping, 5.0)


async def test_what_a_stream_ends_with_comes_after_its_items() -> None:
    inbound, _ = make_inbound()
    taken: list[Any] = []
    pumping = asyncio.create_task(pump(ResponseStream(1, inbound), taken.extend))
    await asyncio.sleep(0)
    inbound.data_received(data(0, "a") + data(5, "b"))
    with pytest.raises(errors.StreamGap):
        await pumping
    assert taken == ["a"]


async def test_a_taker_that_raises_ends_the_pumping_with_just_that() -> None:
    for error in (Enough(), ZeroDivisionError("its own"), errors.EngineError("its own")):
        inbound, _ = make_inbound()
        inbound.data_received(data(0, "a"))
        calls = 0

        def take(batch: list[Any], error: Exception = error) -> None:
            nonlocal calls
            calls += 1
            raise error

        for stream in (ResponseStream(1, inbound), await client_of(count).call(3)):
            with pytest.raises(type(error)) as raised:
                await pump(stream, take)
            assert raised.value is error
            await stream.aclose()
        inbound.data_received(data(1, "b"))
        assert calls == 2


async def count(request: Any, context: RequestContext) -> AsyncIterator[Any]:
    for n in range(request):
        yield n


class Known:
    """A stream of its own that can be pumped."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield "read"

    async def pump(self, take: Any) -> None:
        try:
            take(["pumped", WHOSE.get()])
            await asyncio.Event().wait()
        finally:
            self._ended.set()


async def test_a_handlers_own_stream_is_pumped_and_its_deadline_stops_it_where_it_waits() -> None:
    ended = asyncio.Event()

    async def answer(request: Any, context: RequestContext) -> Known:
        return Known(ended)

    taken: list[Any] = []
    client = client_of(answer, bindings=((WHOSE, "the component's"),))
    with pytest.raises(errors.DeadlineExceeded):
        await pump(await client.call(None, timeout_s=0.05), taken.extend)
    assert taken == ["pumped", "the component's"]
    assert ended.is_set()
    assert WHOSE.get() == "nobody's"
    assert [item async for item in await client.call(None)] == ["read"]


async def test_a_unary_handler_and_one_that_waits_for_its_reader_are_pumped_as_well() -> None:

    async def one(request: Any, context: RequestContext) -> int:
        return 7

    taken: list[Any] = []
    await pump(await client_of(one).call(None), taken.extend)
    assert taken == [7]
    made = 0

    async def making(request: Any, context: RequestContext) -> AsyncIterator[Any]:
        nonlocal made
        for n in range(3):
            made += 1
            yield n

    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pumping = asyncio.create_task(pump(await client_of(making).call(None), lambda batch: room))
    await asyncio.sleep(0)
    assert made == 1
    room.set_result(None)
    await pumping
    assert made == 3

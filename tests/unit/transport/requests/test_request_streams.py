"""The two halves of a response, joined by hand: back-pressure, coalescing and endings without a network."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.transport.requests.frames import (
    FrameDecoder,
    FrameKind,
    ItemSequence,
    data_frame,
    encode_value,
    frame,
)
from dynamo_local.transport.requests.responses import FLUSH_ITEMS, ResponseSender
from dynamo_local.transport.requests.stream import READ_AHEAD_BYTES, InboundStream, ResponseStream, pump


class FakeSocket:
    """Takes socket options."""

    family = socket.AF_INET

    def setsockopt(self, *args: int) -> None:
        """Nothing to set."""


class FakeTransport:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> FakeSocket:
        return FakeSocket()


def make_sender() -> tuple[ResponseSender, FakeTransport]:
    sender, transport = ResponseSender(b"t" * 16, on_lost=lambda: None), FakeTransport()
    sender.connection_made(transport)  # type: ignore[arg-type]
    transport.written = b""
    return sender, transport


def make_inbound() -> tuple[InboundStream, FakeTransport]:
    inbound, transport = (
        InboundStream(lambda inbound, token: inbound.accept("w", b""), lambda inbound: None),
        FakeTransport(),
    )
    inbound.connection_made(transport)  # type: ignore[arg-type]
    inbound.data_received(frame(FrameKind.HELLO, 0, b"t" * 16))
    return inbound, transport


def data(number: int, *items: Any) -> bytes:
    return data_frame(number, [encode_value(item) for item in items])


async def test_items_of_one_pass_share_a_frame() -> None:
    sender, transport = make_sender()
    assert [sender.put(n) for n in range(10)] == [None] * 10
    assert transport.written == b""
    await asyncio.sleep(0)
    sender.put(10)
    await asyncio.sleep(0)
    sender.end()
    frames = FrameDecoder().feed(transport.written)
    sequence = ItemSequence()
    assert [sequence.data(f.number, f.body) for f in frames[:2]] == [list(range(10)), [10]]
    assert [(f.kind, f.number) for f in frames[2:]] == [(FrameKind.END, 11)]


async def test_a_handler_that_never_waits_lets_others_run() -> None:
    sender, _ = make_sender()
    waits = [sender.put(n) for n in range(FLUSH_ITEMS)]
    assert waits[:-1] == [None] * (FLUSH_ITEMS - 1)
    assert waits[-1] is not None
    await asyncio.wait_for(waits[-1], 1.0)


async def test_a_full_socket_makes_the_handler_wait() -> None:
    """Nothing is written while the socket is full; what waits here is bounded; then all of it goes out."""
    sender, transport = make_sender()
    sender.pause_writing()
    room = None
    for _ in range(FLUSH_ITEMS):
        room = sender.put("x" * 10)
        await asyncio.sleep(0)
    assert transport.written == b""
    assert room is not None
    assert not room.done()
    assert sender.pending_bytes < 11 * FLUSH_ITEMS + 1
    sender.resume_writing()
    assert room.done()
    assert len(transport.written) > 10 * FLUSH_ITEMS


async def test_the_end_goes_out_once() -> None:
    sender, transport = make_sender()
    sender.put("a")
    sender.end(errors.DeadlineExceeded("late"))
    sender.end()
    with pytest.raises(errors.RequestCancelled):
        sender.put("b")
    await asyncio.sleep(0)
    assert [f.kind for f in FrameDecoder().feed(transport.written)] == [FrameKind.DATA, FrameKind.ERROR]


async def test_a_lost_connection_frees_the_waiting_handler() -> None:
    sender, _ = make_sender()
    sender.pause_writing()
    room = [sender.put("x") for _ in range(FLUSH_ITEMS)][-1]
    sender.connection_lost(None)
    assert room is not None
    await asyncio.wait_for(room, 1.0)
    assert await sender.go is None
    assert sender.pending_bytes == 0


async def test_unread_data_stops_the_socket_from_being_read() -> None:
    inbound, transport = make_inbound()
    inbound.data_received(data(0, "x" * READ_AHEAD_BYTES))
    assert not transport.reading
    assert inbound.unread_bytes > READ_AHEAD_BYTES
    assert await inbound.next_batch() == ["x" * READ_AHEAD_BYTES]
    assert transport.reading
    assert inbound.unread_bytes == 0


async def test_a_half_received_large_frame_does_not_stop_reading() -> None:
    inbound, transport = make_inbound()
    wire = data(0, "x" * (3 * READ_AHEAD_BYTES))
    inbound.data_received(wire[: 2 * READ_AHEAD_BYTES])
    assert transport.reading
    inbound.data_received(wire[2 * READ_AHEAD_BYTES :])
    assert await inbound.next_batch() == ["x" * (3 * READ_AHEAD_BYTES)]


async def test_frames_that_waited_are_read_as_one_batch() -> None:
    inbound, _ = make_inbound()
    inbound.data_received(data(0, 1, 2) + data(2, 3) + data(3, 4) + frame(FrameKind.END, 4))
    batches: list[list[int]] = []
    await pump(ResponseStream(1, inbound), batches.append)
    assert batches == [[1, 2, 3, 4]]


async def test_a_missing_end_is_a_lost_worker() -> None:
    inbound, _ = make_inbound()
    inbound.data_received(data(0, "a"))
    inbound.connection_lost(ConnectionResetError("reset by peer"))
    stream = ResponseStream(1, inbound)
    assert await anext(stream) == "a"
    with pytest.raises(errors.WorkerLost, match=r"after 1 items.*reset by peer"):
        await anext(stream)


async def test_an_end_that_promises_more_is_a_gap() -> None:
    inbound, _ = make_inbound()
    inbound.data_received(data(0, "a") + frame(FrameKind.END, 2))
    stream = ResponseStream(1, inbound)
    assert await anext(stream) == "a"
    with pytest.raises(errors.StreamGap):
        await anext(stream)


async def test_an_unknown_frame_is_an_error() -> None:
    inbound, _ = make_inbound()
    inbound.data_received(frame(FrameKind.GO, 0, b"") + data(0, "a"))
    with pytest.raises(errors.StreamGap, match="unknown kind"):
        await inbound.next_batch()


async def test_after_the_end_iteration_stays_ended() -> None:
    inbound, _ = make_inbound()
    inbound.data_received(data(0, "a") + frame(FrameKind.END, 1))
    stream = ResponseStream(1, inbound)
    assert [item async for item in stream] == ["a"]
    await stream.aclose()
    assert [item async for item in stream] == []


async def test_reading_a_closed_stream_says_so() -> None:
    inbound, transport = make_inbound()
    inbound.data_received(data(0, "a"))
    stream = ResponseStream(1, inbound)
    await stream.aclose()
    assert transport.aborted
    with pytest.raises(errors.RequestCancelled):
        await anext(stream)


async def test_a_dropped_stream_closes_its_connection() -> None:
    inbound, transport = make_inbound()
    inbound.data_received(data(0, "a", "b"))
    async for _ in ResponseStream(1, inbound):
        break
    await asyncio.sleep(0)
    assert transport.aborted


async def test_two_readers_are_a_bug() -> None:
    """They would each get half of the text."""
    inbound, _ = make_inbound()
    first = asyncio.create_task(inbound.next_batch())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await inbound.next_batch()
    inbound.discard()
    with pytest.raises(errors.RequestCancelled):
        await first

"""Strangers on the ports and subjects of the request plane, and damaged streams."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from nats.aio.msg import Msg

from dynamo_local import errors
from dynamo_local.transport.requests.frames import (
    FrameKind,
    RequestHeader,
    data_frame,
    decode_header,
    encode_header,
    encode_value,
    frame,
)
from tests.drivers.eventually import eventually
from tests.drivers.without_arbiter.request_plane import Bench, count

pytestmark = pytest.mark.infra


async def hello(port: int, token: bytes, *frames: bytes) -> bytes:
    """Connect to the response port, show the token, send the frames; all that came back until it closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(frame(FrameKind.HELLO, 0, token) + b"".join(frames))
    try:
        return await asyncio.wait_for(reader.read(), 2.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await writer.wait_closed()


async def test_unknown_and_used_tokens_are_dropped(bench: Bench) -> None:
    listener = bench.dispatcher.listener
    assert await hello(listener.port, b"x" * 16) == b""
    offer = listener.offer("a worker", b"secret payload")
    first = asyncio.create_task(hello(listener.port, offer.token))
    inbound = await offer.answer
    assert await hello(listener.port, offer.token) == b""
    assert listener.rejected == 2
    inbound.discard()
    assert b"secret payload" in await first


async def test_noise_on_the_response_port_is_dropped(bench: Bench) -> None:
    listener = bench.dispatcher.listener
    for noise in (b"GET / HTTP/1.1\r\n\r\n", frame(FrameKind.DATA, 0, b"x"), frame(FrameKind.HELLO, 0, b"x" * 100)):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(noise)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 2.0) == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    assert listener.rejected == 3


async def test_an_injected_gap_in_a_real_stream_is_typed(bench: Bench) -> None:
    connection = await bench.connect()
    tasks: set[asyncio.Task[bytes]] = set()

    async def leaves_one_out(message: Msg) -> None:
        header = decode_header(message.data)
        encoded = [encode_value(item) for item in ("a", "b", "d")]
        gap = data_frame(0, encoded[:2]) + data_frame(3, encoded[2:]) + frame(FrameKind.END, 4)
        tasks.add(asyncio.create_task(hello(header.port, header.token, gap)))

    await connection.subscribe(bench.subject(1), cb=leaves_one_out)
    await connection.flush()
    await connection.flush()
    bench.register(1)
    stream = await bench.client.call(None)
    assert [await anext(stream), await anext(stream)] == ["a", "b"]
    with pytest.raises(errors.StreamGap):
        await anext(stream)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("host", ["192.0.2.1", "localhost.example"])
async def test_an_answer_goes_nowhere_but_to_loopback(
    bench: Bench, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    server = await bench.serve(count)
    connection = await bench.connect()
    header = RequestHeader(1, "r-far", None, host, 9, b"t" * 16, encode_value(1))
    await connection.publish(bench.subject(1), encode_header(header))
    await eventually(lambda: "not loopback" in caplog.text)
    assert await server.wait_idle(1.0)

"""Connections that outlive an answer, and workers that have more to take than they can at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.msg import Msg

from dynamo_local import errors
from dynamo_local.errors import WorkerLost
from dynamo_local.transport.requests import listener as asking
from dynamo_local.transport.requests import responses as sender
from dynamo_local.transport.requests.calls import PROBE_INTERVAL_S
from dynamo_local.transport.requests.frames import (
    WIRE_VERSION,
    FrameKind,
    RequestHeader,
    encode_header,
    encode_value,
    frame,
)
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.responses import KEEP_BYTES
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, asked, count, request_bench

pytestmark = pytest.mark.infra


def kept(bench: Bench) -> int:
    return len(bench.dispatcher.listener.kept)


def sent_by_nats(bench: Bench) -> int:
    return int(bench.connections[0].stats["out_msgs"])


async def test_the_next_request_needs_neither_nats_nor_a_connection(bench: Bench) -> None:
    await bench.serve(count)
    assert await asked(bench) == [0, 1]
    assert kept(bench) == 1
    before = sent_by_nats(bench)
    for n in range(20):
        assert await asked(bench, n) == list(range(n))
    assert (kept(bench), sent_by_nats(bench)) == (1, before)
    assert await asyncio.gather(*(asked(bench, n) for n in range(30))) == [list(range(n)) for n in range(30)]
    assert kept(bench) == 30
    assert bench.dispatcher.listener.open_connections == 0


async def test_a_leaving_worker_serves_what_comes_in_time_there_and_refuses_the_rest(bench: Bench) -> None:
    server = await bench.serve(count)
    await asked(bench)
    before = sent_by_nats(bench)
    server.stop_accepting(linger_s=30.0)
    assert await asked(bench) == [0, 1]
    assert server.late_accepted == 1
    server.stop_accepting(linger_s=0.0)
    with pytest.raises(errors.WorkerDraining):
        await asked(bench, instance_id=1)
    assert sent_by_nats(bench) == before
    assert await server.wait_idle(1.0)
    server.resume_accepting()
    assert await asked(bench, instance_id=1) == [0, 1]


async def test_a_full_worker_refuses_there_too(bench: Bench) -> None:
    gate = asyncio.Event()

    async def gated(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield "first"
        if payload:
            await gate.wait()

    await bench.serve(gated, max_inflight=1)
    for _ in range(2):  # two connections, of which one is kept
        await asked(bench, None)
    stream = await bench.client.call(1)
    with pytest.raises(errors.WorkerBusy):
        await asked(bench, None)
    gate.set()
    assert [item async for item in stream] == ["first"]


async def test_a_closed_endpoint_is_asked_by_nats_which_knows(bench: Bench) -> None:
    server = await bench.serve(count)
    await bench.serve(count, 2)
    for instance_id in (1, 2):
        await asked(bench, instance_id=instance_id)
    await server.close()
    with pytest.raises(errors.WorkerLost, match="nobody serves"):
        await asked(bench, instance_id=1)
    assert await asked(bench) == [0, 1]


async def test_a_new_lease_ends_the_connections_of_the_old(bench: Bench) -> None:
    gate = asyncio.Event()

    async def gated(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield "first"
        if payload:
            await gate.wait()

    server = await bench.serve(gated)
    await asked(bench, None)
    running = await bench.client.call(1)
    await asked(bench, None)
    await server.rebind(bench.subject(2))
    bench.register(2)
    gate.set()
    assert [item async for item in running] == ["first"]
    with pytest.raises(errors.WorkerLost, match="nobody serves"):
        await asked(bench, None, instance_id=1)
    assert await asked(bench, None, instance_id=2) == ["first"]


async def test_a_request_that_is_given_up_ends_its_connection(bench: Bench) -> None:
    ended = asyncio.Event()

    async def endless(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield "first"
            if payload:
                await asyncio.Event().wait()
        finally:
            ended.set()

    server = await bench.serve(endless)
    await asked(bench, None)
    ended.clear()
    stream = await bench.client.call(1)
    assert kept(bench) == 0
    assert await anext(stream) == "first"
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 1.0)
    assert await server.wait_idle(1.0)
    late = await bench.client.call(1, timeout_s=0.05)
    with pytest.raises(errors.DeadlineExceeded):
        [item async for item in late]
    assert kept(bench) == 0


async def test_neither_errors_nor_large_answers_leave_a_connection(bench: Bench) -> None:
    async def answer(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield "x" * payload
        if not payload:
            raise ValueError("nothing")

    await bench.serve(answer)
    with pytest.raises(errors.RemoteError, match="nothing"):
        await asked(bench, 0)
    assert await asked(bench, 2 * KEEP_BYTES) == ["x" * 2 * KEEP_BYTES]
    assert kept(bench) == 0
    assert await asked(bench, 5) == ["xxxxx"]
    assert kept(bench) == 1
    with pytest.raises(errors.RemoteError, match="nothing"):
        await asked(bench, 0)
    assert kept(bench) == 0


async def test_a_worker_that_hung_does_not_begin_what_was_given_up(bench: Bench) -> None:
    begun: list[Any] = []

    async def noting(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        begun.append(payload)
        yield payload

    await bench.serve(noting)
    assert await asked(bench, "in time") == ["in time"]
    listener = bench.dispatcher.listener
    too_late = RequestHeader(
        WIRE_VERSION, "r", None, "", 0, b"", encode_value("late"), keep=True, until_s=time.monotonic()
    )
    inbound = listener.ask_again(bench.subject(1), "the worker", encode_header(too_late))
    assert inbound is not None
    assert inbound.taken is not None
    assert await inbound.taken is False
    assert begun == ["in time"]


async def test_only_requests_may_come_on_it(bench: Bench) -> None:
    server = await bench.serve(count)
    await asked(bench)
    transport = bench.dispatcher.listener.kept.take(bench.subject(1))
    assert transport is not None
    bench.dispatcher.listener.kept.put(bench.subject(1), transport)
    transport.write(frame(FrameKind.DATA, 0, b"x"))
    await eventually(lambda: kept(bench) == 0)
    assert server.in_flight == 0
    assert await asked(bench) == [0, 1]


async def test_what_nobody_uses_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "IDLE_S", 0.05)
    monkeypatch.setattr(asking, "IDLE_MAX", 3)
    await bench.serve(count)
    await asyncio.gather(*(asked(bench) for _ in range(8)))
    assert kept(bench) == 3
    await eventually(lambda: kept(bench) == 0)
    assert await asked(bench) == [0, 1]


async def test_a_worker_without_items_yet_says_that_it_has_taken_the_request(bench: Bench) -> None:
    """Otherwise its caller would ask another worker."""
    gate = asyncio.Event()

    async def slow(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        if payload:
            await gate.wait()
        yield "late"

    await bench.serve(slow)
    await asked(bench, None)
    before = sent_by_nats(bench)
    stream = await asyncio.wait_for(bench.client.call(1), 1.0)
    gate.set()
    assert [item async for item in stream] == ["late"]
    assert sent_by_nats(bench) == before


async def test_the_first_items_say_it_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def numbers(payload: int, context: RequestContext) -> AsyncIterator[Any]:
        for number in range(payload):
            yield number

    monkeypatch.setattr(sender, "TAKEN_AFTER_S", 60.0)
    await bench.serve(numbers)
    await asked(bench, 1)
    before = sent_by_nats(bench)
    for count_ in (2, 0, 1):
        assert await asked(bench, count_) == list(range(count_))
    assert sent_by_nats(bench) == before


SILENCE_S = 0.6
EACH_S = 0.15
REQUESTS = 12


async def echo(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    yield payload


@asynccontextmanager
async def slow(nats_server: RealNats, namespace: str, silence_s: float) -> AsyncIterator[Bench]:
    """Instance 1 takes a request every `EACH_S`; its caller takes a worker for gone that is silent for so long."""
    async with request_bench(nats_server, namespace, accept_timeout_s=silence_s) as made:
        await made.serve(echo, 2)
        connection = await made.connect()

        async def slowly(message: Msg) -> None:
            if message.data:
                await asyncio.sleep(EACH_S)
                await connection.publish(made.subject(2), message.data, reply=message.reply)

        await connection.subscribe(made.subject(1), cb=slowly)
        await connection.flush()
        await connection.flush()
        made.register(1)
        yield made


@pytest.mark.timing
async def test_a_busy_worker_is_waited_for(nats_server: RealNats, namespace: str) -> None:
    async with slow(nats_server, namespace, SILENCE_S) as bench:
        start = time.monotonic()
        assert await asyncio.gather(*(asked(bench, n, instance_id=1) for n in range(REQUESTS))) == [
            [n] for n in range(REQUESTS)
        ]
        assert time.monotonic() - start > 2 * SILENCE_S


async def test_those_that_wait_do_not_ask_each_for_itself(nats_server: RealNats, namespace: str) -> None:
    async with slow(nats_server, namespace, 30.0) as bench:
        connection, server_side = bench.connections[0], bench.connections[-1]
        waiting = [asyncio.create_task(asked(bench, n, instance_id=1)) for n in range(500)]
        await asyncio.wait(waiting, timeout=6 * PROBE_INTERVAL_S)
        assert 500 <= connection.stats["out_msgs"] < 550
        await server_side.close()
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    lost = [each for each in found if isinstance(each, BaseException)]
    assert len(lost) > 400
    assert all(isinstance(each, WorkerLost) for each in lost)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.timing
@pytest.mark.parametrize("busy", [True, False])
async def test_who_waits_on_a_kept_connection_of_a_busy_worker_joins_its_line(
    busy: bool, ends: tuple[socket.socket, socket.socket], nats_server: RealNats, namespace: str
) -> None:
    async with request_bench(nats_server, namespace, accept_timeout_s=SILENCE_S) as bench:
        await bench.serve(echo)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ends[0])
        bench.dispatcher.listener.kept.put(bench.subject(1), transport)
        waiting = asyncio.create_task(asked(bench, 1, instance_id=1))
        await asyncio.wait({waiting}, timeout=SILENCE_S / 2)
        if busy:
            assert await asked(bench, 2, instance_id=1) == [2]
            assert await waiting == [1]
        else:
            with pytest.raises(WorkerLost, match="did not take"):
                await waiting

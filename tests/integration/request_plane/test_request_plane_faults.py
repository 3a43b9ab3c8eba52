"""Requests over a real NATS when something goes wrong, and while workers drain."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo_local import errors
from dynamo_local.ports import ResponseStream
from dynamo_local.transport.requests.frames import FrameKind, RequestHeader, encode_header, encode_value, frame
from dynamo_local.transport.requests.handlers import RequestContext
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, count, forever_until, request_bench

pytestmark = pytest.mark.infra

ROOT = Path(__file__).parents[3]
MIB = 1024 * 1024


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


async def start_worker(
    bench: Bench, server: RealNats, instance_id: int, processes: list[subprocess.Popen[bytes]]
) -> subprocess.Popen[bytes]:
    """A worker in a process of its own, serving and registered."""
    argv = [sys.executable, "-m", "tests.drivers.without_arbiter.request_worker"]
    argv += [server.url, str(server.token_file), bench.subject(instance_id)]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    processes.append(process)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
    bench.register(instance_id)
    return process


async def wait_for_ever(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    yield "first"
    await asyncio.Event().wait()


@pytest.mark.timing
async def test_a_killed_worker_ends_its_streams_at_once(
    bench: Bench, nats_server: RealNats, processes: list[subprocess.Popen[bytes]]
) -> None:
    worker = await start_worker(bench, nats_server, 1, processes)
    stream = await bench.client.call({})
    items = aiter(stream)
    found = [await anext(items) for _ in range(3)]
    worker.kill()
    killed = time.monotonic()

    async def read_on() -> None:
        async for item in items:
            found.append(item)

    with pytest.raises(errors.WorkerLost) as raised:
        await read_on()
    assert time.monotonic() - killed < 0.5
    assert raised.value.retryable
    assert found == list(range(len(found)))


@pytest.mark.timing
async def test_a_dead_worker_is_found_out_and_passed_over(
    bench: Bench, nats_server: RealNats, processes: list[subprocess.Popen[bytes]]
) -> None:
    worker = await start_worker(bench, nats_server, 1, processes)
    await bench.serve(count, 2)
    worker.kill()
    await asyncio.to_thread(worker.wait)
    start = time.monotonic()
    for _ in range(4):
        stream = await bench.client.call(1)
        assert (stream.instance_id, [item async for item in stream]) == (2, [0])
    with pytest.raises(errors.WorkerLost, match="nobody serves"):
        await bench.client.call(1, instance_id=1)
    assert time.monotonic() - start < 1.0


@pytest.mark.timing
async def test_a_hanging_worker_is_given_up_and_then_avoided(
    nats_server: RealNats, namespace: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    async with request_bench(nats_server, namespace, accept_timeout_s=0.6) as bench:
        worker = await start_worker(bench, nats_server, 1, processes)
        await bench.serve(count, 2)
        os.kill(worker.pid, signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(6):
            stream = await bench.client.call(2)
            assert (stream.instance_id, [item async for item in stream]) == (2, [0, 1])
        assert 0.6 <= time.monotonic() - start < 1.5
        with pytest.raises(errors.WorkerLost, match="did not take the request"):
            await bench.client.call(1, instance_id=1)
        assert bench.dispatcher.listener.rejected == 0
        os.kill(worker.pid, signal.SIGCONT)
        # It now comes for requests that were given up. Their tokens are worth nothing, so no handler runs.
        await eventually(lambda: bench.dispatcher.listener.rejected == 2)


async def call_a_silent_worker(bench: Bench) -> tuple[asyncio.Task[ResponseStream], Client]:
    """A call whose message instance 1 has taken, and does nothing with; and that instance's connection."""
    connection = await bench.connect()
    taken = asyncio.Event()

    async def swallow(message: Msg) -> None:
        taken.set()

    await connection.subscribe(bench.subject(1), cb=swallow)
    await connection.flush()
    await connection.flush()
    bench.register(1)
    calling = asyncio.create_task(bench.client.call(None))
    await asyncio.wait_for(taken.wait(), 2.0)
    return calling, connection


@pytest.mark.timing
async def test_a_worker_that_dies_holding_a_request_is_noticed(bench: Bench) -> None:
    """A probe finds this out, not the accept timeout."""
    calling, connection = await call_a_silent_worker(bench)
    await connection.close()
    start = time.monotonic()
    with pytest.raises(errors.WorkerLost, match="nobody serves"):
        await calling
    assert time.monotonic() - start < 1.0


async def test_a_closing_endpoint_tells_its_callers(bench: Bench) -> None:
    ended = asyncio.Event()
    server = await bench.serve(forever_until(ended))
    stream = await bench.client.call(None, request_id="r-1")
    assert await anext(stream) == "first"
    assert server.in_flight_ids() == ("r-1",)
    await server.close()
    assert ended.is_set()
    assert server.in_flight == 0
    with pytest.raises(errors.WorkerLost, match="closed endpoint generate"):
        await anext(stream)


@pytest.mark.timing
async def test_a_handler_that_ignores_its_cancellation_cannot_hold_the_caller(bench: Bench) -> None:
    stubborn_done = asyncio.Event()

    async def stubborn(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield "first"
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.3)
            yield "nobody reads this"
        finally:
            stubborn_done.set()

    server = await bench.serve(stubborn)
    stream = await bench.client.call(None, timeout_s=0.1)
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        [item async for item in stream]
    assert time.monotonic() - start < 0.25
    await asyncio.wait_for(stubborn_done.wait(), 2.0)
    assert await server.wait_idle(2.0)


async def test_the_worker_enforces_the_deadline_by_itself(bench: Bench) -> None:
    await bench.serve(wait_for_ever)
    connection = await bench.connect()
    received = asyncio.get_running_loop().create_future()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(FrameKind.GO, 0, b""))
        received.set_result(await reader.readuntil(b"deadline_exceeded"))
        writer.close()

    listener = await asyncio.start_server(read, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    header = RequestHeader(1, "raw", 0.1, "127.0.0.1", port, b"t" * 16, encode_value(None))
    await connection.publish(bench.subject(1), encode_header(header))
    assert b"first" in await asyncio.wait_for(received, 2.0)
    listener.close()
    await listener.wait_closed()


async def test_a_slow_reader_loses_nothing_and_grows_nothing(bench: Bench) -> None:
    async def bulky(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        for n in range(5000):
            yield [n, "x" * 10_000]

    server = await bench.serve(bulky)
    stream = await bench.client.call(None)
    process, most_bytes, most_rss, received = psutil.Process(), 0, 0, []
    before_rss = process.memory_info().rss
    async for n, _ in stream:
        received.append(n)
        if n % 25 == 0:
            await asyncio.sleep(0.002)
            most_bytes = max(most_bytes, server.pending_bytes + stream.unread_bytes)
            most_rss = max(most_rss, process.memory_info().rss - before_rss)
    assert received == list(range(5000))
    assert most_bytes < 1 * MIB
    assert most_rss < 16 * MIB


async def test_an_answer_that_nobody_reads_ends_while_the_worker_leaves(bench: Bench) -> None:
    async def bulky(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        while True:
            yield "x" * 10_000

    server = await bench.serve(bulky)
    stream = await bench.client.call(None)
    while not server.unread_s():
        await asyncio.sleep(0.01)
    server.stop_accepting(linger_s=0)
    server.end_unread(0.2)
    assert not await server.wait_idle(0.3)
    server.end_unread(0.2)
    assert await server.wait_idle(1.0)
    assert server.abandoned == 1
    with pytest.raises(errors.WorkerLost):
        [item async for item in stream]


@pytest.mark.parametrize("tokens", [1000, 100_000, 2_000_000])
async def test_prompts_of_any_length_arrive(bench: Bench, tokens: int) -> None:
    async def measure(payload: Any, context: RequestContext) -> list[int]:
        return [len(payload), sum(payload)]

    await bench.serve(measure)
    prompt = [n % 50_000 for n in range(tokens)]
    stream = await bench.client.call(prompt)
    assert await stream.single() == [tokens, sum(prompt)]


async def test_a_full_endpoint_is_busy_and_the_next_one_is_asked(bench: Bench) -> None:
    server = await bench.serve(wait_for_ever, 1, max_inflight=2)
    first, second = await bench.client.call(None), await bench.client.call(None)
    with pytest.raises(errors.WorkerBusy) as raised:
        await bench.client.call(None)
    assert raised.value.details["retry_after_s"] > 0
    await bench.serve(count, 2)
    for _ in range(3):
        other = await bench.client.call(1)
        assert (other.instance_id, [item async for item in other]) == (2, [0])
    await first.aclose()
    await eventually(lambda: server.in_flight == 1)
    third = await bench.client.call(None, instance_id=1)
    assert await anext(third) == "first"
    await second.aclose()
    await third.aclose()


@pytest.mark.timing
async def test_nats_away_fails_fast_and_back_works_again(own_nats: RealNats, namespace: str) -> None:
    async def paced(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        for n in range(payload):
            yield n
            await asyncio.sleep(0.01)

    async with request_bench(own_nats, namespace) as bench:
        await bench.serve(paced)
        stream = await bench.client.call(60)
        items = aiter(stream)
        found = [await anext(items)]
        await own_nats.kill()
        await eventually(lambda: not any(connection.is_connected for connection in bench.connections))
        start = time.monotonic()
        with pytest.raises(errors.NatsUnavailable):
            await bench.client.call(1)
        assert time.monotonic() - start < 0.1
        await own_nats.start()
        found += [item async for item in items]
        assert found == list(range(60))
        await eventually(lambda: all(connection.is_connected for connection in bench.connections), 5.0)
        again = await bench.client.call(2)
        assert [item async for item in again] == [0, 1]


@pytest.mark.timing
async def test_a_request_on_its_way_while_nats_dies_is_told(own_nats: RealNats, namespace: str) -> None:
    async with request_bench(own_nats, namespace) as bench:
        calling, _ = await call_a_silent_worker(bench)
        await own_nats.kill()
        start = time.monotonic()
        with pytest.raises(errors.NatsUnavailable):
            await calling
        assert time.monotonic() - start < 1.0
        await own_nats.start()
        # nats-py 2.16 leaves a socket open if it is closed while it connects again.
        await eventually(lambda: all(connection.is_connected for connection in bench.connections), 5.0)


def gated(gate: asyncio.Event) -> Any:
    async def handler(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield "first"
        await gate.wait()
        yield "last"

    return handler


async def test_late_requests_are_served_within_the_linger_window(bench: Bench) -> None:
    gate = asyncio.Event()
    server = await bench.serve(gated(gate))
    early = await bench.client.call(None)
    server.stop_accepting(linger_s=0.3)
    late = await bench.client.call(None)
    assert server.late_accepted == 1
    assert not await server.wait_idle(0.05)
    await asyncio.sleep(0.3)
    with pytest.raises(errors.WorkerDraining):
        await bench.client.call(None)
    assert server.in_flight == 2
    gate.set()
    assert [item async for item in early] == ["first", "last"]
    assert [item async for item in late] == ["first", "last"]
    assert await server.wait_idle(1.0)
    assert (server.late_accepted, server.in_flight) == (1, 0)


async def test_an_instance_that_is_leaving_is_not_chosen_again(bench: Bench) -> None:
    draining = await bench.serve(count, 1)
    await bench.serve(count, 2)
    draining.stop_accepting(linger_s=0)
    while len(bench.client.instances()) == 2:
        assert [item async for item in await bench.client.call(2)] == [0, 1]
    assert [instance.instance_id for instance in bench.client.instances()] == [2]
    with pytest.raises(errors.WorkerDraining):
        await bench.client.call(2, instance_id=1)
    draining.resume_accepting()
    bench.deregister(1)
    await bench.serve(count, 3)
    assert [instance.instance_id for instance in bench.client.instances()] == [2, 3]


async def test_a_stream_is_in_flight_until_its_reader_has_the_end(bench: Bench) -> None:
    produced = asyncio.Event()

    async def quick(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        for _ in range(20):
            yield "x" * 20_000
        produced.set()

    server = await bench.serve(quick)
    stream = await bench.client.call(None)
    await asyncio.wait_for(produced.wait(), 2.0)
    server.stop_accepting(linger_s=0)
    assert not await server.wait_idle(0.05)
    assert len([item async for item in stream]) == 20
    assert await server.wait_idle(1.0)

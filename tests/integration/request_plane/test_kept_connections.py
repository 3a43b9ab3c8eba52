"""Connections that carry one request after another: how many there are, what goes by NATS, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.runtime.requests import RequestContext
from dynamo_local.runtime.requests.frames import FrameKind, frame
from dynamo_local.runtime.requests.listener import Unheard
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, request_bench

pytestmark = pytest.mark.infra


@pytest.fixture
async def bench(nats_server: RealNats, namespace: str) -> AsyncIterator[Bench]:
    """A caller over the shared NATS, and servers as the test wants them."""
    async with request_bench(nats_server, namespace) as made:
        yield made


async def count(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    for n in range(payload):
        yield n


async def answered(bench: Bench, items: int = 3, **options: Any) -> None:
    """One request, and its whole answer."""
    assert [item async for item in await bench.client.call(items, **options)] == list(range(items))


def sent(bench: Bench) -> int:
    """Messages that the caller has published on NATS."""
    return int(bench.connections[0].stats["out_msgs"])


async def settled(bench: Bench) -> None:
    """The workers have heard that their callers have everything."""
    await eventually(lambda: not any(server.in_flight for server in bench.servers.values()))


async def test_later_requests_come_over_the_same_connection_and_not_by_nats(bench: Bench) -> None:
    """A hundred requests one after the other: one connection, one message."""
    await bench.serve(count)
    await answered(bench)
    before = sent(bench)
    for items in range(100):
        await answered(bench, items)
    assert sent(bench) == before
    assert bench.dispatcher.listener.open_connections == 1


async def test_many_at_once_have_a_connection_each_and_share_them_afterwards(bench: Bench) -> None:
    """No stream waits for another one; a second burst opens none."""
    await bench.serve(count)
    for _ in range(3):
        await asyncio.gather(*(answered(bench, 50) for _ in range(20)))
        assert bench.dispatcher.listener.open_connections <= 20
        await settled(bench)


async def test_a_refusal_comes_back_over_it_and_it_goes_on(bench: Bench) -> None:
    """Full, leaving, back again: as by NATS."""
    gate = asyncio.Event()

    async def gated(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield 0
        await gate.wait()

    server = await bench.serve(gated, max_inflight=1)
    gate.set()
    await answered(bench, 1)
    await settled(bench)
    gate.clear()
    busy = await bench.client.call(1)
    with pytest.raises(errors.WorkerBusy):
        await bench.client.call(1, instance_id=1)
    gate.set()
    assert [item async for item in busy] == [0]
    await settled(bench)
    server.stop_accepting(linger_s=0)
    before = sent(bench)
    with pytest.raises(errors.WorkerDraining):
        await bench.client.call(1, instance_id=1)
    server.resume_accepting()
    await answered(bench, 1, instance_id=1)
    assert sent(bench) == before


async def test_an_endpoint_that_has_closed_its_connections_is_asked_by_nats_and_nothing_is_lost(bench: Bench) -> None:
    """It closes and comes back, time and again, under callers that do not stop."""
    await bench.serve(count, 1)
    await bench.serve(count, 2)
    stop, done = asyncio.Event(), 0

    async def hammer() -> None:
        nonlocal done
        while not stop.is_set():
            await answered(bench, 20)
            done += 1

    callers = [asyncio.create_task(hammer()) for _ in range(8)]
    for turn in range(8):
        server = bench.servers[1 + turn % 2]
        server.stop_accepting(linger_s=0.02)
        assert await server.wait_idle(10.0)
        await server.close()
        await bench.serve(count, 1 + turn % 2)
        before = done
        await eventually(lambda before=before: done > before + 20)  # type: ignore[misc]
    stop.set()
    await asyncio.gather(*callers)


async def test_a_large_prompt_and_a_large_answer_go_over_a_kept_connection(bench: Bench) -> None:
    """Its payload follows the GO; buffers are the stream's own again."""

    async def echo(payload: Any, context: RequestContext) -> Any:
        return payload

    await bench.serve(echo)
    for size in (10, 2_000_000, 10, 2_000_000):
        stream = await bench.client.call("x" * size)
        assert await stream.single() == "x" * size
    assert bench.dispatcher.listener.open_connections == 1


async def test_a_connection_that_takes_another_request_leaves_the_one_sent_over_it_unheard(bench: Bench) -> None:
    """Both ends reach for it at once: the worker's request wins, the other goes by NATS."""
    await bench.serve(count)
    await answered(bench)
    await settled(bench)
    listener = bench.dispatcher.listener
    mine = listener.offer("a worker", b"", bench.subject(1))
    (inbound,) = listener._kept[bench.subject(1)]
    assert listener.ask(mine, b"never read")
    theirs = listener.offer("a worker", b"", bench.subject(1))
    inbound.data_received(frame(FrameKind.HELLO, 1, theirs.token))
    with pytest.raises(Unheard):
        await mine.answer
    (await theirs.answer).discard()
    await answered(bench)


async def test_a_worker_of_another_installation_that_keeps_nothing_is_served_as_before(bench: Bench) -> None:
    """Its HELLO does not say that it keeps connections: the caller closes at the end."""
    listener = bench.dispatcher.listener
    offer = listener.offer("a worker", b"", bench.subject(1))
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(frame(FrameKind.HELLO, 0, offer.token))
    await offer.answer
    writer.write(frame(FrameKind.END, 0))
    assert (await asyncio.wait_for(reader.read(), 5.0)).count(bytes([FrameKind.DONE])) == 0
    writer.close()
    await eventually(lambda: listener.open_connections == 0)

"""Requests over a real NATS to a worker that has more to take than it can at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.msg import Msg

from dynamo_local.errors import WorkerLost
from dynamo_local.transport.requests.calls import PROBE_INTERVAL_S
from dynamo_local.transport.requests.handlers import RequestContext
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, asked, request_bench

pytestmark = pytest.mark.infra

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

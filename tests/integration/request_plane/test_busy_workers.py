"""Requests over a real NATS to a worker that has more to take than it can at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg

from dynamo_local.errors import WorkerLost
from dynamo_local.runtime.requests import RequestContext
from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, request_bench

pytestmark = [pytest.mark.infra, pytest.mark.timing]

SILENCE_S = 0.6
EACH_S = 0.15
REQUESTS = 12


async def echo(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    """The payload."""
    yield payload


@pytest.fixture
async def bench(nats_server: RealNats, namespace: str) -> AsyncIterator[Bench]:
    """Instance 1 takes a request every `EACH_S`; its caller takes a worker for gone that is silent for `SILENCE_S`."""
    async with request_bench(nats_server, namespace, accept_timeout_s=SILENCE_S) as made:
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


async def asked(bench: Bench, number: int) -> list[Any]:
    """Instance 1's answer."""
    return [item async for item in await bench.client.call(number, instance_id=1)]


async def test_a_busy_worker_is_waited_for(bench: Bench) -> None:
    """The last of twelve waits three times as long as a silent worker may."""
    start = time.monotonic()
    assert await asyncio.gather(*(asked(bench, n) for n in range(REQUESTS))) == [[n] for n in range(REQUESTS)]
    assert time.monotonic() - start > 2 * SILENCE_S


async def test_those_that_wait_do_not_ask_each_for_itself(bench: Bench) -> None:
    """Five hundred cost NATS as many messages, and a few more; each one is told when the worker goes."""
    connection, server_side = bench.connections[0], bench.connections[-1]
    before = connection.stats["out_msgs"]
    waiting = [asyncio.create_task(asked(bench, n)) for n in range(500)]
    await asyncio.wait(waiting, timeout=3 * SILENCE_S)
    sent = connection.stats["out_msgs"] - before
    assert 500 <= sent < 550
    await server_side.close()
    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    lost = [each for each in found if isinstance(each, BaseException)]
    assert len(lost) > 400
    assert all(isinstance(each, WorkerLost) for each in lost)

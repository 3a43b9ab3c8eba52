"""Requests while workers come and go: draining races, the registry, new leases; and the same under uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local import errors
from dynamo_local.transport.requests.handlers import RequestContext
from tests.drivers.without_arbiter.request_plane import Bench, count

pytestmark = pytest.mark.infra


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


async def test_draining_one_of_two_fails_no_call(bench: Bench) -> None:
    for instance_id in (1, 2):
        await bench.serve(count, instance_id)
    stop, done = asyncio.Event(), 0

    async def hammer() -> None:
        nonlocal done
        while not stop.is_set():
            stream = await bench.client.call(20)
            assert [item async for item in stream] == list(range(20))
            done += 1

    callers = [asyncio.create_task(hammer()) for _ in range(8)]
    for turn in range(6):
        instance_id = 1 + turn % 2
        server = bench.servers[instance_id]
        if turn < 4:
            bench.deregister(instance_id)
        server.stop_accepting(linger_s=0.02)
        assert await server.wait_idle(5.0)
        await server.close()
        await asyncio.sleep(0.05)
        await bench.serve(count, instance_id)
    stop.set()
    await asyncio.gather(*callers)
    assert done > 100

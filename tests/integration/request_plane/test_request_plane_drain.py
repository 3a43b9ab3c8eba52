"""Requests while workers come and go: draining races, the registry, new leases; and the same under uvloop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import uvloop

from dynamo_local import errors
from dynamo_local.transport.discovery import instance_to_value, key_of, make_instance
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.client import DependencyClient
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.plane import RequestPlane
from dynamo_local.transport.requests.server import EndpointServer
from dynamo_local.transport.requests.stream import pump
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealEtcd, RealNats
from tests.drivers.without_arbiter.request_plane import Bench, count, request_bench

pytestmark = pytest.mark.infra


def gated(gate: asyncio.Event) -> Any:
    async def handler(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        yield "first"
        await gate.wait()
        yield "last"

    return handler


# --- drains ------------------------------------------------------------------------------------


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


async def test_idle_means_that_the_linger_window_is_over_too(bench: Bench) -> None:
    """A worker that exits in the window would lose what is on its way."""
    server = await bench.serve(count)
    server.stop_accepting(linger_s=0.2)
    start = time.monotonic()
    assert await server.wait_idle(2.0)
    assert time.monotonic() - start >= 0.2


async def test_a_drain_can_be_taken_back(bench: Bench) -> None:
    server = await bench.serve(count)
    server.stop_accepting(linger_s=0)
    with pytest.raises(errors.WorkerDraining):
        await bench.client.call(1)
    server.resume_accepting()
    assert [item async for item in await bench.client.call(2)] == [0, 1]
    assert server.late_accepted == 0


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


async def test_a_new_lease_moves_the_endpoint_and_keeps_its_streams(bench: Bench) -> None:
    gate = asyncio.Event()
    server = await bench.serve(gated(gate), 1)
    stream = await bench.client.call(None)
    await server.rebind(bench.subject(2))
    bench.register(2)
    moved = await bench.client.call(None, instance_id=2)
    with pytest.raises(errors.WorkerLost, match="nobody serves"):
        await bench.client.call(None, instance_id=1)
    gate.set()
    assert [item async for item in stream] == ["first", "last"]
    assert [item async for item in moved] == ["first", "last"]


# --- the registry ------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.timing
async def test_new_workers_are_used_and_deregistered_ones_avoided_within_50_ms(
    nats_server: RealNats, etcd_server: RealEtcd, namespace: str
) -> None:
    """Clients watch etcd: measured from the put, and from the revocation of the lease."""
    nats = await connect_nats(nats_server.url, nats_server.access, name="test")
    kv = await EtcdStore.connect(etcd_server.endpoint)
    plane = RequestPlane(nats)
    await plane.start()
    client = await plane.client(kv, namespace, "Worker", "generate")
    assert await plane.client(kv, namespace, "Worker", "generate") is client
    with pytest.raises(errors.NoWorkers):
        await client.call(1)
    servers = []
    try:
        for n in (1, 2):
            lease_id = await kv.grant(30)
            instance = make_instance(namespace, "Worker", "generate", lease_id)
            servers.append(EndpointServer(nats, subject=instance.subject, handler=count))
            await servers[-1].start()
            start = time.monotonic()
            await kv.put(key_of(instance), instance_to_value(instance), lease_id)
            await eventually(lambda n=n: len(client.instances()) == n)
            assert time.monotonic() - start < 0.05
        assert {(await client.call(1)).instance_id for _ in range(4)} == {i.lease_id for i in client.instances()}
        gone = client.instances()[0].lease_id
        start = time.monotonic()
        await kv.revoke(gone)
        await eventually(lambda: len(client.instances()) == 1)
        assert time.monotonic() - start < 0.05
        assert gone not in {(await client.call(1)).instance_id for _ in range(4)}
        dependency = DependencyClient(plane, kv, namespace, "Worker", {"generate": "generate"})
        await dependency.wait_ready(1.0)
        assert [n async for n in dependency.generate(3)] == [0, 1, 2]
    finally:
        for server in servers:
            await server.close()
        await plane.close()
        await close_quietly(nats)
        await kv.close()


# --- uvloop ------------------------------------------------------------------------------------


async def scenario(nats_server: RealNats, namespace: str) -> None:
    """The main paths in one go."""
    async with request_bench(nats_server, namespace) as bench:
        ended = asyncio.Event()

        async def guarded(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
            try:
                while True:
                    yield "x" * 1000
            finally:
                ended.set()

        await bench.serve(count, 1)

        async def one(n: int) -> list[int]:
            return [item async for item in await bench.client.call(n)]

        assert await asyncio.gather(*(one(n) for n in range(200))) == [list(range(n)) for n in range(200)]
        slow, found = await bench.client.call(200_000), []

        def slowly(batch: list[int]) -> Awaitable[None]:
            found.extend(batch)
            return asyncio.sleep(0.001)

        await pump(slow, slowly)
        assert found == list(range(200_000))
        server = await bench.serve(guarded, 2)
        stream = await bench.client.call(None, instance_id=2)
        await anext(stream)
        await asyncio.sleep(0.05)
        assert server.pending_bytes + stream.unread_bytes < 1024 * 1024
        await stream.aclose()
        await asyncio.wait_for(ended.wait(), 0.5)
        late = await bench.client.call(None, instance_id=2, timeout_s=0.05)
        with pytest.raises(errors.DeadlineExceeded):
            [item async for item in late]
        lost = await bench.client.call(None, instance_id=2)
        await anext(lost)
        await server.close()
        with pytest.raises(errors.WorkerLost):
            [item async for item in lost]


def test_everything_holds_under_uvloop(nats_server: RealNats, namespace: str) -> None:
    uvloop.run(scenario(nats_server, namespace))

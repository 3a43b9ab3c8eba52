"""One worker process: its control endpoint, its drains, and taking them back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.types import Load, WorkerState
from dynamo_local.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NatsUnavailable,
    NoWorkers,
    RemoteError,
    WorkerDraining,
    WorkerLost,
)
from dynamo_local.transport.control import ControlClient, ControlServer
from dynamo_local.transport.nats import close_quietly, connect_nats
from tests.drivers.servers import RealEtcd, RealNats
from tests.drivers.without_arbiter.worker_process import WorkerHost, WorkerUnderTest, worker_host

pytestmark = pytest.mark.infra

WAYS = ["SIGTERM", "revoked lease", "message"]


def each_time(*ways: str) -> list[Any]:
    return [pytest.param(way, marks=() if way in ways else pytest.mark.full) for way in WAYS]


@pytest.fixture
async def host(
    etcd_server: RealEtcd, nats_server: RealNats, namespace: str, tmp_path: Path
) -> AsyncIterator[WorkerHost]:
    async with worker_host(etcd_server, nats_server, namespace, tmp_path) as made:
        yield made


async def ask_to_leave(worker: WorkerUnderTest, way: str) -> None:
    if way == "SIGTERM":
        worker.signal(signal.SIGTERM)
    elif way == "message":
        await worker.call("drain", reason="a test")
    else:
        lease = (await worker.status())["lease"]
        await worker.host.kv.revoke(int(lease, 16))


@pytest.mark.timing
@pytest.mark.parametrize("way", each_time("SIGTERM"))
async def test_a_worker_that_still_starts_leaves_at_once(host: WorkerHost, way: str) -> None:
    worker = await host.spawn("Sleeper")
    status = await worker.reaches(waiting_for="Sleeper's start hooks")
    assert (status["state"], status["pid"], status["in_flight"]) == ("starting", worker.pid, 0)
    assert await host.keys() == [f"leases/{worker.name}:{status['lease']}"]
    began_s = time.monotonic()
    await ask_to_leave(worker, way)
    assert await worker.exit_code() == 0
    assert time.monotonic() - began_s < 2.0
    assert await host.keys() == []
    assert "the start was cancelled" in worker.log
    assert "the engine was closed" in worker.log
    assert (worker.entry().lease, worker.entry().endpoints) == (None, [])


async def test_a_start_past_its_deadline_says_what_it_waited_for(host: WorkerHost) -> None:
    worker = await host.spawn("Sleeper", DYN_START_DEADLINE_S="1")
    assert await worker.exit_code() == 5
    assert "not ready within 1 s: Sleeper's start hooks" in worker.log
    assert await host.keys() == []


async def test_the_status_says_what_is_in_flight(host: WorkerHost) -> None:
    worker = await host.start("Counter")
    counting = await host.counting(worker, 50)
    status = await worker.status()
    assert (status["state"], status["in_flight"], len(status["requests"])) == ("ready", 1, 1)
    assert (status["pulled"], status["remaining_tokens"], status["reason"]) == (0, None, None)
    assert (status["watcher_name"], status["lease"]) == (worker.name, await worker.registered())
    assert await counting == list(range(50))


async def test_control_errors_are_typed(host: WorkerHost) -> None:
    with pytest.raises(NoWorkers, match="nobody"):
        await host.control.call("nobody", "status")
    worker = await host.start("Counter")
    with pytest.raises(InvalidRequest, match="status, drain, cancel_drain"):
        await worker.call("dance")
    worker.signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=worker.name):
        await worker.call("status", timeout_s=0.3)
    worker.signal(signal.SIGCONT)
    assert (await worker.status())["state"] == "ready"


async def test_a_long_operation_holds_up_no_other(nats_server: RealNats, namespace: str) -> None:
    gate = asyncio.Event()

    async def slow(_args: Mapping[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return {"slow": True}

    async def echo(args: Mapping[str, Any]) -> Mapping[str, Any]:
        return args

    async def broken(_args: Mapping[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("a defect")

    nats = await connect_nats(nats_server.url, nats_server.access)
    server = ControlServer(nats, namespace, "w", {"slow": slow, "echo": echo, "broken": broken})
    await server.start()
    client = ControlClient(nats, namespace)
    waiting = asyncio.create_task(client.call("w", "slow", timeout_s=5))
    await asyncio.sleep(0)
    assert await client.call("w", "echo", n=1, text="é") == {"n": 1, "text": "é"}
    with pytest.raises(RemoteError, match="a defect"):
        await client.call("w", "broken")
    assert not waiting.done()
    gate.set()
    assert await waiting == {"slow": True}
    await server.close()
    with pytest.raises(NoWorkers):
        await client.call("w", "echo")
    await close_quietly(nats)
    with pytest.raises(NatsUnavailable):
        await client.call("w", "echo")


async def test_a_component_without_a_load_source_answers_the_probe_also_while_draining(host: WorkerHost) -> None:
    worker = await host.start("Counter")
    assert await host.loads() == {worker.name: Load()}
    counting = await host.counting(worker, 100)
    await worker.call("drain")
    await worker.reaches(lease=None)
    assert await host.loads() == {worker.name: Load(request_active_slots=1)}
    assert await counting == list(range(100))
    assert await worker.exit_code() == 0


@pytest.mark.timing
@pytest.mark.parametrize("way", each_time("SIGTERM", "revoked lease"))
async def test_a_drain_finishes_its_streams_and_takes_nothing_new(host: WorkerHost, way: str) -> None:
    worker = await host.start("Counter")
    lease = int(await worker.registered(), 16)
    counting = await host.counting(worker, 120)
    began_s = time.monotonic()
    await ask_to_leave(worker, way)
    status = await worker.reaches(state="draining", lease=None)
    assert (status["in_flight"], await host.keys()) == (1, [])
    assert time.monotonic() - began_s < 0.5

    async def in_file() -> bool:
        entry = worker.entry()
        return entry.state is WorkerState.DRAINING and entry.lease is None

    await host.until(in_file)
    assert (worker.entry().reason, worker.entry().endpoints) == (status["reason"], [])
    await asyncio.sleep(0.3)  # past the linger window
    client = await host.client("Counter", "count")
    with pytest.raises((NoWorkers, WorkerDraining, WorkerLost)):
        await client.call({"to": 1, "interval_s": 0}, instance_id=lease)
    assert await counting == list(range(120))
    assert await worker.exit_code() == 0
    with pytest.raises(NoWorkers):
        await worker.status()


@pytest.mark.timing
@pytest.mark.parametrize("way", each_time("message"))
async def test_a_drain_is_taken_back_within_a_second(host: WorkerHost, way: str) -> None:
    worker = await host.start("Counter")
    old = await worker.registered()
    counting = await host.counting(worker, 150)
    await ask_to_leave(worker, way)
    await worker.reaches(state="draining")
    await asyncio.sleep(0.3)  # past the linger window: it refuses by now
    began_s = time.monotonic()
    status = await worker.call("cancel_drain")
    new = await worker.registered()
    assert await host.count(3) == [0, 1, 2]
    assert time.monotonic() - began_s < 1.0
    assert (status["state"], status["reason"], status["pid"]) == ("ready", None, worker.pid)
    assert new == status["lease"] != old

    async def in_file() -> bool:
        return worker.entry().lease == new and worker.entry().state is WorkerState.READY

    await host.until(in_file)
    assert [key.rpartition(":")[2] for key in worker.entry().endpoints] == [new] * len(worker.entry().endpoints)
    assert all(key.endswith(new) for key in await host.keys())
    assert await counting == list(range(150))
    assert (await worker.status())["state"] == "ready"


async def test_twenty_drains_taken_back_under_load_lose_nothing(host: WorkerHost) -> None:
    hammered, other = await asyncio.gather(host.start("Counter"), host.start("Counter", 1))
    going = True
    done: list[list[int]] = []

    async def load() -> None:
        while going:
            done.append(await host.count(12, 0.01))

    clients = [asyncio.create_task(load()) for _ in range(8)]
    long_ones = [await host.counting(hammered, 300) for _ in range(4)]
    leases = set()
    for cycle in range(20):
        await ask_to_leave(hammered, WAYS[cycle % 3])
        await hammered.reaches(state="draining")
        await asyncio.sleep(0.02 * (cycle % 4))  # in the linger window, and past it
        leases.add((await hammered.call("cancel_drain"))["lease"])
    going = False
    await asyncio.gather(*clients)
    for task in long_ones:
        assert await task == list(range(300))
    assert len(leases) == 20
    assert len(done) > 40
    assert done == [list(range(12))] * len(done)
    assert (hammered.process.returncode, other.process.returncode) == (None, None)
    assert len(await host.keys("workers/")) == 2

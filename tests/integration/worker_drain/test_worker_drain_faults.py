"""One worker process while etcd, NATS or its own engine goes away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.components import messages
from dynamo_local.errors import NoWorkers, WorkerDraining, WorkerLost
from dynamo_local.ports import SamplingParams
from tests.drivers.servers import RealEtcd, RealNats
from tests.drivers.without_arbiter.worker_process import WorkerHost, WorkerUnderTest, worker_host

pytestmark = pytest.mark.infra

DISAGG = "graphs.disagg:Frontend"


@pytest.fixture
async def host(own_etcd: RealEtcd, own_nats: RealNats, namespace: str, tmp_path: Path) -> AsyncIterator[WorkerHost]:
    folder = tmp_path / "host"
    folder.mkdir()
    async with worker_host(own_etcd, own_nats, namespace, folder) as made:
        yield made


async def refused(worker: WorkerUnderTest, lease: int) -> None:
    """Return once the worker sends new requests on; they are served until then."""
    client = await worker.host.client("Counter", "count")
    async with asyncio.timeout(5):
        while True:
            try:
                stream = await client.call({"to": 1, "interval_s": 0}, instance_id=lease)
            except WorkerDraining:
                return
            await stream.aclose()
            await asyncio.sleep(0.02)


async def test_a_drain_without_etcd_sends_requests_on_and_finishes(host: WorkerHost, own_etcd: RealEtcd) -> None:
    worker = await host.start("Counter")
    lease = int(await worker.registered(), 16)
    counting = await host.counting(worker, 200)
    await own_etcd.kill()
    worker.signal(signal.SIGTERM)
    await refused(worker, lease)
    status = await worker.status()
    assert (status["state"], status["lease"]) == ("draining", f"{lease:x}")
    assert not counting.done()
    assert await counting == list(range(200))
    assert await worker.exit_code() == 0
    assert "the keys stay" in worker.log


async def test_a_drain_is_taken_back_before_etcd_has_answered(host: WorkerHost, own_etcd: RealEtcd) -> None:
    """Nothing was stopped yet, so nothing has to start again."""
    worker = await host.start("PrefillWorker", target=DISAGG)
    own_etcd.pause()
    try:
        await worker.call("drain")
        taken_back = asyncio.create_task(worker.call("cancel_drain"))
        assert (await worker.status())["state"] == "draining"
    finally:
        own_etcd.resume()
    assert (await taken_back)["state"] == "ready"
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0


@pytest.mark.parametrize("lose_data", [pytest.param(False, marks=pytest.mark.full), True])
async def test_a_worker_survives_a_long_outage_of_etcd(host: WorkerHost, own_etcd: RealEtcd, lose_data: bool) -> None:
    worker = await host.start("Counter", DYN_LEASE_TTL_S="1")
    counting = await host.counting(worker, 800)
    await own_etcd.kill()
    await asyncio.sleep(1.5)
    assert (await worker.status())["in_flight"] == 1
    if lose_data:
        own_etcd.wipe()
    await own_etcd.start()
    # A restarted etcd gives an old lease a whole TTL again: what is there may be the old lease, or a new one.
    await worker.registered()
    assert await host.count(3) == [0, 1, 2]
    status = await worker.status()
    assert (status["state"], status["pid"]) == ("ready", worker.pid)
    assert not counting.done()
    assert await counting == list(range(800))
    assert {key.rpartition(":")[2] for key in await host.keys()} == {(await worker.status())["lease"]}


async def test_a_worker_survives_an_outage_of_nats(host: WorkerHost, own_nats: RealNats) -> None:
    worker = await host.start("Counter")
    counting = await host.counting(worker, 100)
    await own_nats.kill()
    assert await counting == list(range(100))
    await own_nats.start()
    assert (await worker.reaches(state="ready"))["pid"] == worker.pid
    assert await host.count(3) == [0, 1, 2]
    assert list(await host.loads()) == [worker.name]


async def generate(host: WorkerHost, lease: str) -> None:
    client = await host.client("VllmWorker", "generate")
    await client.wait_for_instances(5)
    payload = messages.generate_request("r", [300, 301, 302], SamplingParams(max_tokens=2000, ignore_eos=True))
    stream = await client.call(payload, instance_id=int(lease, 16))
    async with contextlib.aclosing(stream):
        async for _ in stream:
            continue


@pytest.mark.timing
async def test_a_dead_engine_ends_its_worker_at_once(host: WorkerHost) -> None:
    config = {"VllmWorker": {"sim": {"fail_after_requests": 2}}}
    worker = await host.start("VllmWorker", target=DISAGG, config=config)
    lease = await worker.registered()
    first = asyncio.create_task(generate(host, lease))
    await worker.reaches(in_flight=1)
    began_s = time.monotonic()
    with pytest.raises(WorkerLost) as second:
        await generate(host, lease)
    assert await worker.exit_code() == 1
    assert time.monotonic() - began_s < 2.0
    with pytest.raises(WorkerLost) as lost:
        await first
    assert (lost.value.retryable, second.value.retryable) == (True, True)
    assert "the engine failed, so this worker ends" in worker.log
    assert "fail_after_requests" in worker.log
    assert await host.keys() == []
    with pytest.raises(NoWorkers):
        await worker.status()

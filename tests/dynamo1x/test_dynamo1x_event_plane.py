"""Forward passes between us and Dynamo's own publisher and subscriber, on real etcd and NATS, and over ZeroMQ."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_local.components.commands import dynamo_1x_events as events
from dynamo_local.components.commands.dynamo_1x_events import ForwardPasses
from dynamo_local.core.passes import Requests
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.passes import PassEvents, PassRecorder
from tests.drivers.served import auntil
from tests.drivers.servers import RealEtcd, RealNats
from tests.fakes.data_plane.passes import WORKER, passed

pytestmark = [pytest.mark.infra, pytest.mark.timeout(120)]

SIDE = Path(__file__).with_name("event_plane_side.py")
WITHIN_S = 60.0


@asynccontextmanager
async def dynamos(
    role: str, namespace: str, plane: str, etcd: RealEtcd, nats: RealNats
) -> AsyncIterator[asyncio.StreamReader]:
    env = {
        "PATH": os.environ["PATH"],
        "ETCD_ENDPOINTS": etcd.endpoint,
        "NATS_SERVER": nats.url,
        "NATS_AUTH_TOKEN": nats.token,
        "DYN_EVENT_PLANE": plane,
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }
    words = (sys.executable, str(SIDE), role, f"{namespace}.VllmWorker.generate")
    process = await asyncio.create_subprocess_exec(*words, env=env, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        await process.communicate()


async def line(output: asyncio.StreamReader) -> str:
    async with asyncio.timeout(WITHIN_S):
        return (await output.readline()).decode().strip()


async def test_dynamos_subscriber_hears_our_workers(
    namespace: str, etcd_server: RealEtcd, nats_server: RealNats
) -> None:
    nats = await connect_nats(nats_server.url, nats_server.access, name="worker")
    async with dynamos("listen", namespace, "nats", etcd_server, nats_server) as output:
        assert await line(output) == "listening"
        told = PassEvents(nats, namespace, "VllmWorker", lambda: WORKER)
        told.start()

        async def publish() -> None:
            for number in range(1, 10_000):  # it hears what comes after it has subscribed
                told.publish(passed(number, worker=""))
                await asyncio.sleep(0.05)

        publishing = asyncio.create_task(publish())
        worker, number, tokens = (await line(output)).split()
        assert (worker, tokens) == (WORKER, "512")
        assert (await line(output)).split()[1] == str(int(number) + 1)
        publishing.cancel()
        await asyncio.wait({publishing})
        await told.close()
    await close_quietly(nats)


@pytest.mark.parametrize("plane", ["nats", "zmq"])
async def test_we_hear_dynamos_publisher(
    plane: str, namespace: str, etcd_server: RealEtcd, nats_server: RealNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_EVERY_S", 0.1)
    nats = await connect_nats(nats_server.url, nats_server.access, name="runner")
    kv = await EtcdStore.connect(etcd_server.endpoint)
    recorder = PassRecorder()
    async with dynamos("publish", namespace, plane, etcd_server, nats_server) as output:
        worker_id = int(await line(output))
        passes = ForwardPasses(nats, kv, recorder, namespace, "VllmWorker", worker_id)
        await passes.start()
        following = asyncio.create_task(passes.follow_zmq())
        await auntil(lambda: len(recorder.since({}, 64)) > 5, WITHIN_S, what=lambda: kv)
        following.cancel()
        await asyncio.wait({following})
    last = recorder.since({}, 64)[-1]
    assert last.engine.worker_id == str(worker_id)
    assert last.wall_time_s == 0.01
    assert last.scheduled == Requests(
        num_prefill_requests=1,
        sum_prefill_tokens=512,
        sum_prefill_kv_tokens=64,
        num_decode_requests=3,
        sum_decode_kv_tokens=4500,
    )
    assert last.queued == Requests(num_prefill_requests=2, sum_prefill_tokens=700)
    assert recorder.missed == {}
    await kv.close()
    await close_quietly(nats)

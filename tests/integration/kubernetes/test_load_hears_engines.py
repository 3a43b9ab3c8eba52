"""A planner's process on a real API server, by the engines' passes: over NATS, or over the workers' own sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.nats import connect_nats
from tests.contract.kubernetes.kube_worlds import real_kube
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import Cluster
from tests.drivers.servers import RealNats
from tests.fakes.kubernetes.graphs import DECODE, PREFILL
from tests.fakes.kubernetes.workers import (
    BLOCK,
    KV_BLOCKS,
    NAMESPACE,
    channel,
    framed,
    sealed,
    told_pass,
    worker_metadata,
)
from tests.integration.kubernetes.real_clusters import real_cluster

__all__ = ["real_kube"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LOAD = {"policy": "load", "max_gpu_budget": 6, "adjustment_interval": 5, "metric_pulling_interval": 1}
HASHED = f"{NAMESPACE}-0a1b2c3d"
"""Where workers of a rolling update are."""
COMPONENTS = {"prefill": PREFILL, "backend": DECODE}
Send = Callable[[str, bytes], Awaitable[object]]
"""A worker of this component publishes an envelope."""


async def registers(here: Cluster, addresses: dict[str, str]) -> None:
    """One worker of each component, with the socket that it has."""
    for component in COMPONENTS:
        where = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
        found = channel(addresses[component], component, namespace=HASHED) if component in addresses else None
        metadata = worker_metadata(component, 7, component, namespace=HASHED, channels=found)
        assert (await here.admin.request("POST", where, metadata)).status == 201


@asynccontextmanager
async def engines(here: Cluster, send: Send) -> AsyncIterator[dict[str, float]]:
    """Each worker that the graph asks for tells a pass twice a second; what is yielded is how full they are."""
    full = {"kv": 0.95, "waits": 9}

    async def one_round(number: int) -> None:
        asked = await here.asked()
        for role, (component, name) in enumerate(COMPONENTS.items()):
            for worker in range(asked.get(name, 0)):
                kv = round(full["kv"] * KV_BLOCKS * BLOCK) if component == "backend" else 0
                waits = int(full["waits"]) if component == "prefill" else 0
                told = told_pass(str(100 * role + worker), 0.0, number=number, kv=kv, running=1, waits=waits)
                await send(component, sealed(told, number))

    async def go_on() -> None:
        for number in itertools.count(1):
            await one_round(number)
            await asyncio.sleep(0.5)

    going = asyncio.ensure_future(go_on())
    try:
        yield full
    finally:
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)


async def follows(here: Cluster, send: Send, **env: str) -> None:
    async with engines(here, send) as full, here.planner(LOAD, **env):
        await here.until_asked(3, 3)
        full |= {"kv": 0.01, "waits": 0}
        await here.until_asked(1, 1, 400)
        assert here.operator.peak <= LOAD["max_gpu_budget"]


async def test_the_policy_load_hears_the_engines_over_nats(
    real_kube: RealKube, own_nats: RealNats, tmp_path: Path
) -> None:
    nats = await connect_nats(own_nats.url, own_nats.access)

    async def send(component: str, message: bytes) -> None:
        await nats.publish(event_plane.subject(HASHED, component), message)

    try:
        async with real_cluster(real_kube, tmp_path) as here:
            await registers(here, {})
            await follows(here, send, **own_nats.env)
    finally:
        await nats.close()


async def test_the_policy_load_hears_the_engines_over_their_sockets(real_kube: RealKube, tmp_path: Path) -> None:
    """ZeroMQ is the default of Dynamo's event plane: there is no NATS at all."""
    context = zmq.asyncio.Context()
    sockets, addresses = dict[str, zmq.asyncio.Socket](), dict[str, str]()
    for component in COMPONENTS:
        socket = sockets[component] = context.socket(zmq.PUB)
        addresses[component] = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def send(component: str, message: bytes) -> None:
        await sockets[component].send_multipart(framed(message))

    try:
        async with real_cluster(real_kube, tmp_path) as here:
            await registers(here, addresses)
            await follows(here, send)
    finally:
        context.destroy(linger=0)

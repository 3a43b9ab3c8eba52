"""A client of one component of a running graph, as the graph's own processes have one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.core.types import Instance
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.client import NatsEndpointClient, RequestPlane
from tests.drivers.served import Served


class Snapshot:
    """A view of the instances that hears no news (`client.View`)."""

    stale = False

    def __init__(self, instances: tuple[Instance, ...]) -> None:
        self._instances = instances

    def instances(self) -> tuple[Instance, ...]:
        return self._instances

    async def changed(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


def without_news(plane: RequestPlane, client: NatsEndpointClient, component: str, endpoint: str) -> NatsEndpointClient:
    """A caller that sees what that client of the endpoint sees now, whatever comes."""
    return NatsEndpointClient(plane.sender, Snapshot(client.instances()), component, endpoint)


@asynccontextmanager
async def endpoint_client(served: Served, component: str, endpoint: str) -> AsyncIterator[NatsEndpointClient]:
    async with request_plane(served) as (plane, kv):
        yield await plane.client(kv, served.namespace, component, endpoint)


@asynccontextmanager
async def request_plane(served: Served) -> AsyncIterator[tuple[RequestPlane, EtcdStore]]:
    env = served.environment()
    kv = await served.etcd()
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env))
    plane = RequestPlane(nats)
    try:
        await plane.start()
        yield plane, kv
    finally:
        await plane.close()
        await close_quietly(nats)
        await kv.close()

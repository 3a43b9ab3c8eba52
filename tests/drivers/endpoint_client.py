"""A client of one component of a running graph, as the graph's own processes have one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.infra.access import NatsAccess
from dynamo_local.runtime.nats import close_quietly, connect_nats
from dynamo_local.runtime.requests import RequestPlane
from dynamo_local.runtime.requests.client import NatsEndpointClient
from tests.drivers.served import Served


@asynccontextmanager
async def endpoint_client(served: Served, component: str, endpoint: str) -> AsyncIterator[NatsEndpointClient]:
    """It follows etcd from the first list on."""
    env = served.environment()
    kv = await served.etcd()
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env))
    plane = RequestPlane(nats)
    try:
        await plane.start()
        yield await plane.client(kv, served.namespace, component, endpoint)
    finally:
        await plane.close()
        await close_quietly(nats)
        await kv.close()

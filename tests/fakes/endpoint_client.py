"""A client of one component of a running graph, as the graph's own processes have one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_local.runtime.etcd import EtcdStore
from dynamo_local.runtime.nats import close_quietly, connect_nats
from dynamo_local.runtime.requests import RequestPlane
from dynamo_local.runtime.requests.client import NatsEndpointClient
from tests.fakes.served import Served


@asynccontextmanager
async def endpoint_client(served: Served, component: str, endpoint: str) -> AsyncIterator[NatsEndpointClient]:
    """It follows etcd from the first list on."""
    facts = served.statefile()
    kv = await EtcdStore.connect(facts["etcd_endpoints"])
    nats = await connect_nats(facts["nats_server"], served.paths.runtime / "nats" / "token")
    plane = RequestPlane(nats)
    try:
        await plane.start()
        yield await plane.client(kv, served.namespace, component, endpoint)
    finally:
        await plane.close()
        await close_quietly(nats)
        await kv.close()

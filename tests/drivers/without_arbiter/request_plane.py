"""Endpoint servers and a client over a real NATS, with a registry that a test changes by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nats.aio.client import Client

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Instance
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.calls import RequestSender
from dynamo_local.transport.requests.client import NatsEndpointClient
from dynamo_local.transport.requests.handlers import Handler, RequestContext
from dynamo_local.transport.requests.server import EndpointServer
from tests.drivers.servers import RealNats


class HandView:
    """An instance view without etcd: the test says who is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, Instance] = {}
        self.stale = False
        self._changed = asyncio.Event()

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self.registered[i] for i in sorted(self.registered))

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def announce(self) -> None:
        self._changed.set()

    async def close(self) -> None:
        """Nothing to end."""


class Bench:
    """One caller and any number of servers in this process, each with a NATS connection of its own."""

    def __init__(self, nats: RealNats, namespace: str) -> None:
        self.namespace = namespace
        self.view = HandView()
        self.servers: dict[int, EndpointServer] = {}
        self.connections: list[Client] = []
        self._nats = nats

    async def connect(self) -> Client:
        connection = await connect_nats(self._nats.url, self._nats.access, name="test")
        self.connections.append(connection)
        return connection

    async def start(self, accept_timeout_s: float = 5.0) -> None:
        self.dispatcher = RequestSender(await self.connect(), AsyncioClock(), accept_timeout_s)
        await self.dispatcher.start()
        self.client = NatsEndpointClient(self.dispatcher, self.view, "Worker", "generate")

    def subject(self, instance_id: int) -> str:
        return f"{self.namespace}_worker.generate-{instance_id:x}"

    async def serve(self, handler: Handler, instance_id: int = 1, **options: Any) -> EndpointServer:
        server = EndpointServer(await self.connect(), subject=self.subject(instance_id), handler=handler, **options)
        await server.start()
        self.servers[instance_id] = server
        self.register(instance_id)
        return server

    def register(self, instance_id: int) -> None:
        self.view.registered[instance_id] = Instance(
            self.namespace, "Worker", "generate", instance_id, self.subject(instance_id)
        )
        self.view.announce()

    def deregister(self, instance_id: int) -> None:
        del self.view.registered[instance_id]

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()
        await self.dispatcher.close()
        for connection in self.connections:
            await close_quietly(connection)


@contextlib.asynccontextmanager
async def request_bench(nats: RealNats, namespace: str, accept_timeout_s: float = 5.0) -> AsyncIterator[Bench]:
    """A started `Bench`. Afterwards no exchange, connection or offer may be left."""
    bench = Bench(nats, namespace)
    await bench.start(accept_timeout_s)
    try:
        yield bench
    finally:
        await bench.close()
    assert bench.dispatcher.listener.open_connections == 0
    assert [server.in_flight for server in bench.servers.values() if server.in_flight] == []


async def count(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    for n in range(payload):
        yield n


async def forever(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
    """One item, and then nothing."""
    yield "first"
    await asyncio.Event().wait()


def forever_until(ended: asyncio.Event) -> Handler:
    """As `forever`; sets `ended` when it is cancelled."""

    async def guarded(payload: Any, context: RequestContext) -> AsyncIterator[Any]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    return guarded


async def asked(bench: Bench, payload: Any = 2, **options: Any) -> list[Any]:
    return [item async for item in await bench.client.call(payload, **options)]

"""The two parties of the `EndpointClient` contract: the fake of the component tests, and the real one over NATS."""

from __future__ import annotations

from dynamo_local import errors
from dynamo_local.runtime.requests.handlers import Handler
from tests.drivers.without_arbiter.request_plane import Bench
from tests.fakes.data_plane.endpoints import FakeEndpointClient


class FakeWorld:
    """The fake client, and how a test makes it serve."""

    def __init__(self) -> None:
        self.client = FakeEndpointClient()

    async def serve(self, handler: Handler, instance_id: int = 1) -> None:
        self.client.add_instance(instance_id, handler)

    async def stop_accepting(self, instance_id: int) -> None:
        self.client.refuse(instance_id, errors.WorkerDraining("leaving"))

    async def lose(self, instance_id: int) -> None:
        self.client.lose(instance_id)

    async def close(self) -> None:
        await self.client.close()


class NatsWorld:
    """The real client with servers over NATS."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.client = bench.client

    async def serve(self, handler: Handler, instance_id: int = 1) -> None:
        await self.bench.serve(handler, instance_id)

    async def stop_accepting(self, instance_id: int) -> None:
        self.bench.servers[instance_id].stop_accepting(linger_s=0)

    async def lose(self, instance_id: int) -> None:
        self.bench.deregister(instance_id)
        await self.bench.servers[instance_id].close()


World = FakeWorld | NatsWorld

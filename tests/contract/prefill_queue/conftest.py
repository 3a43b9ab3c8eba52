"""A prefill queue in memory, and one on a real JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue
from tests.contract.prefill_queue.queue_worlds import ACK_WAIT_S, MAX_DELIVER, MakeQueue
from tests.drivers.servers import RealNats
from tests.fakes.infra.prefill_queue import FakePrefillQueue, FakeQueueServer


@pytest.fixture(params=["fake", pytest.param("jetstream", marks=pytest.mark.infra)])
def server(request: pytest.FixtureRequest) -> RealNats | None:
    """None for the fake. Not async: the server's own fixture runs an event loop."""
    return None if request.param == "fake" else request.getfixturevalue("nats_server")


@pytest.fixture
async def connection(server: RealNats | None) -> AsyncIterator[Client | None]:
    """That all of a test's queues share; None for the fake."""
    nats = None if server is None else await connect_nats(server.url, server.access, name="test")
    yield nats
    if nats is not None:
        await close_quietly(nats)


@pytest.fixture
async def make(connection: Client | None, namespace: str) -> AsyncIterator[MakeQueue]:
    """`make(run_id="a")` is one more client of this test's queue."""
    if connection is None:
        fake_server = FakeQueueServer()

        def make_fake(run_id: str = "a", **options: object) -> FakePrefillQueue:
            options = {"ack_wait_s": ACK_WAIT_S, "max_deliver": MAX_DELIVER, **options}
            return FakePrefillQueue(fake_server, run_id, **options)  # type: ignore[arg-type]

        yield make_fake
        return

    queues = []

    def make_real(run_id: str = "a", **options: object) -> JetStreamPrefillQueue:
        options = {"ack_wait_s": ACK_WAIT_S, "max_deliver": MAX_DELIVER, **options}
        queues.append(JetStreamPrefillQueue(connection, namespace, run_id, **options))  # type: ignore[arg-type]
        return queues[-1]

    yield make_real
    for queue in queues:
        await queue.close()

"""Planner's side and environment's side of the virtual connector on a real etcd, each as in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.virtual import Layout, PlannerDecision
from dynamo_local.planner.connectors import Refused, VirtualConnector, VirtualKeys, Written
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.virtual import VirtualConnectorClient
from tests.drivers.servers import RealEtcd

pytestmark = pytest.mark.infra

P, D = "PrefillWorker", "VllmWorker"
SOON_S = 10.0


@asynccontextmanager
async def connected(endpoint: str, namespace: str, layout: Layout, **options: bool) -> AsyncIterator[VirtualConnector]:
    store = await EtcdStore.connect(endpoint)
    connector = VirtualConnector(
        VirtualKeys(store, namespace, layout),
        AsyncioClock(),
        prefill=P,
        decode=D,
        counts=lambda: {P: 1, D: 1},
        **options,
    )
    await connector.start()
    try:
        yield connector
    finally:
        await connector.close()
        await store.close()


async def soon(condition: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("layout", list(Layout))
async def test_decisions_reach_the_environment_and_its_word_comes_back(
    etcd_server: RealEtcd, namespace: str, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = etcd_server.endpoint
    async with (
        connected(endpoint, namespace, layout) as planner,
        VirtualConnectorClient(namespace, endpoint, layout=layout) as environment,
    ):
        assert await environment.get() == PlannerDecision(-1, -1, -1)
        for number, decode in enumerate((3, 1)):
            assert await planner.set_component_replicas({P: 1, D: decode}) == Written(number)
            assert isinstance(await planner.set_component_replicas({P: 1, D: 7}), Refused)
            assert await environment.wait(SOON_S)
            decision = await environment.get()
            assert decision == PlannerDecision(1, decode, number)
            await environment.complete(decision)
            await soon(lambda: not planner.pending())
        with caplog.at_level(logging.INFO):
            assert await planner.set_component_replicas({P: 1, D: 1}) == Written(None)
    assert "No scaling needed (prefill=1, decode=1), skipping ETCD update" in caplog.messages

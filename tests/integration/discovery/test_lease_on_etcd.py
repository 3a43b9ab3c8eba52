"""The lease keeper on a real etcd: revokes, kills, restarts, losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_local.errors import EtcdUnavailable
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.lease import LeaseKeeper
from tests.drivers.eventually import eventually
from tests.drivers.servers import RealEtcd

pytestmark = pytest.mark.infra

HEALED_S = 5.0


class Fleet:
    """Workers with a keeper each, on one etcd."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.keepers: list[LeaseKeeper] = []
        self.regrants: list[int] = []

    async def add(self, ttl_s: int = 10) -> LeaseKeeper:
        keeper = LeaseKeeper(self.store, ttl_s=ttl_s, is_draining=self.is_draining, on_regrant=self.on_regrant)
        self.keepers.append(keeper)
        await keeper.start()
        name = f"{self.prefix}/{len(self.keepers)}"
        for endpoint in ("generate", "load_metrics"):
            await keeper.register(lambda lease, e=endpoint: f"{name}/{e}:{lease:x}", lambda lease: b"{}")
        return keeper

    async def is_draining(self) -> bool:
        return False

    async def on_regrant(self, lease_id: int) -> None:
        self.regrants.append(lease_id)

    async def registered(self) -> set[int]:
        """Lease ids of the keys that are there; empty while etcd does not answer."""
        try:
            kvs, _ = await self.store.get_prefix(self.prefix)
        except EtcdUnavailable:
            return set()
        return {kv.lease_id for kv in kvs}

    async def healed(self) -> None:
        """Every worker that was not revoked is registered, and nobody else."""
        async with asyncio.timeout(HEALED_S):
            while await self.registered() != {k.lease_id for k in self.keepers if not k.revoked.is_set()}:
                await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(etcd_server: RealEtcd, namespace: str) -> AsyncIterator[Fleet]:
    store = await EtcdStore.connect(etcd_server.endpoint)
    found = Fleet(store, namespace)
    yield found
    for keeper in found.keepers:
        await keeper.close()
    assert await found.registered() == set()
    await store.close()


@pytest.fixture
async def own_fleet(own_etcd: RealEtcd) -> AsyncIterator[Fleet]:
    store = await EtcdStore.connect(own_etcd.endpoint)
    found = Fleet(store, "dynamo")
    yield found
    for keeper in found.keepers:
        await keeper.close()
    await store.close()


@pytest.mark.alone
@pytest.mark.timing
async def test_a_revoke_is_noticed_within_milliseconds(fleet: Fleet) -> None:
    loop = asyncio.get_running_loop()
    took_s = []
    for _ in range(9):
        keeper = await fleet.add()
        # A watch whose start another write overtook is synced by etcd in a loop of 100 ms; a worker has run longer.
        await asyncio.sleep(0.15)
        began_s = loop.time()
        await fleet.store.revoke(keeper.lease_id)
        await asyncio.wait_for(keeper.revoked.wait(), HEALED_S)
        took_s.append(loop.time() - began_s)
    assert sorted(took_s)[4] < 0.05
    assert await fleet.registered() == set()
    assert fleet.regrants == []


async def test_a_restart_that_keeps_data_keeps_the_lease(own_fleet: Fleet, own_etcd: RealEtcd) -> None:
    first = {(await own_fleet.add()).lease_id for _ in range(3)}
    await own_etcd.restart()
    await own_fleet.healed()
    await asyncio.sleep(0.3)  # the time in which a wrong conclusion would show
    assert await own_fleet.registered() == first
    assert own_fleet.regrants == []


async def test_all_workers_come_back_after_etcd_lost_its_data(own_fleet: Fleet, own_etcd: RealEtcd) -> None:
    first = {(await own_fleet.add()).lease_id for _ in range(8)}
    await own_etcd.restart(lose_data=True)
    await eventually(lambda: len(set(own_fleet.regrants)) >= 8)
    await own_fleet.healed()
    assert not [keeper for keeper in own_fleet.keepers if keeper.revoked.is_set()]
    assert not await own_fleet.registered() & first


async def test_an_outage_longer_than_the_ttl_heals(own_fleet: Fleet, own_etcd: RealEtcd) -> None:
    keeper = await own_fleet.add(ttl_s=1)
    await own_etcd.kill()
    await asyncio.sleep(1.5)
    await own_etcd.start()
    await own_fleet.healed()
    assert not keeper.revoked.is_set()


async def test_an_etcd_that_is_silent_does_not_stop_the_keeper(own_fleet: Fleet, own_etcd: RealEtcd) -> None:
    keeper = await own_fleet.add(ttl_s=1)
    own_etcd.pause()
    await asyncio.sleep(1.5)
    own_etcd.resume()
    await own_fleet.healed()
    assert not keeper.revoked.is_set()

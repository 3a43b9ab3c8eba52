"""The real etcd and NATS servers, run from our specs."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.errors import EtcdUnavailable, NatsUnavailable
from dynamo_local.system.host_leases import PortLease
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.probes import probe_etcd, probe_nats
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra


async def test_probe_etcd_returns_the_endpoint_that_answers(etcd_server: RealEtcd) -> None:
    with PortLease() as nobody:
        endpoints = f"http://127.0.0.1:{nobody.port},{etcd_server.endpoint}"
        assert await probe_etcd(endpoints, 5.0) == etcd_server.endpoint


async def test_probe_etcd_waits_for_a_server_that_is_starting(own_etcd: RealEtcd) -> None:
    await own_etcd.kill()
    probe = asyncio.create_task(probe_etcd(own_etcd.endpoint, 10.0))
    await asyncio.sleep(0)
    own_etcd.spawn()
    assert await probe == own_etcd.endpoint


async def test_probe_of_nobody_ends_at_its_deadline_and_names_the_address() -> None:
    with PortLease() as nobody:
        with pytest.raises(EtcdUnavailable, match=rf"0.1 s at http://127.0.0.1:{nobody.port} .*refused"):
            await probe_etcd(f"http://127.0.0.1:{nobody.port}", 0.1)
        with pytest.raises(NatsUnavailable, match=rf"0.1 s at nats://127.0.0.1:{nobody.port} .*refused"):
            await probe_nats(f"nats://user:secret@127.0.0.1:{nobody.port}", NatsAccess(), 0.1)


async def test_probe_of_a_stopped_process_ends_at_its_deadline(own_etcd: RealEtcd, own_nats: RealNats) -> None:
    own_etcd.pause()
    own_nats.pause()
    with pytest.raises(EtcdUnavailable, match="silent"):
        await probe_etcd(own_etcd.endpoint, 0.1)
    with pytest.raises(NatsUnavailable, match="silent"):
        await probe_nats(own_nats.url, own_nats.access, 0.1)


async def test_nats_demands_the_token(nats_server: RealNats) -> None:
    await probe_nats(nats_server.url, nats_server.access, 5.0)
    host = nats_server.url.removeprefix("nats://")
    await probe_nats(f"nats://{nats_server.token}@{host}", NatsAccess(), 5.0)
    for token in (None, "a-wrong-token-entirely"):
        with pytest.raises(NatsUnavailable, match="refused our credentials") as caught:
            await asyncio.wait_for(probe_nats(nats_server.url, NatsAccess(token), 60.0), 5.0)
        assert "wrong-token" not in str(caught.value)

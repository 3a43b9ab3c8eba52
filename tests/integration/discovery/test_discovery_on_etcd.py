"""The live view of the registry on a real etcd, and the registry's format as etcdctl shows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from dynamo_local.core.types import Instance
from dynamo_local.errors import EtcdUnavailable, NoWorkers
from dynamo_local.transport.discovery import InstanceView, instance_to_value, key_of, make_instance
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.requests.calls import RequestSender
from dynamo_local.transport.requests.client import NatsEndpointClient
from tests.drivers.servers import RealEtcd

pytestmark = pytest.mark.infra

DEADLINE_S = 5.0
SEEN_S = 0.05
"""From the write in etcd until other processes use a new worker, or avoid one that deregistered."""


async def put(store: EtcdStore, namespace: str, endpoint: str = "generate") -> Instance:
    lease_id = await store.grant(60)
    instance = make_instance(namespace, "VllmWorker", endpoint, lease_id)
    await store.put(key_of(instance), instance_to_value(instance), lease_id)
    return instance


async def until_it_is(view: InstanceView, *expected: Instance, deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while view.instances() != expected:
            await view.changed()


def client_of(view: InstanceView) -> NatsEndpointClient:
    """A client that only waits for workers."""
    return NatsEndpointClient(cast(RequestSender, None), view, view.component, view.endpoint)


@pytest.fixture
async def store(etcd_server: RealEtcd) -> AsyncIterator[EtcdStore]:
    found = await EtcdStore.connect(etcd_server.endpoint)
    yield found
    await found.close()


@pytest.fixture
async def view(etcd_server: RealEtcd, namespace: str) -> AsyncIterator[InstanceView]:
    """A view through a connection of its own, as in another process."""
    store = await EtcdStore.connect(etcd_server.endpoint)
    found = InstanceView(store, namespace, "VllmWorker", "generate")
    await found.start(DEADLINE_S)
    yield found
    await found.close()
    await store.close()


@pytest.fixture
async def own(own_etcd: RealEtcd) -> AsyncIterator[tuple[EtcdStore, InstanceView]]:
    """A store, and a view through it, on an etcd that may be killed."""
    store = await EtcdStore.connect(own_etcd.endpoint, timeout_s=1.0)
    view = InstanceView(store, "dynamo", "VllmWorker", "generate")
    await view.start(DEADLINE_S)
    yield store, view
    await view.close()
    await store.close()


Own = tuple[EtcdStore, InstanceView]


@pytest.mark.alone
@pytest.mark.timing
async def test_workers_are_seen_and_avoided_within_50_ms(view: InstanceView, store: EtcdStore, namespace: str) -> None:
    loop = asyncio.get_running_loop()
    came_s, went_s = [], []
    for _ in range(10):
        instance = await put(store, namespace)
        began_s = loop.time()
        await until_it_is(view, instance)
        came_s.append(loop.time() - began_s)
        began_s = loop.time()
        await store.revoke(instance.lease_id)
        await until_it_is(view)
        went_s.append(loop.time() - began_s)
    assert sorted(came_s)[5] < SEEN_S
    assert sorted(went_s)[5] < SEEN_S


async def test_a_view_lists_who_was_there_before_it(store: EtcdStore, namespace: str) -> None:
    await put(store, namespace, "generate2")
    await put(store, namespace, "load_metrics")
    there = sorted([await put(store, namespace) for _ in range(3)], key=lambda instance: instance.lease_id)
    view = InstanceView(store, namespace, "VllmWorker", "generate")
    await view.start(DEADLINE_S)
    assert view.instances() == tuple(there)
    assert view.stale is False
    await view.close()


async def test_waiting_for_an_instance(view: InstanceView, store: EtcdStore, namespace: str) -> None:
    with pytest.raises(NoWorkers, match=r"no VllmWorker serves 'generate' \(waited 0.05 s\)"):
        await client_of(view).wait_for_instances(0.05)
    waiting = asyncio.create_task(client_of(view).wait_for_instances(DEADLINE_S))
    instance = await put(store, namespace)
    assert await waiting == (instance,)


async def test_a_broken_value_is_logged_once_and_skipped(
    view: InstanceView, store: EtcdStore, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    key = f"{namespace}/components/VllmWorker/generate:1"
    await store.put(key, b"nonsense")
    await store.put(key, b"nonsense")
    instance = await put(store, namespace)
    await until_it_is(view, instance)
    assert [record.message.count(key) for record in caplog.records] == [1]


async def test_the_last_known_view_stays_while_etcd_is_away(own: Own, own_etcd: RealEtcd) -> None:
    store, view = own
    instance = await put(store, "dynamo")
    await until_it_is(view, instance)
    await own_etcd.kill()
    async with asyncio.timeout(DEADLINE_S):
        while not view.stale:
            await view.changed()
    assert view.instances() == (instance,)
    await own_etcd.start()
    await until_current(view)
    assert view.instances() == (instance,)
    second = await put(store, "dynamo")
    await until_it_is(view, *sorted((instance, second), key=lambda one: one.lease_id))


async def test_a_view_heals_after_etcd_lost_its_data(own: Own, own_etcd: RealEtcd) -> None:
    store, view = own
    await until_it_is(view, await put(store, "dynamo"))
    await own_etcd.restart(lose_data=True)
    await until_it_is(view)
    await until_current(view)
    instance = await put(store, "dynamo")
    await until_it_is(view, instance)


async def test_an_etcd_that_lost_its_data_is_given_time_to_be_filled_again(own: Own, own_etcd: RealEtcd) -> None:
    store, view = own
    await until_it_is(view, await put(store, "dynamo"))
    seen: list[int] = []

    async def note() -> None:
        while True:
            seen.append(len(view.instances()))
            await view.changed()

    noting = asyncio.create_task(note())
    await own_etcd.restart(lose_data=True)
    await until_it_answers(store)
    again = await put(store, "dynamo")
    await until_it_is(view, again)
    noting.cancel()
    assert 0 not in seen


async def test_a_view_may_start_before_etcd(tmp_path: Path) -> None:
    server = RealEtcd(tmp_path)
    store = EtcdStore(server.endpoint)
    view = InstanceView(store, "dynamo", "VllmWorker", "generate")
    try:
        await view.start(timeout_s=0.1)
        assert (view.instances(), view.stale) == ((), True)
        with pytest.raises(NoWorkers, match="etcd does not answer"):
            await client_of(view).wait_for_instances(0.05)
        await server.start()
        await until_current(view)
        instance = await put(store, "dynamo")
        await until_it_is(view, instance)
    finally:
        await view.close()
        await store.close()
        server.stop_now()


async def until_it_answers(store: EtcdStore) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await store.get("x")
            except EtcdUnavailable:
                await asyncio.sleep(0.02)
            else:
                return


async def until_current(view: InstanceView) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while view.stale:
            await view.changed()


async def test_a_watch_whose_etcd_falls_silent_is_found_out(own: Own, own_etcd: RealEtcd) -> None:
    """SIGSTOP breaks no connection, so only the heartbeat can notice it."""
    store, view = own
    own_etcd.pause()
    async with asyncio.timeout(DEADLINE_S):
        while not view.stale:
            await view.changed()
    own_etcd.resume()
    await until_current(view)
    instance = await put(store, "dynamo")
    await until_it_is(view, instance)


async def test_a_quiet_watch_stays_alive(view: InstanceView, store: EtcdStore, namespace: str) -> None:
    await asyncio.sleep(3.5)
    assert view.stale is False
    instance = await put(store, namespace)
    await until_it_is(view, instance, deadline_s=0.5)


async def test_another_endpoint_takes_over(tmp_path: Path, etcd_server: RealEtcd, namespace: str) -> None:
    other = RealEtcd(tmp_path)
    await other.start()
    store = await EtcdStore.connect(f"{other.endpoint},{etcd_server.endpoint}")
    try:
        await store.put(f"{namespace}/before", b"")
        await other.kill()
        await store.put(f"{namespace}/after", b"")
        kvs, _ = await store.get_prefix(f"{namespace}/")
        assert [kv.key for kv in kvs] == [f"{namespace}/after"]
    finally:
        await store.close()
        other.stop_now()


@pytest.mark.timing
async def test_a_silent_etcd_fails_calls_at_their_deadline(own_etcd: RealEtcd) -> None:
    store = await EtcdStore.connect(own_etcd.endpoint, timeout_s=0.3)
    own_etcd.pause()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(EtcdUnavailable):
        await store.get("x")
    assert loop.time() - began_s < 1.0
    with pytest.raises(EtcdUnavailable):
        await EtcdStore.connect(own_etcd.endpoint, timeout_s=0.3)
    await store.close()


@pytest.mark.timing
async def test_calls_recover_within_a_second_of_etcds_return(own_etcd: RealEtcd) -> None:
    """gRPC's back-off is capped: after ten seconds away the default waits for many more."""
    store = await EtcdStore.connect(own_etcd.endpoint)
    await own_etcd.kill()
    loop = asyncio.get_running_loop()
    away_until_s = loop.time() + 3.0
    while loop.time() < away_until_s:
        with pytest.raises(EtcdUnavailable):
            await store.get("x")
        await asyncio.sleep(0.1)
    await own_etcd.start()
    back_s = loop.time()
    await until_it_answers(store)
    assert loop.time() - back_s < 1.0
    await store.close()

"""Which instance and lease are a worker's, what its metrics say, and how it is taken out of routing and put back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.components.commands import dynamo_1x
from dynamo_local.components.commands import probe as probing
from dynamo_local.components.commands.dynamo_1x import (
    Registered,
    WorkerDriver,
    frontend_sample,
    own_instance,
    worker_sample,
)
from dynamo_local.components.commands.launch import Launch
from dynamo_local.components.commands.runner import ChildSilent
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError, EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import KeyValue
from tests.fakes.infra.etcd import FakeEtcd

LEASE = 0x694D967DA694EA1A
PORT = 28_111
KEY = f"v1/instances/dynamo/backend/generate/{LEASE:x}"

METRICS = """\
# TYPE dynamo_component_inflight_requests gauge
dynamo_component_inflight_requests{dynamo_endpoint="generate",worker_id="%s"} 3
dynamo_component_inflight_requests{dynamo_endpoint="clear_kv_blocks",worker_id="%s"} 9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 1
""".replace("%s", f"{LEASE:x}")


def instance(
    lease: int = LEASE, port: int = PORT, *, endpoint: str = "generate", value: bytes | None = None
) -> KeyValue:
    """A key as a worker of Dynamo registers it."""
    about = {"type": "Endpoint", "instance_id": lease, "transport": {"tcp": f"127.0.0.1:{port}/{lease:x}/generate"}}
    return KeyValue(f"v1/instances/dynamo/backend/{endpoint}/{lease:x}", value or json.dumps(about).encode(), lease)


def test_the_instance_that_listens_on_our_port_is_ours() -> None:
    others = [instance(LEASE + 1, PORT + 1), instance(LEASE, PORT, endpoint="clear_kv_blocks"), instance()]
    assert own_instance(others, PORT, f"{LEASE:x}") == Registered(KEY, LEASE)
    assert own_instance(others, PORT, None) == Registered(KEY, LEASE)


def test_no_instance_yet_is_no_error() -> None:
    assert own_instance([], PORT, None) is None
    assert own_instance([instance(port=PORT + 1)], PORT, f"{LEASE:x}") is None


@pytest.mark.parametrize(
    "value",
    [
        b"no json",
        b"[]",
        b"{}",
        b'{"transport": {"nats_tcp": "x"}}',
        b'{"transport": {"tcp": 7}}',
        b'{"transport": {"tcp": "x"}}',
    ],
)
def test_what_strangers_wrote_into_the_registry_is_passed_over(value: bytes) -> None:
    assert own_instance([instance(value=value), instance()], PORT, None) == Registered(KEY, LEASE)


def test_a_port_that_two_workers_share_is_refused() -> None:
    """What we did to that lease would hit a stranger."""
    with pytest.raises(ConfigError, match="two workers share a port"):
        own_instance([instance()], PORT, f"{LEASE + 5:x}")


def test_only_requests_of_the_generate_endpoint_hold_a_drain_up() -> None:
    sample = worker_sample(METRICS)
    assert sample.in_flight == 3
    assert (sample.load.request_active_slots, sample.load.num_requests_waiting) == (2, 1)
    assert sample.load.gpu_cache_usage_perc == 0.25


@pytest.mark.parametrize("text", ["", "vllm:kv_cache_usage_perc 0.1\n"])
def test_metrics_that_do_not_say_what_is_in_flight_are_not_taken_for_zero(text: str) -> None:
    with pytest.raises(ChildSilent, match="inflight"):
        worker_sample(text)


def test_metrics_that_cannot_be_read_are_silence() -> None:
    with pytest.raises(ChildSilent, match="cannot be read"):
        worker_sample("<html>no metrics</html>\n")


def test_prefills_that_wait_are_taken_from_the_event_plane_where_metrics_do_not_say() -> None:
    told = worker_sample(METRICS, queued_prefills=7).load
    silent = METRICS.replace("vllm:num_requests_waiting", "other")
    heard, unknown = worker_sample(silent, queued_prefills=7).load, worker_sample(silent).load
    assert (told.prefills_waiting, heard.prefills_waiting, unknown.prefills_waiting) == (1, 7, None)


def test_a_frontend_counts_what_is_open() -> None:
    text = 'dynamo_frontend_inflight_requests{model="tiny"} 5\ndynamo_frontend_queued_requests{model="tiny"} 2\n'
    sample = frontend_sample(text)
    assert (sample.in_flight, sample.load.request_active_slots, sample.load.num_requests_waiting) == (5, 3, 2)


@pytest.fixture
async def etcd() -> AsyncIterator[FakeEtcd]:
    """With one worker of Dynamo registered under a lease of its own."""
    store = FakeEtcd()
    yield store
    await store.close()


async def registered(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerDriver, int, str]:
    """A driver that has found its worker; the worker's lease and key."""
    lease = await etcd.grant(30)
    kv = instance(lease)
    await etcd.put(kv.key, kv.value, lease)

    async def answers(url: str, timeout_s: float = 1.0) -> tuple[int, str]:
        return 200, METRICS.replace(f"{LEASE:x}", f"{lease:x}")

    async def is_ok(url: str, every_s: float = 0.0) -> None:
        return None

    monkeypatch.setattr(probing, "get", answers)
    monkeypatch.setattr(dynamo_1x, "wait_ok", is_ok)
    child: Any = SimpleNamespace(launch=Launch(("x",), {}, {"rpc": PORT, "system": PORT + 1}))
    context: Any = SimpleNamespace(kv=etcd, nats=None, settings=SimpleNamespace(role=Role.OTHER))
    driver = WorkerDriver(context, child)
    await driver.wait_ready()
    return driver, lease, kv.key


async def test_its_lease_is_told_to_the_arbiter(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, lease, _key = await registered(etcd, monkeypatch)
    assert driver.facts() == {"leases": f"{lease:x}"}
    assert (await driver.sample()).in_flight == 3


async def test_out_and_back_under_the_same_lease(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, lease, key = await registered(etcd, monkeypatch)
    before = await etcd.get(key)
    assert before is not None
    for _ in range(2):
        await driver.take_out()
        await driver.take_out()
        assert await etcd.get(key) is None
        await driver.put_back()
        after = await etcd.get(key)
        assert after is not None
        assert (after.value, after.lease_id) == (before.value, lease)


async def test_a_drain_that_was_broken_off_before_it_began_changes_nothing(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _lease, key = await registered(etcd, monkeypatch)
    await driver.put_back()
    assert await etcd.get(key) is not None


async def test_a_take_out_that_etcd_does_not_answer_can_be_tried_again(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _lease, key = await registered(etcd, monkeypatch)
    etcd.fail_next(1)
    with pytest.raises(EtcdUnavailable):
        await driver.take_out()
    await driver.take_out()
    assert await etcd.get(key) is None


async def test_a_worker_whose_lease_is_gone_cannot_come_back(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, lease, _key = await registered(etcd, monkeypatch)
    await driver.take_out()
    await etcd.revoke(lease)
    with pytest.raises(LeaseNotFound):
        await driver.put_back()


async def test_a_worker_that_is_gone_is_routed_to_no_more(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _lease, key = await registered(etcd, monkeypatch)
    await driver.lost()
    await driver.lost()
    assert await etcd.get(key) is None


async def test_an_instance_that_comes_late_is_waited_for(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, lease, key = await registered(etcd, monkeypatch)
    found = await etcd.get(key)
    assert found is not None
    await etcd.delete(key)
    waiting = asyncio.create_task(driver.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    await etcd.put(key, found.value, lease)
    await asyncio.wait_for(waiting, 5.0)

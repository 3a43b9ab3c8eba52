"""The keys followed and written: on changes, after restarts of etcd, and when answers overtake each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_local.core.virtual import Layout, PlannerDecision
from dynamo_local.errors import EtcdUnavailable
from dynamo_local.planner.connectors import VirtualKeys
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.planner.virtual import ForeignPlanner


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
async def keys(etcd: FakeEtcd) -> AsyncIterator[VirtualKeys]:
    found = VirtualKeys(etcd, "dynamo")
    task = asyncio.ensure_future(found.follow())
    async with asyncio.timeout(5.0):
        await found.until(lambda _: found.current)
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("layout", list(Layout))
async def test_a_decision_and_its_acknowledgement_stand_where_dynamo_looks_without_a_lease(layout: Layout) -> None:
    etcd = FakeEtcd()
    keys = VirtualKeys(etcd, "ns", layout)
    await keys.decide(1, 3, 0)
    await keys.acknowledge(0)
    kvs, _ = await etcd.get_prefix("")
    root = {"v1": "v1/ns/planner/", "v0": "/ns/planner/"}[layout]
    assert {kv.key: (kv.value, kv.lease_id) for kv in kvs} == {
        f"{root}num_prefill_workers": (b"1", 0),
        f"{root}num_decode_workers": (b"3", 0),
        f"{root}decision_id": (b"0", 0),
        f"{root}scaled_decision_id": (b"0", 0),
    }
    by_age = sorted(kvs, key=lambda kv: kv.mod_revision)
    assert [kv.key.rpartition("/")[2] for kv in by_age][2] == "decision_id", "after its numbers"
    assert keys.reported.acknowledged


async def test_none_leaves_a_number_as_it_is(etcd: FakeEtcd) -> None:
    await VirtualKeys(etcd, "dynamo").decide(None, 2, 0)
    assert await etcd.get("v1/dynamo/planner/num_prefill_workers") is None


async def test_what_somebody_writes_is_seen(etcd: FakeEtcd, keys: VirtualKeys) -> None:
    calls = []
    keys.on_change = lambda: calls.append(keys.reported)
    await ForeignPlanner(etcd).decide(prefill=1, decode=3)
    async with asyncio.timeout(5.0):
        told = await keys.until(lambda told: told.decision.decision_id == 0)
    assert told.decision == PlannerDecision(1, 3, 0)
    assert calls[-1] == told


async def test_etcd_going_away_and_coming_back_is_noticed(etcd: FakeEtcd, keys: VirtualKeys) -> None:
    await ForeignPlanner(etcd).decide(decode=2)
    async with asyncio.timeout(5.0):
        await keys.until(lambda told: told.decision.decision_id == 0)
        etcd.available = False
        await keys.until(lambda _: not keys.current)
        assert keys.reported.decision.num_decode_workers == 2
        with pytest.raises(EtcdUnavailable):
            await keys.refresh()
        etcd.available = True
        await keys.until(lambda _: keys.current)
        etcd.restart(lose_data=True)
        await keys.until(lambda told: told.decision == PlannerDecision())


async def test_an_old_list_does_not_take_back_what_was_heard_since(etcd: FakeEtcd, keys: VirtualKeys) -> None:
    planner = ForeignPlanner(etcd)
    await planner.decide(decode=1)
    kvs, revision = await etcd.get_prefix(keys.root)
    await planner.decide(decode=2)
    async with asyncio.timeout(5.0):
        await keys.until(lambda told: told.decision.decision_id == 1)
    etcd.get_prefix = lambda _: _answer((kvs, revision))  # type: ignore[method-assign]
    assert (await keys.refresh()).decision == PlannerDecision(-1, 2, 1)


async def test_a_list_drops_what_is_gone(etcd: FakeEtcd) -> None:
    keys = VirtualKeys(etcd, "dynamo")
    await keys.decide(1, 3, 0)
    await etcd.delete("v1/dynamo/planner/decision_id")
    assert (await keys.refresh()).decision == PlannerDecision(1, 3, -1)


async def _answer(value: tuple[list, int]) -> tuple[list, int]:
    return value

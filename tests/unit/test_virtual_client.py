"""The client for environments of others: wait, get, complete; both layouts, and when etcd or a planner misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import dynamo_local.virtual
from dynamo_local.core.virtual import PlannerDecision
from dynamo_local.errors import BadInput, ConfigError, DecisionUnreadable, EtcdUnavailable
from dynamo_local.virtual import VirtualConnectorClient
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.planner.virtual import ForeignPlanner

SOON_S = 5.0
NEVER_S = 0.05


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
async def client(etcd: FakeEtcd) -> AsyncIterator[VirtualConnectorClient]:
    async with VirtualConnectorClient("dynamo", kv=etcd) as client:
        yield client


@pytest.mark.parametrize("layout", ["v1", "v0"])
async def test_a_decision_is_waited_for_got_and_completed(etcd: FakeEtcd, layout: str) -> None:
    planner = ForeignPlanner(etcd, layout=layout)
    async with VirtualConnectorClient("dynamo", kv=etcd, layout=layout) as client:
        assert await client.get() == PlannerDecision(-1, -1, -1)
        waiting = asyncio.ensure_future(client.wait(SOON_S))
        await planner.decide(prefill=1, decode=3)
        assert await waiting is True
        decision = await client.get()
        assert (decision.num_prefill_workers, decision.num_decode_workers, decision.decision_id) == (1, 3, 0)
        await client.complete(decision)
        assert await planner.get("scaled_decision_id") == 0
        assert await client.wait(NEVER_S) is False


async def test_a_decision_that_stands_already_is_not_waited_past(
    etcd: FakeEtcd, client: VirtualConnectorClient
) -> None:
    """As with Dynamo's own client since 1.6."""
    await ForeignPlanner(etcd).decide(decode=3)
    assert await client.wait(SOON_S)


async def test_what_was_got_and_not_completed_is_not_waited_for_again(
    etcd: FakeEtcd, client: VirtualConnectorClient
) -> None:
    """A loop that cannot carry it out would spin; the next decision is new."""
    planner = ForeignPlanner(etcd)
    await planner.decide(decode=3)
    await client.get()
    assert await client.wait(NEVER_S) is False
    await planner.decide(decode=2)
    assert await client.wait(SOON_S)
    assert (await client.get()).num_decode_workers == 2


async def test_half_a_decision_is_waited_over(
    etcd: FakeEtcd, client: VirtualConnectorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = ForeignPlanner(etcd)
    await planner.decide(prefill=1, decode=3)
    await client.complete(await client.get())
    await planner.put("num_decode_workers", 5)
    assert await client.wait(NEVER_S) is False
    getting = asyncio.ensure_future(client.get())
    await asyncio.sleep(0)
    await planner.decide(decode=5)
    assert await getting == PlannerDecision(1, 5, 1)
    monkeypatch.setattr(dynamo_local.virtual, "HALF_WRITTEN_S", 0.0)
    await planner.put("num_decode_workers", 6)
    with pytest.raises(DecisionUnreadable, match="a number is younger than decision_id 1"):
        await client.get()


async def test_what_is_no_number_is_refused_and_not_waited_for(
    etcd: FakeEtcd, client: VirtualConnectorClient, caplog: pytest.LogCaptureFixture
) -> None:
    planner = ForeignPlanner(etcd)
    await planner.put("num_decode_workers", "many")
    await planner.put("decision_id", 0)
    assert await client.wait(NEVER_S) is False
    with pytest.raises(DecisionUnreadable, match="num_decode_workers is 'many'"):
        await client.get()
    assert len([message for message in caplog.messages if "'many'" in message]) == 1
    await planner.decide(decode=1)
    assert await client.wait(SOON_S)


async def test_there_is_nothing_to_complete_before_the_first_decision(client: VirtualConnectorClient) -> None:
    with pytest.raises(BadInput, match="no decision was made yet"):
        await client.complete(await client.get())


async def test_it_waits_while_etcd_is_away(etcd: FakeEtcd, client: VirtualConnectorClient) -> None:
    planner = ForeignPlanner(etcd)
    await planner.decide(decode=3)
    assert await client.wait(SOON_S)
    etcd.available = False
    with pytest.raises(EtcdUnavailable):
        await client.get()
    assert await client.wait(NEVER_S) is False
    etcd.available = True
    assert await client.wait(SOON_S)


async def test_it_can_be_closed_twice_and_used_without_a_block(etcd: FakeEtcd) -> None:
    client = VirtualConnectorClient("dynamo", kv=etcd)
    await ForeignPlanner(etcd).decide(decode=1)
    assert (await client.get()).num_decode_workers == 1
    await client.close()
    await client.close()


async def test_an_address_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        await VirtualConnectorClient("dynamo", "ftp://etcd:2379").get()
    with pytest.raises(ValueError, match="v2"):
        VirtualConnectorClient("dynamo", layout="v2")

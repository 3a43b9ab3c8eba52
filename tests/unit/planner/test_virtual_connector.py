"""Decisions written for another environment: skipped, refused while one waits, given up at last; and waited for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from dynamo_local.core.virtual import Layout, PlannerDecision
from dynamo_local.errors import EtcdUnavailable
from dynamo_local.planner.connectors import Connector, Refused, VirtualConnector, VirtualKeys, Written
from tests.drivers.served import auntil
from tests.fakes.arbiter.hand_clock import HandClock
from tests.fakes.arbiter.told import Told
from tests.fakes.infra.etcd import FakeEtcd

P, D = "PrefillWorker", "VllmWorker"
SCALED = "v1/dynamo/planner/scaled_decision_id"


class MovedClock(HandClock):
    """One on which somebody may sleep until the test moves it there."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s = 0.0
        self.sleepers = 0
        self._moved = asyncio.Event()

    def move(self, to_s: float) -> None:
        self.at_s = to_s
        self._moved.set()
        self._moved = asyncio.Event()

    async def sleep_until(self, deadline_s: float) -> None:
        self.sleepers += 1
        while self.at_s < deadline_s:
            await self._moved.wait()


class Rig:
    """A connector on an etcd in memory, one worker of each role, and a clock that a test moves."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd()
        self.clock = MovedClock()
        self.told = Told()
        self.connectors: list[VirtualConnector] = []

    async def connected(
        self, *, blocking: bool = False, prefill: str | None = P, layout: str = "v1"
    ) -> VirtualConnector:
        connector = VirtualConnector(
            VirtualKeys(self.etcd, "dynamo", Layout(layout)),
            self.clock,
            prefill=prefill,
            decode=D,
            counts=lambda: {P: 1, D: 1},
            blocking=blocking,
            tell=self.told,
        )
        self.connectors.append(connector)
        await connector.start()
        return connector

    async def values(self, root: str = "v1/dynamo/planner/") -> dict[str, str]:
        kvs, _ = await self.etcd.get_prefix(root)
        return {kv.key.removeprefix(root): kv.value.decode() for kv in kvs}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for connector in rig.connectors:
        await connector.close()


async def test_it_is_a_connector_that_takes_whole_decisions(rig: Rig) -> None:
    connector: Connector = await rig.connected()
    assert connector.whole


async def test_a_decision_is_written_with_the_next_id_from_zero(rig: Rig) -> None:
    connector = await rig.connected()
    assert await connector.set_component_replicas({P: 1, D: 2}) == Written(0)
    assert await rig.values() == {"num_prefill_workers": "1", "num_decode_workers": "2", "decision_id": "0"}
    await rig.etcd.put(SCALED, b"0")
    assert await connector.set_component_replicas({P: 2, D: 2}) == Written(1)
    assert (await rig.values())["decision_id"] == "1"


async def test_an_aggregated_graph_decides_the_decode_number_alone_and_the_old_layout_is_an_option(rig: Rig) -> None:
    connector = await rig.connected(prefill=None, layout="v0")
    assert await connector.set_component_replicas({D: 2}) == Written(0)
    assert await rig.values("/dynamo/planner/") == {"num_decode_workers": "2", "decision_id": "0"}
    assert await rig.values() == {}


async def test_nothing_to_change_writes_nothing_and_says_so_in_dynamos_words(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    connector = await rig.connected()
    await connector.set_component_replicas({P: 1, D: 2})
    before = await rig.etcd.revision()
    with caplog.at_level(logging.INFO):
        assert await connector.set_component_replicas({P: 1, D: 2}) == Written(None)
    assert "No scaling needed (prefill=1, decode=2), skipping ETCD update" in caplog.messages
    assert await rig.etcd.revision() == before


async def test_no_new_decision_while_one_waits(rig: Rig) -> None:
    connector = await rig.connected()
    await connector.set_component_replicas({P: 1, D: 2})
    assert connector.pending()
    refused = await connector.set_component_replicas({P: 1, D: 3})
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retryable) == ("not_acknowledged", True)
    assert refused.reason == "decision 0 is not acknowledged yet (v1/dynamo/planner/scaled_decision_id)"
    assert (await rig.values())["num_decode_workers"] == "2"
    await rig.etcd.put(SCALED, b"0")
    assert await connector.set_component_replicas({P: 1, D: 3}) == Written(1)


async def test_a_later_acknowledgement_is_one_too(rig: Rig) -> None:
    connector = await rig.connected()
    await connector.set_component_replicas({D: 2})
    await rig.etcd.put(SCALED, b"9")
    assert await connector.set_component_replicas({D: 3}) == Written(10), "and nothing is acknowledged in advance"
    assert connector.pending()


async def test_after_half_an_hour_it_is_given_up_and_told_once(rig: Rig) -> None:
    connector = await rig.connected()
    await connector.set_component_replicas({D: 2})
    rig.clock.move(1799.0)
    assert connector.pending()
    rig.clock.move(1800.0)
    assert not connector.pending()
    assert not connector.pending()
    (told,) = rig.told
    assert "decision 0 was not acknowledged within 1800 s" in told
    assert await connector.set_component_replicas({D: 3}) == Written(1)
    assert connector.pending(), "the new one has its own half hour"
    assert rig.told.notes == [told]
    await rig.etcd.put(SCALED, b"1")
    await auntil(lambda: not connector.pending())
    assert rig.told.notes == [], "the environment is there again"


async def test_the_time_to_give_up_can_be_changed(rig: Rig) -> None:
    connector = await rig.connected()
    await connector.set_component_replicas({D: 2})
    connector.change(max_wait_s=5.0, blocking=False)
    rig.clock.move(5.0)
    assert not connector.pending()


async def test_a_decision_of_an_earlier_planner_is_waited_for_and_counted_on_from(rig: Rig) -> None:
    await (await rig.connected()).set_component_replicas({P: 1, D: 2})
    later = await rig.connected()
    assert later.pending()
    await rig.etcd.put(SCALED, b"0")
    assert await later.add_component(D) == Written(1)
    assert (await rig.values())["num_decode_workers"] == "3"


async def test_ids_go_on_where_etcd_lost_them(rig: Rig) -> None:
    """An environment that has acknowledged number 0 would take another number 0 for done."""
    connector = await rig.connected()
    await connector.set_component_replicas({D: 2})
    rig.etcd.restart(lose_data=True)
    assert await connector.set_component_replicas({D: 2}) == Written(1)


async def test_one_more_and_one_less_count_from_what_was_decided_else_from_what_is(rig: Rig) -> None:
    connector = await rig.connected()
    assert await connector.add_component(D) == Written(0)
    assert await rig.values() == {"num_decode_workers": "2", "decision_id": "0"}
    await rig.etcd.put(SCALED, b"0")
    assert await connector.remove_component(P) == Written(1)
    await rig.etcd.put(SCALED, b"1")
    assert await connector.remove_component(P) == Written(None), "never less than none"
    assert (await rig.values())["num_prefill_workers"] == "0"


async def test_while_etcd_is_away_it_is_refused_and_may_be_tried_again(rig: Rig) -> None:
    connector = await rig.connected()
    rig.etcd.available = False
    for refused in (await connector.set_component_replicas({D: 2}), await connector.add_component(D)):
        assert isinstance(refused, Refused)
        assert (refused.code, refused.retryable) == (EtcdUnavailable.code, True)
    rig.etcd.available = True
    assert await connector.set_component_replicas({D: 2}) == Written(0)


async def test_a_decision_that_was_written_half_is_written_again(rig: Rig) -> None:
    connector = await rig.connected()
    put = rig.etcd.put

    async def fails(key: str, value: bytes, lease_id: int = 0) -> int:
        if key.endswith("/decision_id"):
            raise EtcdUnavailable("gone in that moment")
        return await put(key, value, lease_id)

    rig.etcd.put = fails  # type: ignore[method-assign]
    assert isinstance(await connector.set_component_replicas({P: 1, D: 2}), Refused)
    rig.etcd.put = put  # type: ignore[method-assign]
    assert await connector.set_component_replicas({P: 1, D: 2}) == Written(0)
    assert (await rig.values())["decision_id"] == "0"


async def test_blocking_waits_for_the_acknowledgement(rig: Rig) -> None:
    connector = await rig.connected(blocking=True)
    deciding = asyncio.ensure_future(connector.set_component_replicas({D: 2}))
    async with asyncio.timeout(5.0):
        while "decision_id" not in await rig.values():
            await asyncio.sleep(0)
        assert not deciding.done()
        await rig.etcd.put(SCALED, b"0")
        assert await deciding == Written(0, acknowledged=True)


async def test_blocking_ends_when_it_is_given_up(rig: Rig) -> None:
    connector = await rig.connected(blocking=True)
    deciding = asyncio.ensure_future(connector.set_component_replicas({D: 2}))
    async with asyncio.timeout(5.0):
        while not rig.clock.sleepers:
            await asyncio.sleep(0)
        rig.clock.move(1800.0)
        assert await deciding == Written(0, acknowledged=False)
    assert not connector.pending()


async def test_blocking_ends_when_the_planner_stops(rig: Rig) -> None:
    connector = await rig.connected(blocking=True)
    deciding = asyncio.ensure_future(connector.set_component_replicas({D: 2}))
    async with asyncio.timeout(5.0):
        while "decision_id" not in await rig.values():
            await asyncio.sleep(0)
        connector.release()
        assert await deciding == Written(0, acknowledged=False)


async def test_its_status_says_what_waits_and_for_how_long(rig: Rig) -> None:
    connector = await rig.connected()
    assert connector.status()["decision_id"] == PlannerDecision().decision_id == -1
    await connector.set_component_replicas({P: 1, D: 2})
    rig.clock.move(12.0)
    assert connector.status() == {
        "keys": "v1/dynamo/planner/",
        "num_prefill_workers": 1,
        "num_decode_workers": 2,
        "decision_id": 0,
        "scaled_decision_id": -1,
        "pending": True,
        "waits_s": 12.0,
    }

"""`--follow virtual` in its arbiter: decisions carried out by the scaler, acknowledged, and shown where they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.arbiter import planner_following as following
from dynamo_local.arbiter.controller import Waiting
from dynamo_local.arbiter.planner_following import DecisionFollower
from dynamo_local.clock import AsyncioClock
from dynamo_local.core.fleet.events import Command, Scale
from dynamo_local.core.virtual import Layout
from dynamo_local.errors import NotEnoughGpus
from dynamo_local.planner.values import Pool, WorkerPools
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.fleet_views import fleet
from tests.fakes.arbiter.told import Told
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.planner.virtual import ForeignPlanner

P, D = "PrefillWorker", "VllmWorker"
SOON_S = 5.0


class Arbiter:
    """Two components of one ready worker; what is asked for comes when `arrive` is called. `gpus` bounds both."""

    def __init__(self, layout: Layout = Layout.V1, etcd: FakeEtcd | None = None) -> None:
        self.layout = layout
        self.etcd = etcd or FakeEtcd()
        self.planner = ForeignPlanner(self.etcd, layout=str(layout))
        self.records: list[dict[str, Any]] = []
        clock = AsyncioClock()
        self.waiting = Waiting(shell_of(fleet()), clock.now_s)
        self.pools = {P: Pool(P, 1, ready=1), D: Pool(D, 1, ready=1)}
        self.gpus = 8
        self.scaled: list[tuple[str, str]] = []
        self.last: Scale | None = None
        self.told = Told()
        self.fails: list[Exception] = []
        self.following = DecisionFollower(
            self.etcd,
            "dynamo",
            layout,
            fleet=lambda: WorkerPools(self.pools[P], self.pools[D]),
            waiting=self.waiting,
            record=self.record,
            run=self.run,
            clock=clock,
            tell=self.told,
        )

    async def run(self, command: Command) -> dict[str, Any]:
        """As the arbiter's: whole, or refused."""
        assert isinstance(command, Scale)
        self.last, component, target = command, command.component, str(command.target)
        self.scaled.append((component, target))
        if self.fails:
            raise self.fails.pop(0)
        pool, wanted = self.pools[component], int(target.removeprefix("="))
        others = sum(other.capacity for name, other in self.pools.items() if name != component)
        if wanted > pool.capacity and wanted + others > self.gpus:
            raise NotEnoughGpus(f"{component} needs {wanted - pool.capacity} GPUs, and none is free")
        ready = min(pool.ready, wanted)
        self.pools[component] = replace(pool, ready=ready, coming=wanted - ready)
        self.waiting.notify()
        return {"instructions": []}

    async def record(self, record: dict[str, Any]) -> None:
        """As `EventRecorder.record`."""
        self.records.append(record)

    def arrive(self) -> None:
        """What was on its way is ready."""
        for name, pool in self.pools.items():
            self.pools[name] = replace(pool, ready=pool.capacity, coming=0)
        self.waiting.notify()

    async def until(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status, once it is so."""
        async with asyncio.timeout(SOON_S):
            while not done(status := self.following.status()):
                await asyncio.sleep(0.005)
        return status

    async def phase(self, phase: str, decision_id: int) -> dict[str, Any]:
        """The status, once it stands there."""
        return await self.until(lambda status: (status["phase"], status["decision_id"]) == (phase, decision_id))


@pytest.fixture(params=list(Layout))
async def arbiter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Arbiter]:
    """One that follows, in either layout."""
    monkeypatch.setattr(following, "AGAIN_S", 0.05)
    arbiter = Arbiter(request.param)
    arbiter.following.start()
    yield arbiter
    async with asyncio.timeout(SOON_S):
        await arbiter.following.stop()


async def test_a_decision_is_carried_out_and_acknowledged_when_it_is(arbiter: Arbiter) -> None:
    await arbiter.phase("waiting", -1)
    await arbiter.planner.decide(prefill=1, decode=3)
    status = await arbiter.phase("under_way", 0)
    assert arbiter.scaled == [(D, "=3")]
    assert arbiter.last is not None
    assert (arbiter.last.stimulus_id, arbiter.last.by_person, arbiter.last.wait_for_gpus) == ("virtual:0", False, True)
    assert await arbiter.planner.get("scaled_decision_id") == -1
    arbiter.arrive()
    status = await arbiter.until(lambda status: status["scaled_decision_id"] == 0)
    assert (status["num_prefill_workers"], status["num_decode_workers"]) == (1, 3)
    await arbiter.planner.acknowledged(0)
    await arbiter.planner.decide(prefill=1, decode=1)
    await arbiter.planner.acknowledged(1)
    assert arbiter.scaled == [(D, "=3"), (D, "=1")]
    assert arbiter.told == []


async def test_what_was_acknowledged_before_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = Arbiter()
    await arbiter.planner.decide(prefill=1, decode=3)
    await arbiter.planner.put("scaled_decision_id", 0)
    arbiter.following.start()
    await arbiter.phase("done", 0)
    assert arbiter.scaled == []
    await arbiter.following.stop()


async def test_what_stands_unacknowledged_is_gone_on_with() -> None:
    arbiter = Arbiter()
    await arbiter.planner.decide(prefill=1, decode=2)
    arbiter.following.start()
    await arbiter.phase("under_way", 0)
    arbiter.arrive()
    await arbiter.planner.acknowledged(0)
    await arbiter.following.stop()


async def test_without_gpus_it_is_not_acknowledged_shown_with_the_reason_and_done_when_some_are_free(
    arbiter: Arbiter,
) -> None:
    arbiter.gpus = 2
    await arbiter.planner.decide(prefill=1, decode=3)
    status = await arbiter.phase("refused", 0)
    assert status["reason"] == "VllmWorker=3: VllmWorker needs 2 GPUs, and none is free"
    assert len(arbiter.told) == 1
    assert "follow: decision 0 (prefill=1, decode=3) cannot be carried out: VllmWorker=3" in arbiter.told[0]
    async with asyncio.timeout(SOON_S):
        while len(arbiter.scaled) < 3:
            await asyncio.sleep(0.005)
    assert await arbiter.planner.get("scaled_decision_id") == -1
    assert len(arbiter.told) == 1, "told once"
    arbiter.gpus = 8
    await arbiter.phase("under_way", 0)
    arbiter.arrive()
    await arbiter.planner.acknowledged(0)
    await arbiter.phase("done", 0)
    assert arbiter.told[1:] == ["follow: decision 0 (prefill=1, decode=3) is carried out"]
    phases = [(record["from"], record["to"]) for record in arbiter.records]
    assert phases == [("waiting", "refused"), ("refused", "under_way"), ("under_way", "done")]
    assert arbiter.records[0]["reason"].startswith("VllmWorker=3: ")
    assert arbiter.records[0]["stimulus_id"] == "virtual:0"


async def test_what_one_component_is_refused_does_not_keep_the_other_back(arbiter: Arbiter) -> None:
    arbiter.gpus = 4
    await arbiter.planner.decide(prefill=2, decode=9)
    status = await arbiter.phase("refused", 0)
    assert arbiter.pools[P].capacity == 2
    assert "PrefillWorker" not in status["reason"]


async def test_a_newer_decision_replaces_the_one_under_way(arbiter: Arbiter) -> None:
    await arbiter.planner.decide(decode=4)
    await arbiter.phase("under_way", 0)
    await arbiter.planner.decide(decode=1)
    await arbiter.planner.acknowledged(1)
    assert arbiter.scaled == [(D, "=4"), (D, "=1")]


async def test_a_value_that_makes_no_sense_is_told_and_changes_nothing(arbiter: Arbiter) -> None:
    await arbiter.planner.put("num_decode_workers", "many")
    await arbiter.planner.put("decision_id", 0)
    status = await arbiter.phase("unreadable", 0)
    assert status["reason"] == "num_decode_workers is 'many': a whole number from 0 to 9999 was expected"
    assert (arbiter.scaled, await arbiter.planner.get("scaled_decision_id")) == ([], -1)
    assert len(arbiter.told) == 1
    arbiter.planner.decision_id = 0
    await arbiter.planner.decide(decode=1)
    await arbiter.planner.acknowledged(1)


async def test_it_survives_restarts_of_etcd_and_holds_while_it_is_away(arbiter: Arbiter) -> None:
    await arbiter.planner.decide(decode=2)
    await arbiter.phase("under_way", 0)
    arbiter.etcd.available = False
    await arbiter.until(lambda status: "etcd does not answer" in (status["reason"] or ""))
    arbiter.arrive()
    arbiter.etcd.available = True
    await arbiter.planner.acknowledged(0)
    arbiter.etcd.restart()
    await arbiter.planner.decide(decode=3)
    await arbiter.phase("under_way", 1)


async def test_an_acknowledgement_that_cannot_be_written_is_tried_again(arbiter: Arbiter) -> None:
    put, failed = arbiter.etcd.put, []

    async def fails_once(key: str, value: bytes, lease_id: int = 0) -> int:
        if key.endswith("scaled_decision_id") and not failed:
            failed.append(key)
            arbiter.etcd.fail_next(1)
        return await put(key, value, lease_id)

    arbiter.etcd.put = fails_once  # type: ignore[method-assign]
    await arbiter.planner.decide(decode=1)
    await arbiter.planner.acknowledged(0)
    assert failed


async def test_a_step_that_fails_is_shown_and_tried_again(arbiter: Arbiter) -> None:
    """A bug must not end the following in silence."""
    arbiter.fails = [RuntimeError("boom")]
    await arbiter.planner.decide(decode=2)
    await arbiter.phase("under_way", 0)
    assert arbiter.told == ["follow: a step failed (RuntimeError: boom); the arbiter's log says more"]
    arbiter.arrive()
    await arbiter.planner.acknowledged(0)


async def test_a_stopped_one_follows_no_more(arbiter: Arbiter) -> None:
    await arbiter.phase("waiting", -1)
    await arbiter.following.stop()
    other = Arbiter(arbiter.layout, arbiter.etcd)
    other.following.start()
    await arbiter.planner.decide(decode=3)
    await other.phase("under_way", 0)
    await other.following.stop()
    assert (other.scaled, arbiter.scaled) == ([(D, "=3")], [])

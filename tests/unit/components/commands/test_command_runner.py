"""The component of a command: what it does for its runtime's driver, and what the worker hears of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dynamo_local.components.commands import runner
from dynamo_local.components.commands.child import Child, set_current_child
from dynamo_local.components.commands.launch import Launch
from dynamo_local.components.commands.process import NoneConfig
from dynamo_local.components.commands.runner import ChildEnded, ChildSilent, CommandWorker, Driver, Sample
from dynamo_local.core.types import Load
from dynamo_local.errors import EtcdUnavailable, LeaseNotFound
from dynamo_local.sdk.context import WorkerContext
from dynamo_local.sdk.service import DynamoService
from tests.drivers.eventually import eventually
from tests.fakes.data_plane.worker_context import FakeCluster, FakeWorker


class ScriptedDriver:
    """Says and does what the test wants, and notes what it was asked for."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.silent: str | None = None
        self.fail: list[Exception] = []
        self.done: list[str] = []
        self.ready = asyncio.Event()
        self.ready.set()

    def _do(self, what: str) -> None:
        if self.fail:
            raise self.fail.pop(0)
        self.done.append(what)

    async def wait_ready(self) -> None:
        await self.ready.wait()

    def facts(self) -> Mapping[str, str]:
        return {"leases": "7"}

    async def sample(self) -> Sample:
        if self.silent is not None:
            raise ChildSilent(self.silent)
        return Sample(Load(request_active_slots=self.in_flight), self.in_flight)

    async def take_out(self) -> None:
        self._do("out")

    async def put_back(self) -> None:
        self._do("back")

    async def lost(self) -> None:
        self.done.append("lost")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ScriptedDriver:
    """And a runner that does not take its time."""
    for name in ("SAMPLE_EVERY_S", "DRAIN_EVERY_S", "RETRY_S"):
        monkeypatch.setattr(runner, name, 0.005)
    monkeypatch.setattr(runner, "STALE_S", 0.015)
    return ScriptedDriver()


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    """A process that does nothing for long."""
    started = Child(Launch(("sleep", "60"), {"PATH": os.environ["PATH"]}, {}))
    set_current_child(started)
    yield started
    set_current_child(None)
    await started.end(5.0)


async def serve(driver: ScriptedDriver, **config: Any) -> FakeWorker:
    """A started worker of the service."""

    class Scripted(CommandWorker):
        runtime = "none"

        def make_driver(self, context: WorkerContext, child: Child) -> Driver:
            return driver

    service = DynamoService(Scripted, name="Scripted", dynamo={"role": "decode"}, config=NoneConfig)
    return await FakeCluster().start(service, NoneConfig(command="sleep 60", **config))


async def finish(worker: FakeWorker) -> None:
    """End what the worker runs beside."""
    for task in worker.context.vital_tasks:
        task.cancel()
    await asyncio.gather(*worker.context.vital_tasks, return_exceptions=True)


async def test_it_is_ready_with_its_driver_and_says_what_it_knows(driver: ScriptedDriver, child: Child) -> None:
    driver.in_flight = 2
    worker = await serve(driver)
    assert worker.context.facts == {"leases": "7"}
    assert worker.context.load_source is not None
    assert worker.context.load_source().request_active_slots == 2
    assert worker.context.work_source().unnamed == 2
    await finish(worker)


async def test_a_drain_takes_it_out_at_once_and_waits_for_the_last_request(
    driver: ScriptedDriver, child: Child
) -> None:
    driver.in_flight = 1
    worker = await serve(driver)
    draining = asyncio.create_task(worker.context.run_drain_callbacks())
    await eventually(lambda: "out" in driver.done)
    await asyncio.sleep(0.05)
    assert not draining.done()
    driver.in_flight = 0
    await asyncio.wait_for(draining, 10.0)
    assert not child.ended  # until the drain is done for good it can be taken back
    await finish(worker)


async def test_silence_is_not_taken_for_nothing_in_flight(driver: ScriptedDriver, child: Child) -> None:
    worker = await serve(driver)
    driver.silent = "no answer"
    draining = asyncio.create_task(worker.context.run_drain_callbacks())
    await asyncio.sleep(0.05)
    assert not draining.done()
    driver.silent = None
    await asyncio.wait_for(draining, 10.0)
    await finish(worker)


async def test_a_request_that_arrives_between_two_looks_is_waited_for(driver: ScriptedDriver, child: Child) -> None:
    """Nothing in flight once says little: the next look sees what was on its way."""
    worker = await serve(driver)
    looks = iter([0, 0, 1, 0, 0, 0, 0, 0])
    seen: list[int] = []

    async def sample() -> Sample:
        seen.append(next(looks, 0))
        return Sample(Load(), seen[-1])

    await finish(worker)
    driver.sample = sample  # type: ignore[method-assign]
    await asyncio.wait_for(worker.context.run_drain_callbacks(), 10.0)
    assert seen == [0, 0, 1, 0, 0, 0]


async def test_a_drain_taken_back_puts_it_back(driver: ScriptedDriver, child: Child) -> None:
    driver.in_flight = 1
    worker = await serve(driver)
    draining = asyncio.create_task(worker.context.run_drain_callbacks())
    await eventually(lambda: "out" in driver.done)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    driver.done.clear()
    await worker.context.run_resume_callbacks()
    assert driver.done == ["back"]
    assert not child.ended
    await finish(worker)


async def test_while_etcd_is_away_both_ways_are_tried_again(driver: ScriptedDriver, child: Child) -> None:
    worker = await serve(driver)
    driver.fail = [EtcdUnavailable("away"), EtcdUnavailable("away")]
    await asyncio.wait_for(worker.context.run_drain_callbacks(), 10.0)
    driver.fail = [EtcdUnavailable("away")]
    await asyncio.wait_for(worker.context.run_resume_callbacks(), 10.0)
    assert driver.done[0] == "out"
    assert driver.done[-1] == "back"
    await finish(worker)


async def test_one_that_can_never_be_put_back_ends_its_worker(driver: ScriptedDriver, child: Child) -> None:
    """A worker that says ready, and that nobody routes to, would be the worst of all."""
    worker = await serve(driver)
    driver.fail = [LeaseNotFound("gone")]
    await worker.context.run_resume_callbacks()
    with pytest.raises(LeaseNotFound):
        await worker.context.vital_tasks[-1]
    await finish(worker)


async def test_a_command_that_ends_unasked_ends_its_worker_and_is_routed_to_no_more(
    driver: ScriptedDriver, child: Child
) -> None:
    worker = await serve(driver)
    os.kill(child.pid, 9)
    with pytest.raises(ChildEnded, match="SIGKILL"):
        await asyncio.wait_for(worker.context.vital_tasks[0], 10.0)
    assert driver.done == ["lost"]
    await finish(worker)


async def test_a_command_that_answers_nothing_is_missing_and_then_hung(driver: ScriptedDriver, child: Child) -> None:
    worker = await serve(driver, health_bound_s=0.2)
    assert worker.context.load_source is not None
    driver.silent = "connection refused"

    def unknown() -> bool:
        try:
            worker.context.load_source()  # type: ignore[misc]
        except ChildSilent:
            return True
        return False

    await eventually(unknown)
    with pytest.raises(ChildSilent, match="connection refused"):
        await asyncio.wait_for(worker.context.vital_tasks[1], 10.0)
    assert driver.done == ["lost"]
    await finish(worker)


async def test_at_the_end_the_command_is_ended_too(driver: ScriptedDriver, child: Child) -> None:
    worker = await serve(driver)
    await worker.instance.stop()
    assert child.ended
    await asyncio.wait_for(worker.context.vital_tasks[0], 10.0)  # it was asked: nothing failed
    assert driver.done == ["lost"]
    await finish(worker)


async def test_a_command_that_ends_and_answers_no_more_is_not_taken_for_hung(
    driver: ScriptedDriver, child: Child
) -> None:
    driver.in_flight = 1
    worker = await serve(driver, health_bound_s=0.05)
    worker.instance.ending = True
    driver.silent = "it answers 503"
    await asyncio.sleep(0.2)
    assert not worker.context.vital_tasks[1].done()
    assert worker.context.load_source is not None
    assert worker.context.load_source().request_active_slots == 1
    await finish(worker)

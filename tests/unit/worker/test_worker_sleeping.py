"""A worker's side of standby: orders are numbered, the last one wins, and etcd may be away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dynamo_local.errors import DrainNotCancellable, EngineError, EtcdUnavailable, NotSleepable
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.sleep import Sleeping


class Worker:
    """`DrainSteps` and `StandbySteps` that write down what is done. `streams` is set when none runs."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.streams = asyncio.Event()
        self.streams.set()
        self.etcd_fails = 0
        self.engine_fails: str | None = None
        self.failed: list[str] = []
        self.drain = Drain(self)
        self.drain.started()
        self.sleeping = Sleeping(self.drain, self, lambda what, error: self.failed.append(f"{what}: {error}"))

    async def _step(self, name: str) -> None:
        if self.etcd_fails:
            self.etcd_fails -= 1
            raise EtcdUnavailable("away")
        self.did.append(name)

    async def withdraw(self) -> None:
        await self._step("withdraw")

    async def come_back(self) -> None:
        await self._step("come back")

    async def tell(self) -> None:
        await self._step(f"tell {self.sleeping.done} {'asleep' if self.sleeping.asleep else 'awake'}")

    def stop_accepting(self, linger_s: float) -> None:
        self.did.append("stop accepting")

    async def finish(self) -> None:
        await self.streams.wait()
        self.did.append("finished")

    async def sleep_engine(self, level: int) -> None:
        if self.engine_fails == "sleep":
            raise EngineError("it fails")
        self.did.append(f"engine sleeps at {level}")

    async def wake_engine(self) -> None:
        if self.engine_fails == "wake":
            raise EngineError("it fails")
        self.did.append("engine wakes")

    def unfollow_lease(self) -> None:
        self.did.append("unfollow")

    async def end_standby(self) -> None:
        await self.sleeping.close()

    async def deregister(self) -> None:
        self.did.append("deregister")

    async def resume(self) -> None:
        self.did.append("resume")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not condition():
                await asyncio.sleep(0)


ASLEEP = ["withdraw", "stop accepting", "finished", "engine sleeps at 1", "tell 1 asleep"]


async def test_there_and_back() -> None:
    worker = Worker()
    worker.sleeping.sleep(1, 1)
    await worker.until(lambda: worker.did == ASLEEP)
    assert worker.drain.phase is Phase.SLEEPING
    worker.sleeping.wake(2)
    await worker.until(lambda: worker.did[5:] == ["engine wakes", "come back", "tell 2 awake"])
    assert worker.drain.phase is Phase.READY


async def test_an_order_that_comes_twice_is_carried_out_once() -> None:
    worker = Worker()
    worker.sleeping.sleep(1, 1)
    worker.sleeping.sleep(1, 1)
    await worker.until(lambda: worker.did == ASLEEP)
    worker.sleeping.wake(1)
    worker.sleeping.sleep(0, 2)
    await asyncio.sleep(0.01)
    assert worker.did == ASLEEP


async def test_woken_while_streams_run_the_engine_never_slept() -> None:
    worker = Worker()
    worker.streams.clear()
    worker.sleeping.sleep(1, 1)
    await worker.until(lambda: worker.drain.phase is Phase.FALLING_ASLEEP and "stop accepting" in worker.did)
    worker.sleeping.wake(2)
    await worker.until(lambda: worker.did == ["withdraw", "stop accepting", "come back", "tell 2 awake"])
    assert worker.drain.phase is Phase.READY
    assert not worker.sleeping.asleep


async def test_a_wake_of_one_that_is_awake_is_only_told() -> None:
    worker = Worker()
    worker.sleeping.wake(3)
    await worker.until(lambda: worker.did == ["tell 3 awake"])


async def test_while_etcd_is_away_it_is_tried_again() -> None:
    worker = Worker()
    worker.etcd_fails = 2
    worker.sleeping.sleep(1, 1)
    await worker.until(lambda: worker.did == ASLEEP)


@pytest.mark.parametrize("step", ["sleep", "wake"])
async def test_an_engine_that_fails_ends_the_worker(step: str) -> None:
    worker = Worker()
    worker.engine_fails = step
    worker.sleeping.sleep(1, 1)
    if step == "wake":
        await worker.until(lambda: worker.did == ASLEEP)
        worker.sleeping.wake(2)
    await worker.until(lambda: bool(worker.failed))
    assert worker.failed == ["its standby: it fails"]
    assert "come back" not in worker.did


@pytest.mark.parametrize("asleep", [True, False])
async def test_told_to_leave_it_leaves_and_cannot_be_called_back(asleep: bool) -> None:
    worker = Worker()
    if not asleep:
        worker.streams.clear()
    worker.sleeping.sleep(1, 1)
    await worker.until(lambda: worker.did == ASLEEP if asleep else "stop accepting" in worker.did)
    worker.drain.begin("SIGTERM")
    with pytest.raises(NotSleepable, match="the worker is draining"):
        worker.sleeping.wake(2)
    with pytest.raises(DrainNotCancellable, match="on standby"):
        await worker.drain.cancel()
    worker.streams.set()
    async with asyncio.timeout(5.0):
        assert await worker.drain.left == "SIGTERM"
    assert "come back" not in worker.did
    await worker.drain.close()


async def test_one_that_starts_takes_no_order() -> None:
    worker = Worker()
    worker.drain.phase = Phase.STARTING
    with pytest.raises(NotSleepable, match="the worker is starting"):
        worker.sleeping.sleep(1, 1)

"""How long the planner holds the loop is what lies between two of its awaits, on both clocks."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.planner.collector import Longest, LoopLatency
from tests.fakes.planner.planner_loop import Rig, on_virtual_time


class Clock:
    """Goes on by what the work says that it takes."""

    def __init__(self) -> None:
        self.elapsed_s = self.cpu_s = 0.0

    def busy(self, elapsed_s: float, cpu_s: float) -> None:
        self.elapsed_s, self.cpu_s = self.elapsed_s + elapsed_s, self.cpu_s + cpu_s

    def holding(self) -> LoopLatency:
        return LoopLatency(lambda: self.elapsed_s, lambda: self.cpu_s)


async def test_the_longest_step_is_kept_and_not_what_is_waited() -> None:
    clock = Clock()
    held = clock.holding()

    async def work() -> str:
        clock.busy(0.25, 0.125)
        await asyncio.sleep(0)
        clock.busy(1.0, 0.25)
        await waits()
        clock.busy(0.5, 0.5)
        return "done"

    async def waits() -> None:
        task = asyncio.create_task(others())
        await task

    async def others() -> None:
        clock.busy(64.0, 64.0)

    assert await held.timed("tick", work()) == "done"
    assert held.longest == {"tick": Longest(1.0, 0.5)}, "by clock: of different steps"


async def test_errors_go_in_and_out_and_are_timed() -> None:
    clock = Clock()
    held = clock.holding()

    async def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            await broken()
        clock.busy(2.0, 1.0)
        raise ValueError("of the work")

    async def broken() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ValueError, match="of the work"):
        await held.timed("tick", fails())
    assert held.longest["tick"] == Longest(2.0, 1.0)


async def test_a_cancellation_reaches_the_work_which_may_end_in_order() -> None:
    clock = Clock()
    held = clock.holding()
    begun, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            clock.busy(3.0, 1.0)
            await asyncio.sleep(0)
            ended.append("in order")
            raise

    task = asyncio.ensure_future(held.timed("passes", work()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["in order"]
    assert held.longest["passes"].elapsed_s == 3.0


@on_virtual_time
async def test_a_loop_tells_its_ticks_and_its_sources() -> None:
    rig = Rig()
    rig.start()
    await rig.until(10.5)
    await rig.loop.stop()
    told = rig.loop.counts.as_json()
    assert (told["pulls"], told["decisions"]) == (10, 1)
    held = told["loop_held_max_ms"]
    assert set(held) == {"tick", "loads", "queue"}
    assert all(each["wall"] > 0 and each["cpu"] > 0 for each in held.values())

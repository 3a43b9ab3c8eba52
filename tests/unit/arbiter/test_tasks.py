"""The arbiter's own tasks: one that dies is started again, named, counted, and what depends on it is made safe."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from dynamo_local.arbiter.tasks import AGAIN_MAX_S, AGAIN_S, RAN_WELL_S, Tasks
from dynamo_local.clock import AsyncioClock, run_virtual
from tests.fakes.arbiter.told import Told

SOON_S = 5.0


class Runs:
    """Tasks on the loop's clock, and what a person was told."""

    def __init__(self) -> None:
        self.told = Told()
        self.clock = AsyncioClock()
        self.tasks = Tasks(self.clock, self.told)

    def state(self, name: str) -> dict[str, Any]:
        """What `dynamo status --json` says of it."""
        (row,) = [row for row in self.tasks.status() if row["task"] == name]
        return row


def virtual(scenario: Callable[[Runs], Coroutine[Any, Any, None]]) -> None:
    """Run it where nothing takes time; its tasks end with it."""

    async def main() -> None:
        runs = Runs()
        try:
            await scenario(runs)
        finally:
            await runs.tasks.close()

    run_virtual(main())


@pytest.fixture
async def runs() -> AsyncIterator[Runs]:
    """On real time."""
    runs = Runs()
    yield runs
    await runs.tasks.close()


def test_one_that_dies_is_started_again_later_and_later() -> None:

    async def scenario(runs: Runs) -> None:
        began_s: list[float] = []

        async def broken() -> None:
            began_s.append(runs.clock.now_s())
            raise RuntimeError("boom")

        runs.tasks.keep("load sampling", broken)
        await asyncio.sleep(300.0)
        gaps = [after - before for before, after in itertools.pairwise(began_s)]
        assert gaps[:4] == pytest.approx([AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S])
        assert gaps[-1] == pytest.approx(AGAIN_MAX_S)
        assert runs.state("load sampling")["deaths"] == len(began_s)

    virtual(scenario)


def test_one_that_ran_well_before_it_died_is_started_again_soon() -> None:
    async def scenario(runs: Runs) -> None:
        began_s: list[float] = []

        async def lives_a_while() -> None:
            began_s.append(runs.clock.now_s())
            if len(began_s) > 4:
                await asyncio.sleep(RAN_WELL_S)
            raise RuntimeError("boom")

        runs.tasks.keep("pulse", lives_a_while)
        await asyncio.sleep(3 * RAN_WELL_S)
        assert began_s[4] - began_s[3] == pytest.approx(8 * AGAIN_S)
        assert began_s[5] - began_s[4] == pytest.approx(RAN_WELL_S + AGAIN_S)

    virtual(scenario)


def test_the_status_names_it_while_it_is_down_and_remembers_how_often_it_died() -> None:
    async def scenario(runs: Runs) -> None:
        lives = [False, True]

        async def dies_once() -> None:
            if not lives.pop(0):
                raise ConnectionError("no route to etcd")
            await asyncio.Event().wait()

        runs.tasks.keep("registry watch", dies_once)
        assert runs.state("registry watch") == {
            "task": "registry watch",
            "running": True,
            "deaths": 0,
            "why": None,
            "again_s": None,
        }
        await asyncio.sleep(0.1)
        assert runs.state("registry watch") == {
            "task": "registry watch",
            "running": False,
            "deaths": 1,
            "why": "ConnectionError: no route to etcd",
            "again_s": pytest.approx(AGAIN_S - 0.1),
        }
        await asyncio.sleep(AGAIN_S)
        assert runs.state("registry watch")["running"]
        assert runs.state("registry watch")["deaths"] == 1
        assert runs.told == [
            "the arbiter's registry watch died (ConnectionError: no route to etcd); it is started again in 0.5 s"
        ]
        assert runs.told.notes == [], "the status has a line of its own for a task that is down"

    virtual(scenario)


async def test_one_that_ends_by_itself_has_died_too(runs: Runs) -> None:
    again = asyncio.Event()
    starts: list[int] = []

    async def ends() -> None:
        starts.append(1)
        if len(starts) == 2:
            again.set()

    runs.tasks.keep("pulse", ends)
    async with asyncio.timeout(SOON_S):
        await again.wait()
    assert "the arbiter's pulse died (it ended by itself)" in runs.told[0]


async def test_what_depends_on_it_is_made_safe_at_each_death(runs: Runs) -> None:
    order: list[str] = []
    twice = asyncio.Event()

    async def broken() -> None:
        order.append("runs")
        if order.count("runs") == 2:
            twice.set()
        raise RuntimeError("boom")

    runs.tasks.keep("registry watch", broken, on_death=lambda: order.append("made safe"))
    async with asyncio.timeout(SOON_S):
        await twice.wait()
    await asyncio.sleep(0)
    assert order[:4] == ["runs", "made safe", "runs", "made safe"]


async def waits_for_something_cancelled() -> None:
    """As a client does whose stream is torn down below it."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def not_safe() -> None:
    raise RuntimeError("a bug")


async def broken() -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("work", "on_death", "why"),
    [
        (waits_for_something_cancelled, lambda: None, "what it waited for was cancelled"),
        (broken, not_safe, "RuntimeError: boom"),
    ],
    ids=["its work is cancelled from below", "making safe fails"],
)
async def test_nothing_ends_the_restarts_in_silence(
    runs: Runs, work: Callable[[], Coroutine[Any, Any, None]], on_death: Callable[[], None], why: str
) -> None:
    again = asyncio.Event()
    starts: list[int] = []

    async def counted() -> None:
        starts.append(1)
        if len(starts) == 2:
            again.set()
        await work()

    runs.tasks.keep("registry watch", counted, on_death=on_death)
    async with asyncio.timeout(SOON_S):
        await again.wait()
    assert f"the arbiter's registry watch died ({why})" in runs.told[0]


async def test_a_task_that_is_wanted_once_is_told_of_when_it_fails(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    failed = asyncio.Event()

    async def fails() -> None:
        failed.set()
        raise RuntimeError("boom")

    with caplog.at_level(logging.CRITICAL):
        runs.tasks.run(fails())
        await failed.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert runs.told == ["arbiter: RuntimeError: boom"]
    assert runs.tasks.status() == []


async def test_closing_ends_all_also_one_that_waits_to_be_started_again(runs: Runs) -> None:
    died, lives = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def waits() -> None:
        lives.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    runs.tasks.keep("load sampling", broken, on_death=died.set)
    runs.tasks.keep("pulse", waits)
    async with asyncio.timeout(SOON_S):
        await died.wait()
        await lives.wait()
        await runs.tasks.close()
    assert ended == ["waits"]
    assert runs.state("load sampling")["deaths"] == 1


async def test_whoever_closes_may_be_one_of_them(runs: Runs) -> None:
    closed = asyncio.Event()

    async def closes() -> None:
        await runs.tasks.close()
        closed.set()

    runs.tasks.run(closes())
    async with asyncio.timeout(SOON_S):
        await closed.wait()

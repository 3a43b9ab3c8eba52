"""Decode workers are killed under load, and no client notices: each stream goes on at another worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from benchmarks.drain.client import Oracle, Outcome, exchange_one
from benchmarks.drain.trace import Ask
from tests.drivers.scaled import command, names, settled
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra

AT_ONCE = 48
_MIGRATIONS = re.compile(r'^dynamo_frontend_model_migration_total{.*migration_type="ongoing_request".*} (\d+)', re.M)


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """Two decode workers, which may die as often as they like, and a prefill worker for every second prompt."""
    words = ("--VllmWorker.ServiceArgs.workers=2", "--Host.restart.failures-max=100")
    with Served(*words, "--Host.restart.max-s=1", "--Common.sim.speed=2") as served:
        yield served.start()


async def streamed(served: Served, count: int, outcomes: Counter[Outcome], enough: asyncio.Event) -> None:
    """At least so many chats, `AT_ONCE` at a time, until `enough`; each is held against the right text."""
    oracle, port = Oracle(), int(served.url.rpartition(":")[2])
    numbers = itertools.count()

    async def client() -> None:
        while (number := next(numbers)) < count or not enough.is_set():
            ask = Ask(0.0, f"Story number {number}, of a worker that dies in it.", 40 + 7 * (number % 30), True)
            record = await exchange_one(port, number, ask, 0.0, oracle)
            outcomes[record.outcome] += 1
            assert record.outcome == "right", record

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())


async def migrations(served: Served) -> int:
    async with httpx.AsyncClient(base_url=served.url) as http:
        found = _MIGRATIONS.search((await http.get("/metrics")).text)
    return int(found[1]) if found else 0


async def under_kills(served: Served, streams: int, kills: int) -> None:
    """At least so many streams, and so many kills of a worker that has some, each with all others ready."""
    outcomes: Counter[Outcome] = Counter()
    enough, begun = asyncio.Event(), await migrations(served)
    load = asyncio.create_task(streamed(served, streams, outcomes, enough))
    for number in range(kills):
        more = outcomes.total() + AT_ONCE
        await auntil(lambda more=more: load.done() or outcomes.total() >= more, 60.0, what=lambda: outcomes)
        name = names(served, "VllmWorker")[number % 2]
        os.kill(served.pids()[name], signal.SIGKILL)
        await auntil(lambda name=name: served.states().get(name) != "ready", 20.0, what=served.states)
        await settled(served, 60.0)
    enough.set()
    await load
    print(outcomes, await migrations(served) - begun, "migrations")
    assert outcomes.total() >= streams
    assert await migrations(served) - begun >= kills


async def test_streams_go_on_when_their_workers_are_killed(graph: Served) -> None:
    await under_kills(graph, 200, 2)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_ten_thousand_streams_go_on_under_twenty_kills(graph: Served) -> None:
    await under_kills(graph, 10_000, 20)


@asynccontextmanager
async def all_at_once(served: Served) -> AsyncIterator[None]:
    """`AT_ONCE` streams. Some are at `VllmWorker` when the block begins; all are right once it has ended."""
    outcomes: Counter[Outcome] = Counter()
    enough = asyncio.Event()
    enough.set()
    load = asyncio.create_task(streamed(served, AT_ONCE, outcomes, enough))
    await auntil(lambda: (served.worker("VllmWorker")["load"] or {}).get("request_active_slots"), what=served.status)
    yield
    await load
    assert outcomes == {"right": AT_ONCE}


@pytest.mark.full
async def test_a_stream_waits_for_the_only_worker_to_start_again() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=1", "--PrefillWorker.ServiceArgs.workers=1") as served:
        async with all_at_once(served.start()):
            os.kill(served.pids()["VllmWorker"], signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("how", ["drained too late", "hung"])
async def test_streams_of_a_worker_that_the_arbiter_ends_go_on(how: str) -> None:
    """Past the deadline of its drain, and past the bound of its health."""
    words = ("--VllmWorker.ServiceArgs.workers=2", "--Common.sim.speed=0.5", "--Host.health-bound-s=3")
    with Served(*words, "--VllmWorker.ServiceArgs.drain-deadline-s=1") as served:
        async with all_at_once(served.start()):
            if how == "hung":
                os.kill(served.pids()["VllmWorker"], signal.SIGSTOP)
            else:
                command(served, "drain", name="dynamo_VllmWorker")
        assert await migrations(served) > 0

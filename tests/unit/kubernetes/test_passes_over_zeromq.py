"""Passes of workers whose event plane is ZeroMQ: where they say that they publish, and what is heard there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Missing
from dynamo_local.kubernetes import observation as hearing
from dynamo_local.kubernetes.api import ApiAway
from dynamo_local.kubernetes.observation import Channel, HeardPasses, WorkerRegistrations, registered
from dynamo_local.planner.values import Pool, WorkerPools
from tests.fakes.kubernetes.workers import NAMESPACE, channel, framed, sealed, told_pass, worker_metadata

POOLS = WorkerPools(Pool("P", 1, ready=1), Pool("D", 1, ready=1))
HERE = "tcp://10.0.0.7:20380"


@pytest.mark.parametrize("scope", [None, "component", "endpoint"])
def test_where_a_worker_publishes_stands_in_its_metadata(scope: str | None) -> None:
    """In the forms of Dynamo 1.2 and of later versions."""
    found = registered([worker_metadata("d", 1, channels=channel(HERE, scope=scope))], NAMESPACE)
    assert found.channels == {Channel("backend", HERE)}


@pytest.mark.parametrize(
    "told",
    [
        channel("namespace.default-serving", kind="Nats"),
        channel(HERE, topic="kv-events"),
        channel(HERE, namespace="default-other"),
        channel(HERE, namespace="default-other", scope="endpoint"),
        channel("ipc:///tmp/x"),
        channel("tcp://host:1;tcp://other:2"),
        channel("tcp://host"),
        {"a": {"topic": "forward-pass-metrics", "transport": "text"}},
        {"a": None, "b": 5},
    ],
    ids=["nats", "topic", "graph", "scope", "ipc", "two", "no port", "text", "nothing"],
)
def test_what_is_no_socket_of_the_graphs_passes_is_not_connected(told: dict[str, Any]) -> None:
    assert registered([worker_metadata("d", 1, channels=told)], NAMESPACE).channels == frozenset()


class Worker:
    """Publishes its passes on a socket of its own."""

    def __init__(self, context: zmq.asyncio.Context, name: str) -> None:
        self.name = name
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def publish(self) -> None:
        """Until it is cancelled. Whoever connects hears what comes after."""
        try:
            for number in itertools.count(1):
                told = told_pass(self.name, asyncio.get_running_loop().time(), number=number, running=1)
                for message in ([b"noise"], framed(sealed(told, number))):
                    await self._socket.send_multipart(message)
                await asyncio.sleep(0.01)
        finally:
            self._socket.close()


@asynccontextmanager
async def workers(*names: str) -> AsyncIterator[list[Worker]]:
    context = zmq.asyncio.Context()
    made = [Worker(context, name) for name in names]
    tasks = [asyncio.create_task(one.publish()) for one in made]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.term()


def last(passes: HeardPasses, component: str) -> int | None:
    """The number of the last pass of the component's engine; None where that is missing."""
    (engine,) = (engine for engine in passes.seen().values() if engine.component == component)
    return None if isinstance(engine.last, Missing) else engine.last.counter_id


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not done():
            await asyncio.sleep(0.01)


@pytest.fixture
async def passes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeardPasses]:
    monkeypatch.setattr(hearing, "LOOK_EVERY_S", 0.02)
    heard = HeardPasses(AsyncioClock(), lambda: POOLS)
    yield heard
    await heard.close()
    await heard.close()


async def test_workers_are_heard_on_their_own_sockets_while_they_are_registered(passes: HeardPasses) -> None:
    async with workers("7", "8") as (decode, prefill):
        there = [worker_metadata("d", 7, channels=channel(decode.address))]
        failing = list[bool]()

        async def look() -> WorkerRegistrations:
            if failing:
                raise ApiAway("away")
            return registered(there, NAMESPACE)

        assert await passes.passes() == {}, "nobody is silent where there is nothing to listen to"
        await passes.follow(None, NAMESPACE, look)
        await until(lambda: last(passes, "D") is not None)
        assert last(passes, "P") is None
        there.append(worker_metadata("p", 8, "prefill", channels=channel(prefill.address, "prefill")))
        await until(lambda: last(passes, "P") is not None)
        assert set(await passes.passes()) == set(passes.seen())
        failing.append(True)
        heard = last(passes, "D") or 0
        await until(lambda: (last(passes, "D") or 0) > heard + 20)
        failing.clear()
        del there[0]
        await until(lambda: passes.registered.channels == {Channel("prefill", prefill.address)})
        left, goes_on = last(passes, "D"), last(passes, "P") or 0
        await until(lambda: (last(passes, "P") or 0) > goes_on + 20)
        assert last(passes, "D") == left


async def test_nobody_waits_for_a_worker_that_cannot_be_reached(passes: HeardPasses) -> None:
    async with workers("7") as (decode,):
        there = [
            worker_metadata("p", 8, "prefill", channels=channel("tcp://127.0.0.1:1", "prefill")),
            worker_metadata("d", 7, channels=channel(decode.address)),
        ]

        async def look() -> WorkerRegistrations:
            return registered(there, NAMESPACE)

        await passes.follow(None, NAMESPACE, look)
        await until(lambda: last(passes, "D") is not None)
        assert last(passes, "P") is None

"""One question of a planner to all workers, over a NATS in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_local.clock import HOLD_MAX_S
from dynamo_local.core.passes import EngineId
from dynamo_local.core.traffic import RECENT_MAX, Answered, Recent, RecentRequests
from dynamo_local.errors import DynamoError, NatsUnavailable
from dynamo_local.transport.observation import (
    MAX_PASSES,
    ObservationServer,
    Observed,
    Observer,
    Question,
    observe_subject,
    scatter,
)
from dynamo_local.transport.passes import PassRecorder
from tests.fakes.data_plane.passes import passed
from tests.fakes.infra.memory_nats import Callback, MemoryNats, MemoryNatsClient

Serve = Callable[..., Any]


class Workers:
    """Workers that answer, in one namespace."""

    def __init__(self) -> None:
        self.nats = MemoryNats()
        self.servers: list[ObservationServer] = []

    async def serve(self, name: str, worker_id: str = "7", **tells: Any) -> ObservationServer:
        client: Any = self.nats.client()
        server = ObservationServer(client, "dynamo", name, "Decode", lambda: worker_id, **tells)
        await server.start()
        self.servers.append(server)
        return server

    async def ask(self, question: Question, *expected: str, timeout_s: float = 5.0) -> dict[str, Observed]:
        client: Any = self.nats.client()
        return await Observer(client, "dynamo").ask(question, frozenset(expected), timeout_s)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers()
    yield made
    for server in made.servers:
        await server.close()


def counting(**counters: float) -> Callable[[], Any]:
    async def told() -> Mapping[str, float]:
        return counters

    return told


def recorded(count: int) -> PassRecorder:
    recorder = PassRecorder()
    for n in range(1, count + 1):
        recorder.record(passed(n, asyncio.get_running_loop().time(), worker=""))
    return recorder


async def test_all_answer_for_themselves_and_nobody_is_waited_for_longer(workers: Workers) -> None:
    await workers.serve("w1", counters=counting(requests=3.0), limits=lambda: {"max_num_seqs": 16, "dp_size": 0})
    await workers.serve("w2", counters=counting(requests=4.0))
    async with asyncio.timeout(5.0):
        heard = await workers.ask(Question(counters=True), "w1", "w2", timeout_s=60.0)
    assert {name: one.counters for name, one in heard.items()} == {"w1": {"requests": 3.0}, "w2": {"requests": 4.0}}
    assert heard["w1"].limits["max_num_seqs"] == 16
    assert heard["w1"].limits["dp_size"] is None
    assert heard["w1"].epoch != heard["w2"].epoch
    assert heard["w1"].passes is None


async def test_passes_are_told_once_under_the_workers_id(workers: Workers) -> None:
    recorder = recorded(5)
    await workers.serve("w1", passes=recorder)
    first = (await workers.ask(Question(passes=True), "w1"))["w1"].passes
    assert first is not None
    assert [(one.engine, one.counter_id) for one in first] == [(EngineId("7"), n) for n in range(1, 6)]
    again = (await workers.ask(Question(passes=True, after={"7/0": 4, "8/0": 1}), "w1"))["w1"].passes
    assert again is not None
    assert [one.counter_id for one in again] == [5]


async def test_an_answer_does_not_grow_with_the_passes(workers: Workers) -> None:
    await workers.serve("w1", passes=recorded(2000))
    told = (await workers.ask(Question(passes=True), "w1"))["w1"].passes
    assert told is not None
    assert len(told) == MAX_PASSES
    assert told[-1].counter_id == 2000


async def test_passes_keep_their_age(workers: Workers) -> None:
    recorder, now_s = PassRecorder(), asyncio.get_running_loop().time()
    recorder.record(passed(1, now_s - 2.5))
    await workers.serve("w1", passes=recorder)
    told = (await workers.ask(Question(passes=True), "w1"))["w1"].passes
    assert told is not None
    assert told[0].at_s == pytest.approx(now_s - 2.5, abs=0.1)


async def test_a_command_is_known_by_its_own_id(workers: Workers) -> None:
    recorder = recorded(1)
    recorder.worker_id = "4711"
    await workers.serve("w1", passes=recorder)
    told = (await workers.ask(Question(passes=True), "w1"))["w1"].passes
    assert told is not None
    assert told[0].engine == EngineId("4711")


async def test_a_worker_that_cannot_tell_is_absent(workers: Workers) -> None:
    async def silent() -> Mapping[str, float]:
        raise DynamoError("the command does not answer")

    async def broken() -> Mapping[str, float]:
        raise RuntimeError("a bug")

    await workers.serve("silent", counters=silent)
    await workers.serve("broken", counters=broken)
    await workers.serve("well", counters=counting(requests=1.0))
    heard = await workers.ask(Question(counters=True), "silent", "broken", "well", timeout_s=0.2)
    assert list(heard) == ["well"]
    await workers.ask(Question(passes=True), "silent", "broken", "well")


async def test_nonsense_is_neither_a_question_nor_an_answer(workers: Workers) -> None:
    await workers.serve("w1", counters=counting(requests=1.0))
    client: Any = workers.nats.client()
    for nonsense in (b"", b"\xc1", msgspec.msgpack.encode({"after": 3})):
        await client.publish(observe_subject("dynamo"), nonsense, reply="nobody")

    async def stranger(message: Any) -> None:
        await client.publish(message.reply, b"\xc1")

    await client.subscribe(observe_subject("dynamo"), cb=stranger)
    assert list(await workers.ask(Question(counters=True), "w1")) == ["w1"]


async def test_without_nats_nobody_can_be_asked(workers: Workers) -> None:
    workers.nats.up = False
    with pytest.raises(NatsUnavailable):
        await workers.ask(Question(counters=True), "w1")
    assert await workers.ask(Question(counters=True)) == {}


async def test_requests_are_told_one_by_one_to_who_asks_for_them(workers: Workers) -> None:
    recent = RecentRequests()
    for at_s in (1.0, 6.0, 9.0):
        recent.began(at_s)
    recent.answered(4.0, 10, 1, 0.2, None)
    recent.answered(8.0, 300, 20, 0.5, 0.01)
    await workers.serve("w1", requests=lambda window_s: recent.of(window_s, 10.0))
    await workers.serve("w2")
    heard = await workers.ask(Question(requests_s=5.0), "w1", "w2")
    assert heard["w1"].requests == Recent((4.0, 1.0), (Answered(2.0, 300, 20, 0.5, 0.01),))
    assert heard["w2"].requests is None
    assert (await workers.ask(Question(counters=True), "w1"))["w1"].requests is None


def test_more_requests_than_are_remembered_are_not_told_as_if_they_were_all() -> None:
    recent = RecentRequests()
    for n in range(RECENT_MAX):
        recent.began(float(n))
    assert recent.of(RECENT_MAX + 5.0, RECENT_MAX) is None
    few = recent.of(10.0, RECENT_MAX - 1.0)
    assert few is not None
    assert len(few.began_s) == 10


# --- scatter
# Answers that come together do not hold the asker's loop until the last one of them is read.

ANSWERS = 20
SUBJECT = "dynamo.load"


class InOneTask(MemoryNatsClient):
    """Gives all of a subscription's messages to its callback in one task, as nats-py does: without a pause while there
    are more."""

    async def publish(
        self, subject: str, data: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        (subscription,) = self.server.subscriptions
        self.giving = asyncio.create_task(self._give(subscription.callback))

    async def _give(self, callback: Callback) -> None:
        for _ in range(ANSWERS):
            await callback(SimpleNamespace(data=b"answer", headers=None))


async def test_others_have_the_loop_while_many_answers_are_read() -> None:
    loop = asyncio.get_running_loop()
    turns, taken = 0, 0

    def take(_: Any) -> bool:
        nonlocal taken
        until_s = loop.time() + HOLD_MAX_S
        while loop.time() < until_s:
            pass
        taken += 1
        return taken == ANSWERS

    async def other() -> None:
        nonlocal turns
        while taken < ANSWERS:
            turns += taken > 0
            await asyncio.sleep(0)

    client = InOneTask(MemoryNats())
    task = asyncio.create_task(other())
    nats: Any = client
    await scatter(nats, SUBJECT, b"", take, what="ask", timeout_s=30.0)
    await task
    await client.giving
    assert turns >= ANSWERS - 2, "between any two answers, as each takes as long as the loop may be held"

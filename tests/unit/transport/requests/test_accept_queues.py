"""Requests that wait for a worker to take them: how long, and that one question to NATS is enough for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from dynamo_local.errors import NatsUnavailable, WorkerLost
from dynamo_local.transport.requests.calls import AcceptQueue, AcceptQueues
from dynamo_local.transport.requests.listener import Offer
from dynamo_local.transport.requests.stream import InboundStream

SILENCE_S, INTERVAL_S = 5.0, 0.25
SUBJECT = "dynamo.worker.1"


def offer(subject: str = SUBJECT) -> Offer:
    """One to a worker of that subject."""
    return Offer("the worker", b"", subject)


class Watched:
    """A queue, and the time of a clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.queue = AcceptQueue(SUBJECT, "queue-1", INTERVAL_S, lambda: self.now_s)

    def joined(self) -> Offer:
        """A new offer at its end."""
        made = offer()
        self.queue.join(made, 0)
        return made

    def after(self, seconds: float, step_s: float = INTERVAL_S) -> list[Offer]:
        """Those that are silent by then, with a tick in every step."""
        silent: list[Offer] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + step_s)
            silent += [each for each in self.queue.tick(SILENCE_S) if each not in silent]
        return silent


async def test_a_worker_that_takes_nothing_is_silent():
    watched = Watched()
    first = watched.joined()
    assert watched.after(3.0) == []
    second = watched.joined()
    assert watched.after(2.0) == [first]
    watched.queue.leave(first, taken=False)
    assert watched.after(2.75) == []
    assert watched.after(0.25) == [second]


async def test_a_line_that_moves_is_waited_for():
    """A busy worker takes one after the other; the last of a hundred is not given up as long as it does."""
    watched = Watched()
    offers = [watched.joined() for _ in range(100)]
    for taken in offers[:-1]:
        assert watched.after(1.0) == []
        watched.queue.leave(taken, taken=True)
    assert watched.after(4.5) == []
    assert watched.after(0.5) == [offers[-1]]


async def test_who_was_overtaken_is_not_waited_for():
    watched = Watched()
    lost = watched.joined()
    for _ in range(5):
        later = watched.joined()
        assert watched.after(0.75) == []
        watched.queue.leave(later, taken=True)
    assert watched.after(1.0) == []
    assert watched.after(0.5) == [lost]


async def test_our_own_lateness_is_no_silence():
    watched = Watched()
    waiting = watched.joined()
    assert watched.after(60.0, step_s=15.0) == []
    assert watched.after(SILENCE_S) == [waiting]


class House:
    """Queues, and how often NATS was asked."""

    def __init__(self) -> None:
        self.queues = AcceptQueues(10.0, lambda who: WorkerLost(f"{who} is silent"), self.probe)
        self.probed: list[str] = []
        self.failure: NatsUnavailable | None = None
        self.asked = asyncio.Event()

    async def probe(self, queue: AcceptQueue) -> None:
        """NATS is asked."""
        self.probed.append(queue.name)
        self.asked.set()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Closed at the end."""
    made = House()
    yield made
    await made.queues.close()


async def test_one_question_for_a_whole_line(house: House):
    offers = [offer() for _ in range(1000)]
    with ExitStack() as waiting:
        for each in offers:
            waiting.enter_context(house.queues.waiting(each, 0))
        await asyncio.wait_for(house.asked.wait(), 5)
        assert len(house.probed) == 1
        queue = house.queues.named(house.probed[0])
        assert queue is not None
        queue.refuse(lambda who: WorkerLost(f"{who} is gone"))
        for each in offers:
            assert isinstance(each.answer.exception(), WorkerLost)
    assert house.queues.named(house.probed[0]) is None


async def test_where_nats_is_away_all_that_wait_are_told(house: House):
    house.failure = NatsUnavailable("not connected to NATS")
    offers = [offer(), offer()]
    with house.queues.waiting(offers[0], 0), house.queues.waiting(offers[1], 0):
        errors = [await asyncio.wait_for(asyncio.wait({each.answer}), 5) and each.answer.exception() for each in offers]
    assert [str(error) for error in errors] == [str(house.failure)] * 2
    assert errors[0] is not errors[1]


async def test_what_went_over_another_connection_is_refused(house: House):
    before, after = offer(), offer()
    with house.queues.waiting(before, 0), house.queues.waiting(after, 1):
        await asyncio.wait_for(house.asked.wait(), 5)
        queue = house.queues.named(house.probed[0])
        assert queue is not None
        queue.refuse(lambda _: NatsUnavailable("restarted"), unless_of=1)
        assert queue.open() == [after]
        assert isinstance(before.answer.exception(), NatsUnavailable)


async def test_a_worker_that_has_taken_something_lately_is_busy(house: House):
    taken, asked = offer(), offer("dynamo.worker.2")
    with house.queues.waiting(taken, 0), house.queues.waiting(asked, 0):
        taken.answer.set_result(InboundStream(lambda *_: None, lambda _: None))
    assert house.queues.is_taking(SUBJECT)
    assert not house.queues.is_taking("dynamo.worker.2")

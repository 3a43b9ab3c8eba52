"""Tests what every `PrefillQueue` does with entries that have to be begun by some time."""

from __future__ import annotations

import asyncio

from dynamo_local.core.routing.prompts import LATE_EVERY
from dynamo_local.ports import QueueDepth
from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue
from tests.contract.prefill_queue.queue_worlds import SOON_S, MakeQueue, SkewedClock, depth_becomes
from tests.fakes.infra.prefill_queue import FakePrefillQueue


async def take(queue: FakePrefillQueue | JetStreamPrefillQueue) -> str:
    """Pull one entry, and ack it."""
    pulled = await queue.pull(5)
    assert pulled is not None
    await pulled.ack()
    return pulled.task.request_id


async def test_what_can_keep_its_target_comes_before_what_cannot(make: MakeQueue) -> None:
    """Deadline first: an entry whose latest start has passed waits for the others, and for those that come later."""
    queue = make()
    await queue.enqueue("late", {}, deadline_s=60, start_within_s=-0.1)
    for name in ("r1", "r2"):
        await queue.enqueue(name, {}, deadline_s=60, start_within_s=30)
    await depth_becomes(queue, QueueDepth(3, 3))
    assert await take(queue) == "r1"
    await depth_becomes(queue, QueueDepth(pending=2, outstanding=2, late=1))
    await queue.enqueue("r3", {}, deadline_s=60, start_within_s=30)
    assert [await take(queue) for _ in range(3)] == ["r2", "r3", "late"]
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_an_entry_becomes_late_while_it_waits(make: MakeQueue) -> None:
    clock = SkewedClock()
    queue = make(clock=clock)
    await queue.enqueue("r1", {}, deadline_s=60, start_within_s=5)
    await queue.enqueue("r2", {}, deadline_s=60, start_within_s=30)
    await depth_becomes(queue, QueueDepth(2, 2))
    clock.ahead_s = 10
    assert [await take(queue), await take(queue)] == ["r2", "r1"]


async def test_a_late_entry_alone_is_pulled_at_once(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("late", {}, deadline_s=60, start_within_s=-1)
    assert await take(queue) == "late"


async def test_late_entries_never_starve(make: MakeQueue) -> None:
    """However many come that can keep their target, of so many turns in a row one is for what is late."""
    queue, order = make(), []
    await queue.enqueue("late", {}, deadline_s=60, start_within_s=-1)
    for i in range(2 * LATE_EVERY):
        await queue.enqueue(f"r{i}", {}, deadline_s=60, start_within_s=30)
        order.append(await take(queue))
        if order[-1] == "late":
            break
    assert order[-1] == "late"
    assert len(order) <= LATE_EVERY


async def test_a_late_entry_of_a_dead_worker_is_delivered_again(make: MakeQueue) -> None:
    """The second line keeps what the first keeps: acked after the work only, and attempts go on being counted."""
    queue = make(max_deliver=3)
    await queue.enqueue("late", {"n": 1}, deadline_s=60, start_within_s=-1)
    first = await queue.pull(5)  # alone, so it is not moved; its worker dies
    assert first is not None
    assert first.task.attempt == 1
    await first.nak()
    await queue.enqueue("r", {}, deadline_s=60, start_within_s=30)
    await depth_becomes(queue, QueueDepth(pending=1, outstanding=2))
    assert await take(queue) == "r"
    second = await queue.pull(5)
    assert second is not None
    assert (second.task.request_id, second.task.attempt, second.task.payload) == ("late", 2, {"n": 1})
    third = await make(max_deliver=3).pull(10)  # after ack_wait
    assert third is not None
    assert (third.task.request_id, third.task.attempt) == ("late", 3)
    await third.ack()
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_a_late_entry_can_be_cancelled(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("late", {}, deadline_s=60, start_within_s=-1)
    await queue.enqueue("r1", {}, deadline_s=60, start_within_s=30)
    await depth_becomes(queue, QueueDepth(2, 2))
    assert await take(queue) == "r1"
    await make().cancel("late")
    await depth_becomes(queue, QueueDepth(0, 0))
    assert await queue.pull(SOON_S) is None


async def test_late_and_other_entries_go_to_exactly_one_of_many_pullers(make: MakeQueue) -> None:
    queue, got = make(ack_wait_s=30.0), []

    async def work() -> None:
        worker = make(ack_wait_s=30.0)
        while (pulled := await worker.pull(SOON_S)) is not None:
            got.append(pulled.task.request_id)
            await pulled.ack()

    for i in range(30):
        await queue.enqueue(f"r{i}", {}, deadline_s=60, start_within_s=-1 if i % 3 == 0 else 30)
    await asyncio.gather(*(work() for _ in range(4)))
    assert sorted(got) == sorted(f"r{i}" for i in range(30))
    await depth_becomes(queue, QueueDepth(0, 0))

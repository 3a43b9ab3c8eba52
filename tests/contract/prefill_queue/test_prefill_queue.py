"""Tests what every `PrefillQueue` does: the one in memory, and the one on a real JetStream."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from dynamo_local.clock import AsyncioClock
from dynamo_local.errors import InvalidRequest, NatsUnavailable
from dynamo_local.ports import QueueDepth
from dynamo_local.system.request_log import bound
from dynamo_local.transport.nats import close_quietly
from dynamo_local.transport.prefill_queue import keep_in_progress
from tests.contract.prefill_queue.queue_worlds import (
    ACK_WAIT_S,
    MAX_DELIVER,
    SOON_S,
    MakeQueue,
    SkewedClock,
    depth_becomes,
)
from tests.fakes.infra.prefill_queue import FakePrefillQueue


async def test_an_entry_comes_out_as_it_went_in(make: MakeQueue) -> None:
    payload = {
        "request": {"prompt_token_ids": list(range(5)), "sampling": {"max_tokens": 1}},
        "reply": {"subject": "x"},
    }
    await make().enqueue("r.1/ü", payload, deadline_s=10)
    pulled = await make().pull(5)
    assert pulled is not None
    assert (pulled.task.request_id, pulled.task.payload, pulled.task.attempt) == ("r.1/ü", payload, 1)


async def test_a_prompt_of_128k_tokens_fits(make: MakeQueue) -> None:
    ids = [151_000 + i % 1000 for i in range(131_072)]
    await make().enqueue("r", {"prompt_token_ids": ids}, deadline_s=10)
    pulled = await make().pull(5)
    assert pulled is not None
    assert pulled.task.payload["prompt_token_ids"] == ids


async def test_an_entry_over_the_bound_is_refused(make: MakeQueue) -> None:
    """What NATS would not take is an `InvalidRequest` that says how large it is, and nothing is queued."""
    queue = make()
    with pytest.raises(InvalidRequest, match=r"12,000,0\d\d bytes is over the .* bytes that NATS takes"):
        await queue.enqueue("r", {"prompt_token_ids": [1] * 3_000_000}, deadline_s=10)
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_entries_come_in_order_and_one_at_a_time(make: MakeQueue) -> None:
    queue, other = make(), make()
    for name in ("r1", "r2", "r3"):
        await queue.enqueue(name, {}, deadline_s=10)
    first = await queue.pull(5)
    await depth_becomes(queue, QueueDepth(pending=2, outstanding=3))
    second = await other.pull(5)
    assert first is not None
    assert second is not None
    assert [first.task.request_id, second.task.request_id] == ["r1", "r2"]
    await depth_becomes(queue, QueueDepth(pending=1, outstanding=3))


async def test_depth_counts_until_the_ack(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r", {}, deadline_s=10)
    await depth_becomes(queue, QueueDepth(1, 1))
    pulled = await queue.pull(5)
    assert pulled is not None
    await depth_becomes(queue, QueueDepth(0, 1))
    await pulled.ack()
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_pull_of_nothing_is_none(make: MakeQueue) -> None:
    assert await make().pull(SOON_S) is None


async def test_a_waiting_pull_gets_what_comes(make: MakeQueue) -> None:
    waiting = asyncio.create_task(make().pull(10))
    await asyncio.sleep(0)
    await make().enqueue("r", {}, deadline_s=10)
    pulled = await asyncio.wait_for(waiting, 5)
    assert pulled is not None
    assert pulled.task.request_id == "r"


async def test_every_entry_goes_to_exactly_one_of_many_pullers(make: MakeQueue) -> None:
    queue, got = make(), []

    async def work() -> None:
        worker = make()
        while (pulled := await worker.pull(SOON_S)) is not None:
            got.append(pulled.task.request_id)
            await pulled.ack()

    for i in range(20):
        await queue.enqueue(f"r{i}", {}, deadline_s=10)
    await asyncio.gather(*(work() for _ in range(4)))
    assert sorted(got) == sorted(f"r{i}" for i in range(20))


async def test_a_dead_workers_entry_is_delivered_again_after_ack_wait(make: MakeQueue) -> None:
    """Acked only after the work, so that a worker's death loses nothing."""
    queue = make()
    await queue.enqueue("r", {"n": 1}, deadline_s=10)
    first = await queue.pull(5)  # and is never heard of again
    assert first is not None
    assert await make().pull(ACK_WAIT_S / 4) is None
    second = await make().pull(5)
    assert second is not None
    assert (second.task.request_id, second.task.attempt, second.task.payload) == ("r", 2, {"n": 1})


async def test_in_progress_keeps_an_entry(make: MakeQueue) -> None:
    queue, other = make(), make()
    await queue.enqueue("r", {}, deadline_s=10)
    pulled = await queue.pull(5)
    assert pulled is not None
    async with keep_in_progress(pulled, ACK_WAIT_S):
        assert await other.pull(2.5 * ACK_WAIT_S) is None
    await pulled.ack()
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_nak_gives_the_entry_back_at_once(make: MakeQueue) -> None:
    queue = make(ack_wait_s=60.0)
    await queue.enqueue("r", {}, deadline_s=10)
    pulled = await queue.pull(5)
    assert pulled is not None
    await pulled.nak()
    again = await queue.pull(5)
    assert again is not None
    assert again.task.attempt == 2


async def test_a_delayed_nak_waits(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r", {}, deadline_s=10)
    pulled = await queue.pull(5)
    assert pulled is not None
    await pulled.nak(0.5)
    assert await queue.pull(SOON_S) is None
    assert await queue.pull(5) is not None


async def test_an_entry_that_nobody_finishes_becomes_a_dead_letter(make: MakeQueue) -> None:
    """After `max_deliver` attempts it is handed out no more, is visible, and is counted nowhere."""
    queue = make()
    await queue.enqueue("poison", {"prompt_token_ids": [1]}, deadline_s=30)
    for attempt in range(1, MAX_DELIVER + 1):
        pulled = await queue.pull(5)
        assert pulled is not None
        assert pulled.task.attempt == attempt
        await pulled.nak()
    assert await queue.pull(SOON_S) is None
    await depth_becomes(queue, QueueDepth(0, 0))
    [letter] = await make().dead_letters()
    assert (letter.request_id, letter.run_id, letter.attempts) == ("poison", "a", MAX_DELIVER)
    assert "2 attempts" in letter.reason
    assert abs(letter.died_at_s - AsyncioClock().wall_s()) < 60


async def test_no_dead_letters_is_an_empty_list(make: MakeQueue) -> None:
    assert await make().dead_letters() == []


async def test_a_cancelled_entry_is_never_pulled(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r1", {}, deadline_s=10)
    await queue.enqueue("r2", {}, deadline_s=10)
    await make().cancel("r1")
    await depth_becomes(queue, QueueDepth(1, 1))
    pulled = await queue.pull(5)
    assert pulled is not None
    assert pulled.task.request_id == "r2"


async def test_cancelling_in_flight_stops_redelivery(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r", {}, deadline_s=10)
    pulled = await queue.pull(5)
    assert pulled is not None
    await queue.cancel("r")
    await depth_becomes(queue, QueueDepth(0, 0))
    assert await make().pull(1.5 * ACK_WAIT_S) is None
    await pulled.ack()


async def test_cancelling_what_is_not_there_is_no_error(make: MakeQueue) -> None:
    queue = make()
    await queue.cancel("never seen")
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_an_expired_entry_is_dropped_unprefilled(make: MakeQueue) -> None:
    """Its decode side has long since prefilled locally; the next live one is handed out."""
    clock = SkewedClock()
    queue = make(clock=clock)
    await queue.enqueue("old", {}, deadline_s=5)
    await queue.enqueue("live", {}, deadline_s=60)
    clock.ahead_s = 10
    pulled = await queue.pull(5)
    assert pulled is not None
    assert pulled.task.request_id == "live"
    await pulled.ack()
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_no_entry_expires_because_the_time_of_day_is_set(make: MakeQueue) -> None:
    clock = SkewedClock()
    queue = make(clock=clock)
    await queue.enqueue("r", {}, deadline_s=5, start_within_s=1)
    clock.set_by_s = 3600
    pulled = await queue.pull(5)
    assert pulled is not None
    assert pulled.task.request_id == "r"
    await pulled.ack()


async def test_enqueuing_twice_adds_one_entry(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r", {}, deadline_s=10)
    await queue.enqueue("r", {}, deadline_s=10)
    await depth_becomes(queue, QueueDepth(1, 1))


async def test_a_runs_start_purges_what_earlier_runs_left(make: MakeQueue) -> None:
    """Stale entries of the last run do not jam this one; its own stay."""
    old, new = make("old"), make("new")
    await old.enqueue("stale waiting", {}, deadline_s=60)
    await old.enqueue("stale in flight", {}, deadline_s=60)
    assert await old.pull(5) is not None
    await new.enqueue("fresh", {}, deadline_s=60)
    await new.start(purge_stale=True)
    await depth_becomes(new, QueueDepth(1, 1))
    pulled = await new.pull(5)
    assert pulled is not None
    assert pulled.task.request_id == "fresh"


async def test_start_purges_other_runs_dead_letters(make: MakeQueue) -> None:
    """`dead_letters` shows entries of this run only."""
    old, new = make("old"), make("new")
    await old.enqueue("poison", {}, deadline_s=60)
    for _ in range(MAX_DELIVER):
        pulled = await old.pull(5)
        assert pulled is not None
        await pulled.nak()
    assert await old.pull(SOON_S) is None
    assert len(await new.dead_letters()) == 1
    await new.start(purge_stale=True)
    assert await new.dead_letters() == []


async def test_start_without_purge_keeps_everything(make: MakeQueue) -> None:
    queue = make()
    await queue.enqueue("r", {}, deadline_s=60)
    await make("b").start()
    await depth_becomes(queue, QueueDepth(1, 1))


async def test_an_entry_of_another_run_is_dropped_by_the_consumer(make: MakeQueue) -> None:
    """Also one that an orphan of the last run enqueued after the purge."""
    orphan, queue = make("old"), make("new")
    await queue.start(purge_stale=True)
    await orphan.enqueue("stale", {}, deadline_s=60)
    assert await queue.pull(SOON_S) is None
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_one_request_id_in_two_runs_is_two_entries(make: MakeQueue) -> None:
    old, new = make("old"), make("new")
    await old.enqueue("r", {}, deadline_s=60)
    await new.enqueue("r", {}, deadline_s=60)
    await depth_becomes(new, QueueDepth(2, 2))
    await old.cancel("r")
    pulled = await new.pull(5)
    assert pulled is not None
    assert pulled.task.request_id == "r"


async def test_what_cannot_be_encoded_is_refused(make: MakeQueue) -> None:
    queue = make()
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        await queue.enqueue("r", {"prompt_token_ids": [2**40]}, deadline_s=10)
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        await queue.enqueue("r", {"x": object()}, deadline_s=10)


async def test_an_unreachable_server_is_never_an_empty_queue(make: MakeQueue, connection: Client | None) -> None:
    """Missing is not zero. Every call says `NatsUnavailable`."""
    queue = make()
    await queue.enqueue("r", {}, deadline_s=10)
    if connection is None:
        assert isinstance(queue, FakePrefillQueue)
        queue.server.available = False
    else:
        await close_quietly(connection)
    for call in (
        queue.depth(),
        queue.pull(1),
        queue.cancel("r"),
        queue.dead_letters(),
        queue.enqueue("s", {}, deadline_s=1),
        queue.start(),
    ):
        with pytest.raises(NatsUnavailable):
            await call


async def test_an_entry_carries_the_clients_request_id(make: MakeQueue) -> None:
    queue = make()
    with bound("order/4711:a%20b"):
        await queue.enqueue("r-1", {"n": 1}, deadline_s=60.0)
    await queue.enqueue("r-2", {"n": 2}, deadline_s=60.0)
    pulled = [await queue.pull(5.0), await queue.pull(5.0)]
    found = {task.task.request_id: task.task.x_request_id for task in pulled if task is not None}
    assert found == {"r-1": "order/4711:a%20b", "r-2": ""}

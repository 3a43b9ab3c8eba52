"""The JetStream prefill queue when servers restart, pulls are cancelled, and entries are not ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client

from dynamo_local.errors import NatsUnavailable, WorkerBusy
from dynamo_local.ports import QueueDepth
from dynamo_local.transport import prefill_queue
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue
from tests.contract.prefill_queue.queue_worlds import depth_becomes
from tests.drivers.servers import RealNats

pytestmark = pytest.mark.infra


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Poll until the condition holds; an unreachable server is "not yet"."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if await condition():
                    return
            except NatsUnavailable:
                pass  # the server is away: that is what the caller waits out
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def queue_on(server: RealNats, **options: Any) -> AsyncIterator[JetStreamPrefillQueue]:
    """A queue with a connection of its own to that server."""
    nats = await connect_nats(server.url, server.access, name="test")
    queue = JetStreamPrefillQueue(nats, "ns", "run", **options)
    try:
        yield queue
    finally:
        await queue.close()
        await close_quietly(nats)


async def enqueue_at_last(queue: JetStreamPrefillQueue) -> None:
    """The entry "r", as soon as the server takes it."""

    async def enqueued() -> bool:
        await queue.enqueue("r", {}, deadline_s=60)
        return True

    await until(enqueued)


@pytest.fixture
async def nats(nats_server: RealNats) -> AsyncIterator[Client]:
    client = await connect_nats(nats_server.url, nats_server.access, name="test")
    yield client
    await close_quietly(client)


@pytest.fixture
async def queue(nats: Client, namespace: str) -> AsyncIterator[JetStreamPrefillQueue]:
    """A queue with a long ack_wait: what comes back sooner was given back."""
    made = JetStreamPrefillQueue(nats, namespace, "run", ack_wait_s=60.0)
    await made.start()
    yield made
    await made.close()


async def test_a_server_restart_changes_nothing(own_nats: RealNats) -> None:
    async with queue_on(own_nats, ack_wait_s=60.0, max_deliver=1) as queue:
        await queue.enqueue("dead", {}, deadline_s=120)
        dying = await queue.pull(5)
        assert dying is not None
        await dying.nak()
        assert await queue.pull(0.1) is None
        for i in range(3):
            await queue.enqueue(f"r{i}", {"prompt_token_ids": [i]}, deadline_s=120)
        pulled = await queue.pull(5)
        assert pulled is not None
        await own_nats.stop()
        with pytest.raises(NatsUnavailable):
            await queue.depth()
        await own_nats.start()

        async def same_depth() -> bool:
            return await queue.depth() == QueueDepth(2, 3)

        await until(same_depth)
        await pulled.ack()
        await depth_becomes(queue, QueueDepth(2, 2))
        rest = [await queue.pull(5), await queue.pull(5)]
        assert [p.task.payload["prompt_token_ids"] for p in rest if p] == [[1], [2]]
        assert [letter.request_id for letter in await queue.dead_letters()] == ["dead"]


async def test_a_killed_server_loses_no_entry(own_nats: RealNats) -> None:
    """`kill -9` may cost the server's note of what was in flight, which is then delivered again."""
    async with queue_on(own_nats, ack_wait_s=1.0) as queue:
        for i in range(20):
            await queue.enqueue(f"r{i}", {"prompt_token_ids": [i]}, deadline_s=120)
        assert await queue.pull(5) is not None
        await own_nats.restart()

        async def all_there() -> bool:
            return (await queue.depth()).outstanding == 20

        await until(all_there)
        got = set()
        async with asyncio.timeout(20):
            while len(got) < 20:
                pulled = await queue.pull(5)
                assert pulled is not None
                got.add(pulled.task.request_id)
                await pulled.ack()
        assert got == {f"r{i}" for i in range(20)}
        await depth_becomes(queue, QueueDepth(0, 0))


async def test_streams_are_made_again_when_the_server_lost_its_data(own_nats: RealNats) -> None:
    async with queue_on(own_nats) as queue:
        await queue.start()
        await own_nats.restart(lose_data=True)
        await enqueue_at_last(queue)
        pulled = await queue.pull(10)
        assert pulled is not None
        assert pulled.task.request_id == "r"


async def test_queues_of_two_names_are_two_queues(own_nats: RealNats) -> None:
    async with queue_on(own_nats, name="a") as one, queue_on(own_nats, name="b") as other:
        await enqueue_at_last(one)
        assert await other.pull(0.2) is None
        pulled = await one.pull(10)
        assert pulled is not None
        await pulled.ack()


async def depth_until_it_fails(queue: JetStreamPrefillQueue) -> None:
    """SIGSTOP does not reach all threads of the server at once: a first call may still be answered."""
    while True:
        await queue.depth()


async def test_calls_fail_within_their_deadline_while_the_server_hangs(own_nats: RealNats) -> None:
    async with queue_on(own_nats) as queue:
        await queue.start()
        own_nats.pause()
        async with asyncio.timeout(10):
            with pytest.raises(NatsUnavailable, match="could not read the depth of ns_prefill_queue"):
                await depth_until_it_fails(queue)
            with pytest.raises(NatsUnavailable, match="could not enqueue the prefill of r"):
                await queue.enqueue("r", {}, deadline_s=0.2)
        own_nats.resume()

        async def answers() -> bool:
            return (await queue.depth()).outstanding <= 1  # the paused enqueue may or may not have been stored

        await until(answers)
        await queue.cancel("r")
        await depth_becomes(queue, QueueDepth(0, 0))


async def test_an_entry_for_a_cancelled_pull_goes_to_another_worker_at_once(
    queue: JetStreamPrefillQueue, nats: Client, namespace: str
) -> None:
    other = JetStreamPrefillQueue(nats, namespace, "run", ack_wait_s=60.0)
    await other.start()
    pulling = asyncio.create_task(queue.pull(30))
    await until_waiting(queue, nats)
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    await other.enqueue("r", {}, deadline_s=60)
    pulled = await other.pull(10)
    assert pulled is not None
    assert (pulled.task.request_id, pulled.task.attempt) == ("r", 2)
    await other.close()


async def until_waiting(queue: JetStreamPrefillQueue, nats: Client) -> None:

    async def waits() -> bool:
        info = await nats.jetstream().consumer_info(queue.stream, prefill_queue.CONSUMER)
        return bool(info.num_waiting)

    await until(waits)


async def test_what_is_no_entry_becomes_a_dead_letter(
    queue: JetStreamPrefillQueue, nats: Client, namespace: str
) -> None:
    headers = {"Dynamo-Run-Id": "run", "Dynamo-Request-Id": "r"}
    await nats.jetstream().publish(f"{namespace}_prefill_queue.run.r", b"\xc1garbage", headers=headers)
    assert await queue.pull(0.2) is None
    [letter] = await queue.dead_letters()
    assert letter.request_id == "r"
    assert "not a prefill entry" in letter.reason
    await depth_becomes(queue, QueueDepth(0, 0))


async def test_a_full_queue_refuses(nats: Client, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_ENTRIES", 2)
    queue = JetStreamPrefillQueue(nats, namespace, "run")
    await queue.enqueue("r1", {}, deadline_s=60)
    await queue.enqueue("r2", {}, deadline_s=60)
    with pytest.raises(WorkerBusy, match="full; prefill locally"):
        await queue.enqueue("r3", {}, deadline_s=60)
    await depth_becomes(queue, QueueDepth(2, 2))


async def test_dead_letters_are_bounded(nats: Client, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_DEAD_LETTERS", 3)
    queue = JetStreamPrefillQueue(nats, namespace, "run", max_deliver=0)
    for i in range(5):
        await queue.enqueue(f"r{i}", {}, deadline_s=60)
    assert await queue.pull(0.3) is None
    assert [letter.request_id for letter in await queue.dead_letters()] == ["r2", "r3", "r4"]
    await queue.close()


async def test_purging_touches_no_other_namespace(nats: Client, namespace: str) -> None:
    ours = JetStreamPrefillQueue(nats, namespace, "new")
    theirs = JetStreamPrefillQueue(nats, f"{namespace}_x", "old")
    await theirs.enqueue("r", {}, deadline_s=60)
    await ours.start(purge_stale=True)
    await depth_becomes(theirs, QueueDepth(1, 1))


async def test_a_changed_configuration_is_applied_to_what_exists(nats: Client, namespace: str) -> None:
    await JetStreamPrefillQueue(nats, namespace, "old", ack_wait_s=5.0).start()
    await JetStreamPrefillQueue(nats, namespace, "new", ack_wait_s=7.0).start(purge_stale=True)
    info = await nats.jetstream().consumer_info(f"{namespace}_prefill_queue", prefill_queue.CONSUMER)
    assert info.config.ack_wait == 7.0


async def test_a_deleted_queue_leaves_nothing_and_comes_back_at_next_use(nats_server: RealNats, namespace: str) -> None:
    nats = await connect_nats(nats_server.url, nats_server.access)
    try:
        queue = JetStreamPrefillQueue(nats, namespace, "run1")
        await queue.enqueue("r1", {"token_ids": [1, 2, 3]}, deadline_s=60)
        await queue.delete()
        names = [info.config.name for info in await nats.jetstream().streams_info()]
        assert not [name for name in names if name.startswith(namespace)]
        await queue.delete()
        await queue.enqueue("r2", {"token_ids": [1]}, deadline_s=60)
        assert (await queue.depth()).pending == 1
        await queue.close()
    finally:
        await close_quietly(nats)

"""Prefill results on their way back to the decode worker, over a real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.client import Client

from dynamo_local.errors import (
    DeadlineExceeded,
    EngineError,
    KvTransferError,
    NatsUnavailable,
    RequestCancelled,
    WorkerLost,
)
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.prefill_replies import PrefillReplies
from tests.drivers.servers import RealNats

pytestmark = pytest.mark.infra

RESULT = {"first_token_id": 7, "kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1, 2]}}


@pytest.fixture
async def nats(nats_server: RealNats) -> AsyncIterator[Client]:
    client = await connect_nats(nats_server.url, nats_server.access, name="prefill")
    yield client
    await close_quietly(client)


@pytest.fixture
async def decode(nats_server: RealNats, namespace: str) -> AsyncIterator[PrefillReplies]:
    client = await connect_nats(nats_server.url, nats_server.access, name="decode")
    replies = PrefillReplies(client, namespace)
    await replies.start()
    yield replies
    await replies.close()
    await close_quietly(client)


@pytest.fixture
def prefill(nats: Client, namespace: str) -> PrefillReplies:
    return PrefillReplies(nats, namespace)


async def test_a_result_reaches_who_expects_it(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r1") as one, decode.expect("r2") as two:
        await prefill.send_reply(decode.reply_subject, "r2", {"n": 2})
        await prefill.send_reply(decode.reply_subject, "r1", RESULT)
        assert await one.wait(5) == RESULT
        assert await two.wait(5) == {"n": 2}


async def test_an_error_is_raised_at_the_decode_side(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    """Its type tells a retryable error from a final one."""
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_subject, "r", EngineError("out of memory"))
        with pytest.raises(EngineError, match="out of memory"):
            await reply.wait(5)


async def test_waiting_has_a_deadline(decode: PrefillReplies) -> None:
    with decode.expect("r") as reply, pytest.raises(DeadlineExceeded, match="prefill it locally"):
        await reply.wait(0.05)


async def test_a_late_reply_is_refused(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r") as reply, pytest.raises(DeadlineExceeded):
        await reply.wait(0.0)
    with pytest.raises(RequestCancelled, match="free its KV"):
        await prefill.send_reply(decode.reply_subject, "r", RESULT)


async def test_the_second_workers_reply_is_refused(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_subject, "r", {"from": 1})
        with pytest.raises(RequestCancelled):
            await prefill.send_reply(decode.reply_subject, "r", {"from": 2})
        assert await reply.wait(5) == {"from": 1}
    with pytest.raises(RequestCancelled):
        await prefill.send_reply(decode.reply_subject, "r", {"from": 3})


async def test_the_same_reply_again_is_confirmed_again(decode: PrefillReplies, nats: Client) -> None:
    message = msgspec.msgpack.encode({"request_id": "r", "reply_id": "one", "result": RESULT})
    with decode.expect("r") as reply:
        answers = [(await nats.request(decode.reply_subject, message, timeout=5)).data for _ in range(2)]
        assert answers == [b"accepted", b"accepted"]
        assert await reply.wait(5) == RESULT


async def test_a_decode_worker_that_is_gone_is_told_apart(prefill: PrefillReplies, decode: PrefillReplies) -> None:
    await decode.close()
    async with asyncio.timeout(1.0):
        with pytest.raises(WorkerLost, match="free its KV"):
            await prefill.send_reply(decode.reply_subject, "r", RESULT)


async def test_a_decode_worker_that_dies_before_confirming_is_lost(
    prefill: PrefillReplies, nats: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_local.transport.prefill_replies.SEND_TIMEOUT_S", 0.1)
    subscription = await nats.subscribe(f"{namespace}.prefill_replies.x")  # listens, and never answers
    sending = asyncio.create_task(prefill.send_reply(f"{namespace}.prefill_replies.x", "r", RESULT))
    await subscription.next_msg(5)
    await subscription.unsubscribe()
    with pytest.raises(WorkerLost):
        await sending


async def test_garbage_does_not_end_the_listener(decode: PrefillReplies, prefill: PrefillReplies, nats: Client) -> None:
    for garbage in (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"request_id": "r"})):
        await nats.publish(decode.reply_subject, garbage)
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_subject, "r", KvTransferError("expired"))
        with pytest.raises(KvTransferError):
            await reply.wait(5)


async def test_expecting_needs_a_listener_and_one_waiter_per_id(
    decode: PrefillReplies, prefill: PrefillReplies
) -> None:
    with pytest.raises(RuntimeError, match="before start"):
        prefill.expect("r")
    with decode.expect("r"), pytest.raises(RuntimeError, match="awaited already"):
        decode.expect("r")


async def test_a_reply_outlives_a_restart_of_nats(own_nats: RealNats) -> None:
    connections = [await connect_nats(own_nats.url, own_nats.access, name=name) for name in ("d", "p")]
    decode, prefill = (PrefillReplies(connection, "ns") for connection in connections)
    try:
        await decode.start()
        with decode.expect("r") as reply:
            await own_nats.kill()
            sending = asyncio.create_task(prefill.send_reply(decode.reply_subject, "r", RESULT))
            await own_nats.start()
            await sending
            assert await reply.wait(5) == RESULT
    finally:
        await decode.close()
        for connection in connections:
            await close_quietly(connection)


async def test_sending_without_nats_ends_with_its_deadline(own_nats: RealNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_local.transport.prefill_replies.SEND_DEADLINE_S", 0.3)
    connection = await connect_nats(own_nats.url, own_nats.access, name="p")
    try:
        await own_nats.kill()
        with pytest.raises(NatsUnavailable, match="could not send the prefill result of r"):
            await PrefillReplies(connection, "ns").send_reply("ns.prefill_replies.x", "r", RESULT)
    finally:
        await close_quietly(connection)

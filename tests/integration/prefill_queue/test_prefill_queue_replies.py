"""Prefill results on their way back to the decode worker, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from dynamo_local.errors import (
    DeadlineExceeded,
    EngineError,
    InfraUnavailable,
    KillsWorkers,
    KvTransferError,
    RequestCancelled,
    WorkerLost,
)
from dynamo_local.transport import prefill_replies
from dynamo_local.transport.prefill_replies import NAMES, ExpectedReply, PrefillReplies
from dynamo_local.transport.requests.frames import FrameDecoder, FrameKind, frame
from tests.drivers.eventually import eventually

RESULT = {"first_token_id": 7, "kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1, 2]}}


@pytest.fixture
async def decode() -> AsyncIterator[PrefillReplies]:
    replies = PrefillReplies()
    await replies.start()
    yield replies
    await replies.close()


@pytest.fixture
async def prefill() -> AsyncIterator[PrefillReplies]:
    replies = PrefillReplies()
    yield replies
    await replies.close()


@contextlib.asynccontextmanager
async def silent_worker() -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A decode worker that takes connections, and answers nothing."""
    name, writers = f"{NAMES}test-{os.getpid()}", list[asyncio.StreamWriter]()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            await reader.read()  # to its end
        writer.close()

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    server = await asyncio.start_unix_server(served, sock=sock)
    try:
        yield name, writers
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


async def asked(replies: PrefillReplies, *frames: bytes) -> list[tuple[int, int]]:
    """Kinds and numbers of the answers to these frames, one after the other, on one connection."""
    reader, writer = await asyncio.open_unix_connection(f"\0{replies.reply_to}")
    found, decoder = list[tuple[int, int]](), FrameDecoder()
    try:
        for each in frames:
            writer.write(each)
            found += [(kind, number) for kind, number, _ in decoder.feed(await reader.read(100))]
    finally:
        writer.close()
        await writer.wait_closed()
    return found


async def test_a_result_reaches_who_expects_it(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r1") as one, decode.expect("r2") as two:
        await prefill.send_reply(decode.reply_to, "r2", {"n": 2})
        await prefill.send_reply(decode.reply_to, "r1", RESULT)
        assert await one.wait(5) == RESULT
        assert await two.wait(5) == {"n": 2}


async def test_an_error_is_raised_at_the_decode_side(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    """Its type tells a retryable error from a final one."""
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_to, "r", EngineError("out of memory"))
        with pytest.raises(EngineError, match="out of memory"):
            await reply.wait(5)


async def test_waiting_has_a_deadline(decode: PrefillReplies) -> None:
    with decode.expect("r") as reply, pytest.raises(DeadlineExceeded, match="prefill it locally"):
        await reply.wait(0.05)


async def test_it_is_known_who_takes_no_replies_any_more(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    address = decode.reply_to
    assert await prefill.begin(address, "r")
    with decode.expect("r"):
        await prefill.send_reply(address, "r", RESULT)
    assert await prefill.begin(address, "r")
    await decode.close()
    async with asyncio.timeout(5):
        while await prefill.begin(address, "r"):
            await asyncio.sleep(0)
    assert not await prefill.begin("some-other-socket", "r")


async def test_two_that_begin_at_once_keep_one_connection(prefill: PrefillReplies) -> None:
    async with silent_worker() as (name, writers):
        assert await asyncio.gather(prefill.begin(name, "r1"), prefill.begin(name, "r2")) == [True, True]
        await eventually(lambda: len(writers) == 2 and any(writer.transport.is_closing() for writer in writers))
        assert [writer.transport.is_closing() for writer in writers].count(False) == 1


async def begun_and_dead(decode: PrefillReplies, expected: ExpectedReply, *, gives_back: bool = False) -> None:
    """A prefill worker begins with the request, and dies."""
    worker = PrefillReplies()
    assert await worker.begin(decode.reply_to, expected.request_id)
    await eventually(lambda: expected.holder is not None)
    if gives_back:
        worker.give_back(decode.reply_to, expected.request_id)
        await eventually(lambda: expected.holder is None)
    await worker.close()
    await eventually(lambda: expected.holder is None)


async def test_a_request_that_two_prefill_workers_die_of_gets_no_third(decode: PrefillReplies) -> None:
    with decode.expect("r") as reply:
        for _ in range(2):
            await begun_and_dead(decode, reply)
        with pytest.raises(KillsWorkers, match="2 prefill workers were lost"):
            await reply.wait(1)


async def test_workers_that_gave_a_request_back_before_they_went_do_not_count(
    decode: PrefillReplies, prefill: PrefillReplies
) -> None:
    with decode.expect("r") as reply:
        for gives_back in (True, True, False):
            await begun_and_dead(decode, reply, gives_back=gives_back)
        await prefill.send_reply(decode.reply_to, "r", RESULT)
        assert await reply.wait(1) == RESULT


async def test_a_late_reply_is_refused(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r") as reply, pytest.raises(DeadlineExceeded):
        await reply.wait(0.0)
    with pytest.raises(RequestCancelled, match="free its KV"):
        await prefill.send_reply(decode.reply_to, "r", RESULT)


async def test_the_second_workers_reply_is_refused(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_to, "r", {"from": 1})
        with pytest.raises(RequestCancelled):
            await prefill.send_reply(decode.reply_to, "r", {"from": 2})
        assert await reply.wait(5) == {"from": 1}
    with pytest.raises(RequestCancelled):
        await prefill.send_reply(decode.reply_to, "r", {"from": 3})


async def test_the_same_reply_again_is_confirmed_again(decode: PrefillReplies) -> None:
    message = msgspec.msgpack.encode({"request_id": "r", "reply_id": "one", "result": RESULT})
    with decode.expect("r") as reply:
        answers = await asked(decode, frame(FrameKind.DATA, 7, message), frame(FrameKind.DATA, 8, message))
        assert answers == [(FrameKind.TAKEN, 7), (FrameKind.TAKEN, 8)]
        assert await reply.wait(5) == RESULT


async def test_a_decode_worker_that_is_gone_is_told_apart(prefill: PrefillReplies, decode: PrefillReplies) -> None:
    await decode.close()
    async with asyncio.timeout(1.0):
        with pytest.raises(WorkerLost, match="free its KV"):
            await prefill.send_reply(decode.reply_to, "r", RESULT)


async def test_a_decode_worker_that_goes_after_a_reply_is_told_apart(
    prefill: PrefillReplies, decode: PrefillReplies
) -> None:
    """The connection was kept, and has ended."""
    with decode.expect("r"):
        await prefill.send_reply(decode.reply_to, "r", RESULT)
    await decode.close()
    async with asyncio.timeout(1.0):
        with pytest.raises(WorkerLost, match="free its KV"):
            await prefill.send_reply(decode.reply_to, "r2", RESULT)


async def test_a_decode_worker_that_dies_before_confirming_is_lost(prefill: PrefillReplies) -> None:
    async with silent_worker() as (name, writers):
        sending = asyncio.create_task(prefill.send_reply(name, "r", RESULT))
        while not writers:
            await asyncio.sleep(0.01)
    with pytest.raises(WorkerLost):
        await sending


async def test_a_decode_worker_that_hangs_is_not_waited_for_without_end(
    prefill: PrefillReplies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the reply has arrived is not known, so the entry is left to its redelivery."""
    monkeypatch.setattr(prefill_replies, "SEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(prefill_replies, "SEND_DEADLINE_S", 0.2)
    async with silent_worker() as (name, _):
        with pytest.raises(InfraUnavailable, match="could not send the prefill result of r"):
            await prefill.send_reply(name, "r", RESULT)


async def test_a_reply_whose_connection_breaks_is_sent_again(prefill: PrefillReplies, decode: PrefillReplies) -> None:
    with decode.expect("r1") as one, decode.expect("r2") as two:
        await prefill.send_reply(decode.reply_to, "r1", {"n": 1})
        for sender in list(decode._senders):
            sender.abort()
        await prefill.send_reply(decode.reply_to, "r2", {"n": 2})
        assert [await one.wait(5), await two.wait(5)] == [{"n": 1}, {"n": 2}]


async def test_garbage_does_not_end_the_listener(decode: PrefillReplies, prefill: PrefillReplies) -> None:
    bodies = (b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"request_id": "r"}))
    answers = await asked(decode, *(frame(FrameKind.DATA, n, body) for n, body in enumerate(bodies)))
    assert answers == [(FrameKind.ERROR, n) for n in range(len(bodies))]
    for noise in (b"GET / HTTP/1.1\r\n\r\n", frame(FrameKind.GO, 0)):
        assert await asked(decode, noise) == []
    with decode.expect("r") as reply:
        await prefill.send_reply(decode.reply_to, "r", KvTransferError("expired"))
        with pytest.raises(KvTransferError):
            await reply.wait(5)


async def test_a_prefill_worker_connects_to_no_other_socket(prefill: PrefillReplies) -> None:
    """Whatever an entry says."""
    for name in ("", "/run/some.sock", "dynamo-responses-1", f"{NAMES}nobody", f"{NAMES}{'x' * 200}"):
        with pytest.raises((WorkerLost, InfraUnavailable)):
            async with asyncio.timeout(1.0):
                await prefill.send_reply(name, "r", RESULT)


async def test_another_users_process_is_turned_away(decode: PrefillReplies, monkeypatch: pytest.MonkeyPatch) -> None:
    message = msgspec.msgpack.encode({"request_id": "r", "reply_id": "one", "result": RESULT})
    with decode.expect("r") as reply:
        monkeypatch.setattr(prefill_replies, "peer_of", lambda _: (1, os.geteuid() + 1))
        with contextlib.suppress(ConnectionError):
            assert await asked(decode, frame(FrameKind.DATA, 0, message)) == []
        assert not reply.future.done()


async def test_expecting_needs_a_listener_and_one_waiter_per_id(
    decode: PrefillReplies, prefill: PrefillReplies
) -> None:
    with pytest.raises(RuntimeError, match="before start"):
        prefill.expect("r")
    with decode.expect("r"), pytest.raises(RuntimeError, match="awaited already"):
        decode.expect("r")

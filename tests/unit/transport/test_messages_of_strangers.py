"""Tests what anybody on NATS can send: it costs no more than its size, and ends nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.components.messages import TextRequest
from dynamo_local.core.routing.kv_events import BlocksStored
from dynamo_local.core.routing.kv_index import MAX_BLOCKS, EventBatch, KvIndex, KvTracker, Snapshot
from dynamo_local.core.types import Missing
from dynamo_local.errors import InvalidRequest, RemoteError, StreamGap
from dynamo_local.transport.control import MAX_ANSWERING, MAX_REQUEST_BYTES, ControlServer, control_subject
from dynamo_local.transport.kv_events import MAX_BATCH_BYTES, decode_batch
from dynamo_local.transport.load import MAX_INSTANCES, LoadView
from dynamo_local.transport.prefill_queue import HEADROOM_BYTES, decode_entry, encode_entry
from dynamo_local.transport.requests.frames import ItemSequence, decode_error, decode_header, decode_value, decoder_of
from tests.drivers.eventually import eventually
from tests.fakes.infra.memory_nats import MemoryNats
from tests.tools.peak_memory import peak_bytes

DEEP = b"\x91" * 1_000_000
EMPTY_LISTS = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000


@pytest.mark.parametrize("decode", [decode_value, decode_header, decode_entry, decoder_of(TextRequest)])
def test_nesting_without_end_is_an_invalid_request(decode: Any) -> None:
    with pytest.raises(InvalidRequest):
        decode(DEEP)


def test_answers_that_are_nested_without_end_are_errors_too() -> None:
    assert isinstance(decode_error(DEEP), RemoteError)
    with pytest.raises(StreamGap):
        ItemSequence().data(0, DEEP)


def test_a_typed_payload_skips_what_it_does_not_know() -> None:
    payload = b"\x82\xa6prompt\xa2Hi\xa4else" + EMPTY_LISTS

    def read() -> None:
        assert decoder_of(TextRequest)(payload) == TextRequest(prompt="Hi")

    assert peak_bytes(read) < 100_000


def test_a_payload_that_nobody_looks_at_is_not_read() -> None:
    assert decoder_of(type(None))(DEEP) is None


def test_a_typed_payload_names_what_is_wrong() -> None:
    """As the Frontend would."""
    with pytest.raises(InvalidRequest) as caught:
        decoder_of(TextRequest)(msgspec.msgpack.encode({"stop": ["x" * 1025]}))
    assert caught.value.details["param"] == "stop"


def test_the_garbage_collector_is_left_as_it_was() -> None:
    decode_value(EMPTY_LISTS)
    with pytest.raises(InvalidRequest):
        decode_value(b"\xc1")
    assert gc.isenabled()


def test_a_batch_of_kv_events_has_a_largest_size() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(b"\x00" * (MAX_BATCH_BYTES + 1))


def test_a_worker_cannot_hold_more_blocks_than_there_are() -> None:
    tracker = KvTracker(KvIndex())
    tracker.joined(1)
    tracker.rebuilt(1, Snapshot("e", 0, []))
    step = 2**16
    for seq in range(1, 2 + MAX_BLOCKS // step):
        begin = seq * step
        tracker.receive(1, EventBatch("e", seq, (BlocksStored(tuple(range(begin, begin + step))),)))
        assert len(tracker.index) <= MAX_BLOCKS
    assert tracker.index.count(1) == 0


async def test_loads_of_invented_workers_do_not_pile_up() -> None:
    heard: list[Any] = []

    class Nats:
        is_closed, is_connected = False, True

        async def subscribe(self, _subject: str, cb: Any) -> Any:
            heard.append(cb)

        async def flush(self, timeout: float = 0) -> None:
            return

    clock = SimpleNamespace(now_s=lambda: 100.0, wall_s=lambda: 1000.0)  # all in one instant
    view = LoadView(Nats(), "dynamo", "VllmWorker", clock)  # type: ignore[arg-type]
    await view.start()
    began_s = time.process_time()
    for instance in range(3 * MAX_INSTANCES):
        await heard[0](SimpleNamespace(subject="dynamo.load.VllmWorker", data=_report(instance)))
    assert len(view.loads()) <= MAX_INSTANCES
    assert not isinstance(view.get(1), Missing)
    assert time.process_time() - began_s < 10


def _report(instance: int) -> bytes:
    load = {
        "request_active_slots": 0,
        "request_total_slots": 0,
        "kv_active_blocks": 0,
        "kv_total_blocks": 0,
        "num_requests_waiting": 0,
        "gpu_cache_usage_perc": 0.0,
        "gpu_prefix_cache_hit_rate": 0.0,
        "remaining_tokens": 0,
        "itl_ms": None,
    }
    report = {"watcher_name": "w", "component": "VllmWorker", "instance_id": instance, "published_at_s": 1000.0}
    return json.dumps({**report, "load": load}).encode()


@asynccontextmanager
async def _control(ops: Mapping[str, Any]) -> AsyncIterator[Callable[[bytes], Awaitable[Any]]]:
    """To ask a control endpoint."""
    nats = MemoryNats()
    server = ControlServer(nats.client(), "dynamo", "w", ops)  # type: ignore[arg-type]
    await server.start()
    asking = nats.client()

    async def ask(data: bytes) -> Any:
        return json.loads((await asking.request(control_subject("dynamo", "w"), data, timeout=60)).data)

    yield ask
    await server.close()


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b" " * MAX_REQUEST_BYTES + b"{}", b'{"op":"' + b"x" * 60_000 + b'"}', b"9" * 60_000]
)
async def test_a_hostile_control_request_is_refused(data: bytes) -> None:
    async with _control({}) as ask:
        answer = await ask(data)
    assert answer["error"]["code"] == InvalidRequest.code
    assert len(json.dumps(answer)) < 1000


async def test_control_requests_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()

    async def slow(_args: Any) -> dict[str, Any]:
        await go.wait()
        return {}

    async with _control({"slow": slow}) as ask:
        asked = [asyncio.create_task(ask(b'{"op":"slow"}')) for _ in range(MAX_ANSWERING + 50)]
        await eventually(lambda: caplog.text.count("a request is not answered") == 50, 60)
        go.set()
        await eventually(lambda: sum(task.done() for task in asked) >= MAX_ANSWERING, 60)
        answers = [await task for task in asked if task.done()]
        assert answers == [{"result": {}}] * MAX_ANSWERING
        for task in asked:
            task.cancel()


# --- prefill codec
# The bytes of a prefill queue entry.

NATS_DEFAULT_BYTES = 1 << 20


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive(ids: list[int]) -> None:
    payload = {"request": {"prompt_token_ids": ids}, "stop_token_ids": ids}
    assert decode_entry(encode_entry(payload, NATS_DEFAULT_BYTES)) == payload


def test_token_ids_take_four_bytes_each() -> None:
    """Whatever their values; little-endian, so that the bytes mean the same everywhere."""
    data = encode_entry({"prompt_token_ids": [1, 2**31 - 1] * 65_536}, NATS_DEFAULT_BYTES)
    assert 131_072 * 4 <= len(data) < 131_072 * 4 + 64
    assert b"\x01\x00\x00\x00\xff\xff\xff\x7f" in data


def test_sequences_other_than_lists_are_taken() -> None:
    payload = MappingProxyType({"a": {"token_ids": (1, 2)}, "b_token_ids": array("i", [3])})
    assert decode_entry(encode_entry(payload, NATS_DEFAULT_BYTES)) == {"a": {"token_ids": [1, 2]}, "b_token_ids": [3]}


def test_the_bound_leaves_room_for_headers() -> None:
    """`max_payload` counts them too; the error says how many tokens would fit."""
    fits = (NATS_DEFAULT_BYTES - HEADROOM_BYTES) // 4 - 16
    encode_entry({"prompt_token_ids": [0] * fits}, NATS_DEFAULT_BYTES)
    with pytest.raises(InvalidRequest, match="about 261,120 prompt tokens") as caught:
        encode_entry({"prompt_token_ids": [0] * (fits + 16)}, NATS_DEFAULT_BYTES)
    assert caught.value.details == {"param": "prompt"}


@pytest.mark.parametrize(
    "payload",
    [{"token_ids": [2**31]}, {"token_ids": [1.5]}, {"token_ids": ["a"]}, {"x": object()}, {1.5: {2: object()}}],
)
def test_what_cannot_be_encoded_is_refused(payload: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        encode_entry(payload, NATS_DEFAULT_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(9, b"")}),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, b"abc")}),
    ],
)
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a prefill entry"):
        decode_entry(data)

"""Passes: Dynamo's bytes, the recorder, and envelopes on the event plane."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.ports import KeyValue
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.fpm import MAX_BYTES, decode_pass, encode_pass
from dynamo_local.transport.passes import KEPT_PASSES, PassRecorder, seal, subject, unframe, unseal, zmq_endpoints
from tests.fakes.data_plane.passes import DECODING, PREFILLING, WORKER, heartbeat, passed

PASS = ForwardPass(EngineId(WORKER, 1), 4711, 0.0125, PREFILLING, DECODING)
WIRE: dict[str, Any] = {
    "version": 1,
    "worker_id": WORKER,
    "dp_rank": 1,
    "counter_id": 4711,
    "wall_time": 0.0125,
    "scheduled_requests": {
        "num_prefill_requests": 1,
        "sum_prefill_tokens": 512,
        "var_prefill_length": 2.25,
        "sum_prefill_kv_tokens": 64,
        "num_decode_requests": 0,
        "sum_decode_kv_tokens": 0,
        "var_decode_kv_tokens": 0.0,
    },
    "queued_requests": {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "num_decode_requests": 3,
        "sum_decode_kv_tokens": 4500,
        "var_decode_kv_tokens": 6.5,
    },
}
GOLDEN = bytes.fromhex(
    "87a776657273696f6e01a9776f726b65725f6964b037353837383834383838333631393837a764705f72616e6b01aa636f756e7465725f6964"
    "cd1267a977616c6c5f74696d65cb3f8999999999999ab27363686564756c65645f726571756573747387b46e756d5f70726566696c6c5f7265"
    "71756573747301b273756d5f70726566696c6c5f746f6b656e73cd0200b27661725f70726566696c6c5f6c656e677468cb4002000000000000"
    "b573756d5f70726566696c6c5f6b765f746f6b656e7340b36e756d5f6465636f64655f726571756573747300b473756d5f6465636f64655f6b"
    "765f746f6b656e7300b47661725f6465636f64655f6b765f746f6b656e73cb0000000000000000af7175657565645f72657175657374738"
    "6b46e756d5f70726566696c6c5f726571756573747300b273756d5f70726566696c6c5f746f6b656e7300b27661725f70726566696c6c5f6c"
    "656e677468cb0000000000000000b36e756d5f6465636f64655f726571756573747303b473756d5f6465636f64655f6b765f746f6b656e73cd"
    "1194b47661725f6465636f64655f6b765f746f6b656e73cb401a000000000000"
)


def wire(**changed: Any) -> bytes:
    return msgspec.msgpack.encode({**WIRE, **changed})


def test_a_pass_is_written_as_dynamo_writes_it() -> None:
    assert encode_pass(PASS) == GOLDEN == wire()
    assert decode_pass(GOLDEN, at_s=5.0) == ForwardPass(PASS.engine, 4711, 0.0125, PREFILLING, DECODING, 5.0)


def test_digits_that_nobody_measured_may_be_left_out() -> None:
    short = wire(wall_time=1e-9, queued_requests={"num_decode_requests": 3, "var_decode_kv_tokens": 6.51})
    told, rounded = decode_pass(short), decode_pass(short, exact=False)
    assert told is not None
    assert rounded == replace(
        told,
        wall_time_s=1e-6,
        scheduled=replace(told.scheduled, var_prefill_length=2.0),
        queued=replace(told.queued, var_decode_kv_tokens=7.0),
    )
    assert decode_pass(wire(wall_time=0.0123456789), exact=False).wall_time_s == 0.012346  # type: ignore[union-attr]
    assert decode_pass(wire(wall_time=0.0), exact=False).heartbeat  # type: ignore[union-attr]


def test_the_id_of_now_is_written_where_it_has_changed() -> None:
    told = decode_pass(encode_pass(PASS, "99"))
    assert told is not None
    assert told.engine == EngineId("99", 1)


def test_what_is_absent_is_0_and_what_is_unknown_is_passed_over() -> None:
    few = {"version": 1, "worker_id": "7", "scheduled_requests": {"num_decode_requests": 2}, "gpu_energy": 3.5}
    told = decode_pass(msgspec.msgpack.encode(few))
    assert told == ForwardPass(EngineId("7"), 0, 0.0, Requests(num_decode_requests=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": 0},
        {"worker_id": "0x7f"},
        {"worker_id": 7},
        {"worker_id": "9" * 21},
        {"dp_rank": -1},
        {"counter_id": -1},
        {"counter_id": 2**60},
        {"wall_time": math.nan},
        {"wall_time": -0.5},
        {"wall_time": math.inf},
        {"scheduled_requests": []},
        {"queued_requests": {"var_prefill_length": math.inf}},
        {"queued_requests": {"sum_decode_kv_tokens": -3}},
        {"queued_requests": {"sum_decode_kv_tokens": 1.5}},
    ],
    ids=str,
)
def test_another_version_and_values_that_cannot_be_are_no_pass(changed: dict[str, Any]) -> None:
    assert decode_pass(wire(**changed)) is None


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5000, GOLDEN[:-1], GOLDEN + b"\x00"])
def test_bytes_of_strangers_are_no_pass(data: bytes) -> None:
    assert decode_pass(data) is None


def test_a_long_message_is_not_even_looked_at() -> None:
    assert decode_pass(wire(more="x" * MAX_BYTES)) is None


# --- recorder
# Tests what a worker keeps of its passes, and what it tells.


def recorded(*passes: ForwardPass) -> PassRecorder:
    recorder = PassRecorder()
    for one in passes:
        recorder.record(one)
    return recorder


def numbers(passes: Sequence[ForwardPass]) -> list[tuple[int, int]]:
    return [(one.engine.dp_rank, one.counter_id) for one in passes]


def test_what_came_after_a_number_is_told_by_rank() -> None:
    recorder = recorded(passed(1), passed(2), passed(1, rank=1), passed(3), passed(2, rank=1))
    assert numbers(recorder.since({0: 2, 1: 0}, 64)) == [(0, 3), (1, 1), (1, 2)]
    assert numbers(recorder.since({}, 64)) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert recorder.since({0: 3, 1: 2}, 64) == []


def test_many_are_thinned_evenly_and_the_last_one_is_there() -> None:
    recorder = recorded(*(passed(n) for n in range(1, 1001)))
    assert [one.counter_id for one in recorder.since({}, 4)] == [250, 500, 750, 1000]
    assert recorder.missed == {}


def test_the_oldest_are_forgotten_when_nobody_asks() -> None:
    recorder = recorded(*(passed(n) for n in range(3 * KEPT_PASSES)))
    assert len(recorder.since({}, 10**6)) == KEPT_PASSES


def test_a_heartbeat_is_told_only_where_it_is_the_last() -> None:
    recorder = recorded(passed(1), heartbeat(2), heartbeat(3))
    assert [one.counter_id for one in recorder.since({}, 64)] == [1, 3]
    recorder.record(passed(4))
    assert [one.counter_id for one in recorder.since({0: 3}, 64)] == [4]


def test_an_idle_engine_is_told_of_again_and_again() -> None:
    """Else its last pass would grow old, and the engine would look as if it were stopped."""
    recorder = recorded(passed(1), heartbeat(2, at_s=9.0))
    assert recorder.since({0: 2}, 64) == [heartbeat(2, at_s=9.0)]


def test_gaps_in_the_numbers_are_counted() -> None:
    assert recorded(passed(1), passed(4), passed(5), passed(9), passed(3, rank=1)).missed == {0: 5}


def test_an_engine_that_was_started_again_begins_anew() -> None:
    recorder = recorded(passed(500), passed(501), passed(1), passed(2))
    assert [one.counter_id for one in recorder.since({0: 501}, 64)] == [1, 2]
    assert recorder.missed == {}


def test_whoever_reads_gets_what_has_ended_meanwhile() -> None:
    recorder = PassRecorder()
    recorder.refresh = lambda: recorder.record(passed(1))
    assert recorder.since({}, 64) == [passed(1)]


def test_listeners_hear_of_each_pass() -> None:
    recorder, heard = PassRecorder(), list[ForwardPass]()
    recorder.listeners.append(heard.append)
    recorder.record(passed(1))
    recorder.record(heartbeat(2))
    assert heard == [passed(1), heartbeat(2)]


def test_the_last_of_all_ranks_is_the_latest() -> None:
    assert PassRecorder().last() is None
    assert recorded(passed(5, at_s=2.0), passed(1, at_s=3.0, rank=1)).last() == passed(1, at_s=3.0, rank=1)


# --- event plane
# Envelopes and channels of Dynamo's event plane.


def test_the_subject_is_dynamos() -> None:
    assert subject("dynamo", "backend") == "namespace.dynamo.component.backend.endpoint.generate.forward-pass-metrics"


def test_an_envelope_has_what_dynamo_reads() -> None:
    sealed = seal(b"pass", publisher_id=7, sequence=3, wall_s=1_700_000_000.5)
    assert msgspec.msgpack.decode(sealed) == {
        "publisher_id": 7,
        "sequence": 3,
        "published_at": 1_700_000_000_500,
        "topic": "forward-pass-metrics",
        "payload": b"pass",
        "published_at_ns": 1_700_000_000_500_000_000,
    }
    assert unseal(sealed) == b"pass"


def test_a_payload_may_be_a_list_of_numbers() -> None:
    assert unseal(msgspec.msgpack.encode({"payload": [1, 2, 255]})) == b"\x01\x02\xff"


@pytest.mark.parametrize("payload", [8 * 2**30, [256], [[]], "text", None], ids=str)
def test_a_hostile_payload_is_none(payload: Any) -> None:
    """`bytes` of a number would be as many zeros: one message of ten bytes, and eight gigabytes."""
    assert unseal(msgspec.msgpack.encode({"payload": payload})) is None


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 60_000, b"\x80", b"x" * (event_plane.MAX_EVENT_BYTES + 1)])
def test_bytes_of_strangers_are_no_envelope(data: bytes) -> None:
    assert unseal(data) is None


def test_over_zeromq_the_envelope_stands_behind_a_head() -> None:
    sealed = seal(b"pass", publisher_id=7, sequence=3, wall_s=1.0)
    head = b"\x01" + len(sealed).to_bytes(4, "big")
    assert unframe([b"forward-pass-metrics", bytes(8), bytes(8), head + sealed]) == b"pass"
    assert unframe([b"forward-pass-metrics", head + sealed]) is None
    assert unframe([b"", b"", b"", b"\x01"]) is None


def test_a_workers_sockets_are_found_by_its_lease() -> None:
    def channel(lease: int, topic: str, value: Any) -> KeyValue:
        return KeyValue(f"v1/event_channels/dynamo/backend/{topic}/{lease:x}", json.dumps(value).encode(), lease)

    mine = {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5001"}}}
    kvs = [
        channel(7, "forward-pass-metrics", mine),
        channel(7, "kv-events", {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5002"}}}),
        channel(8, "forward-pass-metrics", {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5003"}}}),
        channel(7, "forward-pass-metrics", {"transport": {"Nats": {"subject_prefix": "namespace.dynamo"}}}),
        KeyValue("v1/event_channels/dynamo/backend/forward-pass-metrics/7", b"[" * 100_000, 7),
    ]
    assert zmq_endpoints(kvs, 7) == ["tcp://127.0.0.1:5001"]

"""Dynamo's format of a pass: bytes as Dynamo writes them, and what strangers write."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.transport.fpm import MAX_BYTES, decode_pass, encode_pass
from tests.fakes.data_plane.passes import DECODING, PREFILLING, WORKER

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

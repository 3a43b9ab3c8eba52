"""Dynamo's FPM format: one pass as a msgpack map by field name. An absent field is 0. Another version is not read.

{"version": 1, "worker_id": "7587884888361987", "dp_rank": 0, "counter_id": 4711, "wall_time": 0.0123,
 "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 512, "var_prefill_length": 0.0, …},
 "queued_requests": {…}}
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.transport.decoding import UNREADABLE

VERSION = 1
MAX_BYTES = 16 * 1024
"""A pass has some three hundred."""

SHORTEST_S = 1e-6
"""A pass that took less is still a pass: 0 would be a heartbeat."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_WorkerId = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}$")]


class _Requests(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: _Count = 0
    sum_prefill_tokens: _Count = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: _Count = 0
    num_decode_requests: _Count = 0
    sum_decode_kv_tokens: _Count = 0
    var_decode_kv_tokens: float = 0.0


class _Queued(msgspec.Struct, frozen=True, gc=False):
    """Without KV that is read: that is known when a request is scheduled. Not a part of `_Requests`: the fields are
    written in Dynamo's order, byte for byte."""

    num_prefill_requests: _Count = 0
    sum_prefill_tokens: _Count = 0
    var_prefill_length: float = 0.0
    num_decode_requests: _Count = 0
    sum_decode_kv_tokens: _Count = 0
    var_decode_kv_tokens: float = 0.0


class _Pass(msgspec.Struct, frozen=True, gc=False):
    version: int = VERSION
    worker_id: _WorkerId = "0"
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    counter_id: _Count = 0
    wall_time: float = 0.0
    scheduled_requests: _Requests = _Requests()
    queued_requests: _Queued = _Queued()


_decoder = msgspec.msgpack.Decoder(_Pass)
_encoder = msgspec.msgpack.Encoder()


def encode_pass(passed: ForwardPass, worker_id: str | None = None) -> bytes:
    """`worker_id`, where given, is written in place of the pass's own: a worker's instance id may have changed."""
    scheduled, queued = passed.scheduled, passed.queued
    return _encoder.encode(
        _Pass(
            VERSION,
            worker_id or passed.engine.worker_id,
            passed.engine.dp_rank,
            passed.counter_id,
            passed.wall_time_s,
            _Requests(
                scheduled.num_prefill_requests,
                scheduled.sum_prefill_tokens,
                scheduled.var_prefill_length,
                scheduled.sum_prefill_kv_tokens,
                scheduled.num_decode_requests,
                scheduled.sum_decode_kv_tokens,
                scheduled.var_decode_kv_tokens,
            ),
            _Queued(
                queued.num_prefill_requests,
                queued.sum_prefill_tokens,
                queued.var_prefill_length,
                queued.num_decode_requests,
                queued.sum_decode_kv_tokens,
                queued.var_decode_kv_tokens,
            ),
        )
    )


def decode_pass(data: bytes, at_s: float = 0.0, *, exact: bool = True) -> ForwardPass | None:
    """The pass, with `at_s`; None for what is none, whatever it is.

    Without `exact` its time is in whole microseconds and its variances are whole: digits that nobody measured would be
    most of a log of passes.
    """
    if len(data) > MAX_BYTES:
        return None
    try:
        found = _decoder.decode(data)
    except UNREADABLE:
        return None
    scheduled, queued = found.scheduled_requests, found.queued_requests
    wall_time_s, *variances = floats = (
        found.wall_time,
        scheduled.var_prefill_length,
        scheduled.var_decode_kv_tokens,
        queued.var_prefill_length,
        queued.var_decode_kv_tokens,
    )
    if found.version != VERSION or not all(0.0 <= value < math.inf for value in floats):
        return None
    if not exact:
        wall_time_s = max(round(wall_time_s, 6), SHORTEST_S) if wall_time_s else 0.0
        variances = [round(value, 0) for value in variances]
    prefills_vary, decodes_vary, queued_prefills_vary, queued_decodes_vary = variances
    return ForwardPass(
        EngineId(found.worker_id, found.dp_rank),
        found.counter_id,
        wall_time_s,
        Requests(
            scheduled.num_prefill_requests,
            scheduled.sum_prefill_tokens,
            prefills_vary,
            scheduled.sum_prefill_kv_tokens,
            scheduled.num_decode_requests,
            scheduled.sum_decode_kv_tokens,
            decodes_vary,
        ),
        Requests(
            num_prefill_requests=queued.num_prefill_requests,
            sum_prefill_tokens=queued.sum_prefill_tokens,
            var_prefill_length=queued_prefills_vary,
            num_decode_requests=queued.num_decode_requests,
            sum_decode_kv_tokens=queued.sum_decode_kv_tokens,
            var_decode_kv_tokens=queued_decodes_vary,
        ),
        at_s,
    )

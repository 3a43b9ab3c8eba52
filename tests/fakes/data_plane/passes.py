"""Forward passes as tests want them."""

from __future__ import annotations

from dynamo_local.core.passes import EngineId, ForwardPass, Requests

WORKER = "7587884888361987"
PREFILLING = Requests(num_prefill_requests=1, sum_prefill_tokens=512, sum_prefill_kv_tokens=64, var_prefill_length=2.25)
DECODING = Requests(num_decode_requests=3, sum_decode_kv_tokens=4500, var_decode_kv_tokens=6.5)


def passed(number: int, at_s: float = 0.0, *, worker: str = WORKER, rank: int = 0) -> ForwardPass:
    return ForwardPass(EngineId(worker, rank), number, 0.01, PREFILLING, DECODING, at_s)


def heartbeat(number: int, at_s: float = 0.0, *, worker: str = WORKER, rank: int = 0) -> ForwardPass:
    """Of an engine that has nothing to do, but for its queue."""
    return ForwardPass(EngineId(worker, rank), number, 0.0, Requests(), DECODING, at_s)

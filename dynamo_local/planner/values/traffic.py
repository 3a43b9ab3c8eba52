"""What the clients did in a window of time: requests, lengths, latencies."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.types import Missing

UNKNOWN = Missing("nobody has measured it")


@dataclass(frozen=True, slots=True)
class Traffic:
    """One window that ended at `at_s` (planner's clock, seconds) and lasted `duration_s`.

    `num_req` counts requests that began in it; 0 is silence, `Missing` is not knowing. The rest are means over the
    requests of the window: `isl` and `osl` in tokens, `ttft_ms`, `itl_ms`, `request_duration_s`; `kv_hit_rate` is the
    share (0..1) of prompt tokens whose KV was there, `accept_length` the tokens per decode pass (1 without
    speculation). A mean without a request is `Missing`, never 0 (docs of Dynamo call that NaN).
    """

    at_s: float
    duration_s: float
    num_req: float | Missing = UNKNOWN
    isl: float | Missing = UNKNOWN
    osl: float | Missing = UNKNOWN
    ttft_ms: float | Missing = UNKNOWN
    itl_ms: float | Missing = UNKNOWN
    request_duration_s: float | Missing = UNKNOWN
    kv_hit_rate: float | Missing = UNKNOWN
    accept_length: float | Missing = UNKNOWN

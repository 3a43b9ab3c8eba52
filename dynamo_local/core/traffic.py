"""Names of what is counted about requests: ours for counters that only grow, and Dynamo's for its histograms."""

from __future__ import annotations

from collections.abc import Mapping

HISTOGRAMS: Mapping[str, str] = {
    "ttft_s": "time_to_first_token_seconds",
    "itl_s": "inter_token_latency_seconds",
    "duration_s": "request_duration_seconds",
    "isl": "input_sequence_tokens",
    "osl": "output_sequence_tokens",
    "cached": "cached_tokens",
}
"""A histogram is counted as `{name}_sum` and `{name}_count`."""
REQUESTS = "requests"
"""Requests that began."""
HIT_RATE = "hit_rate"
"""A histogram of shares: what a router knew to be cached of each prompt."""
HIT_RATE_METRIC = "dynamo_component_router_kv_hit_rate"
ACCEPT_LENGTH = "accept_length"
"""Means of tokens per decode pass, of engines that tell no more of their speculation: counted as a histogram is."""
ACCEPT_LENGTH_METRICS = ("sglang:spec_accept_length", "trtllm_spec_decode_acceptance_length")
STARTED, ENDED = "requests_started_total", "requests_total"
"""The first counts requests as they begin; frontends that have only the second count them as they end."""

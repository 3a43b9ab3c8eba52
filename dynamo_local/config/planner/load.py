"""Options of the policy `load`, under Dynamo's names and defaults (planner-rules: options and defaults)."""

from __future__ import annotations

from pydantic import BaseModel

from dynamo_local.config.planner.kinds import OPTIONS, Fraction, Seconds, Threshold


class LoadFields(BaseModel):
    """Thresholds, and how often they are compared."""

    model_config = OPTIONS

    adjustment_interval: Seconds = 30.0
    """Seconds between adjustments."""
    decode_kv_scale_up_threshold: Fraction = 0.9
    """Mean KV cache use (0..1) of the decode workers above which one is added."""
    decode_kv_scale_down_threshold: Fraction = 0.5
    """Mean KV cache use below which one is taken away."""
    decode_kv_per_waiting_request: Threshold = 0.0
    """Added to a decode worker's KV use for each request that waits there (Dynamo's first planner: 0.02)."""
    prefill_queue_scale_up_threshold: Threshold = 0.5
    """Mean number of requests waiting in the prefill queue above which a prefill worker is added."""
    prefill_queue_scale_down_threshold: Threshold = 0.2
    """Mean number of waiting requests below which one is taken away."""

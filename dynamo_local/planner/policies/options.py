"""The policies' options as values. Their defaults are Dynamo's; `config` checks what people write."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.planner.policies.sla_sizing import SlaOptions
from dynamo_local.planner.policies.slo.ladder import SloOptions
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """See planner-rules (docs/planner.md). Thresholds: KV use 0..1 (mean over the decode workers), requests pending
    in the prefill queue. `decode_kv_per_waiting_request` is added to a worker's KV use for each request that waits
    there (Dynamo's first planner: 0.02).
    """

    adjustment_interval_s: float = 30.0
    metric_pulling_interval_s: float = 1.0
    max_gpu_budget: int = 8
    min_gpu_budget: int = 1
    decode_kv_scale_up_threshold: float = 0.9
    decode_kv_scale_down_threshold: float = 0.5
    prefill_queue_scale_up_threshold: float = 0.5
    prefill_queue_scale_down_threshold: float = 0.2
    decode_kv_per_waiting_request: float = 0.0


PolicyOptions = LoadOptions | SlaOptions | SloOptions | ThroughputLoadOptions
"""Those of any policy. All have `metric_pulling_interval_s`, within which a source must answer."""


def name_of(options: PolicyOptions) -> str:
    """The policy's name, as in `Planner: {policy: …}`."""
    match options:
        case LoadOptions():
            return "load"
        case SlaOptions():
            return "sla"
        case SloOptions():
            return "slo"
        case ThroughputLoadOptions():
            return "throughput-load"

"""The `Planner` section as the value that the load planner's policy takes."""

from __future__ import annotations

from dynamo_local.config import PlannerConfig
from dynamo_local.planner.options import LoadOptions


def load_options(config: PlannerConfig) -> LoadOptions:
    """What of it concerns the policy; the rest (names, folders, `no_operation`) is its surroundings'."""
    return LoadOptions(
        adjustment_interval_s=config.adjustment_interval,
        metric_pulling_interval_s=config.metric_pulling_interval,
        max_gpu_budget=config.max_gpu_budget,
        min_gpu_budget=config.min_gpu_budget,
        decode_kv_scale_up_threshold=config.decode_kv_scale_up_threshold,
        decode_kv_scale_down_threshold=config.decode_kv_scale_down_threshold,
        prefill_queue_scale_up_threshold=config.prefill_queue_scale_up_threshold,
        prefill_queue_scale_down_threshold=config.prefill_queue_scale_down_threshold,
        decode_kv_per_waiting_request=config.decode_kv_per_waiting_request,
    )

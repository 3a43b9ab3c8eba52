"""The SLA planner's options as a value. `config` checks what people write, and has Dynamo's names for them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.planner.predictors.options import PredictorOptions


@dataclass(frozen=True, slots=True)
class SlaOptions:
    """`ttft_ms` and `itl_ms` are the targets, `profile` is a profile's name or folder.

    There are never fewer than `min_endpoint` workers of a role, nor than `min_gpu_budget` GPUs hold, nor than one; both
    roles together never hold more than `max_gpu_budget` GPUs. One decision changes a role by `max_step` at most.
    `warmup_trace` is a trace from which the predictor learns before it starts. With `adaptive_intervals` the start-up
    times that were seen are the forecast's lead, and the shortest interval. With `no_correction` the profile is taken
    as it is.
    """

    profile: str
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    adjustment_interval_s: float = 180.0
    metric_pulling_interval_s: float = 1.0
    predictor: PredictorOptions = PredictorOptions()  # noqa: RUF009 - frozen
    warmup_trace: str | None = None
    min_endpoint: int = 1
    min_gpu_budget: int = 1
    max_gpu_budget: int = 8
    max_step: int = 8
    adaptive_intervals: bool = False
    no_correction: bool = False

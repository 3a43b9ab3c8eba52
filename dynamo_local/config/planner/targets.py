"""Options of `sla` and `throughput-load`, beside the targets (`latencies`). Names and defaults are Dynamo 1.6.1's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from dynamo_local.config.planner.kinds import OPTIONS, Count, Positive, Seconds

ALIASES = {
    "adjustment_interval": "throughput_adjustment_interval_seconds",
    "throughput_adjustment_interval": "throughput_adjustment_interval_seconds",
}
"""The first SLA planner's names, and Dynamo 1.6.1's second ones."""


class TargetFields(BaseModel):
    """Intervals and forecasts."""

    model_config = OPTIONS

    throughput_adjustment_interval_seconds: Seconds = 180.0
    """Seconds between adjustments by the traffic; also the window in which it is measured."""
    max_throughput_scaling_replicas: Count = 8
    """Workers of one role that one adjustment adds, or takes away, at most."""
    load_predictor: Literal["constant", "arima", "prophet", "kalman"] = "constant"
    """Who forecasts requests and their lengths. `arima` and `prophet` need the extra `predictors`."""
    load_predictor_log1p: bool = False
    """Forecast the logarithms: relative changes count, and no forecast is negative."""
    load_predictor_warmup_trace: Path | None = None
    """Trace from which the predictor learns before the first window."""
    prophet_window_size: Count = 50
    """Windows that `prophet` is fitted to."""
    kalman_q_level: Positive = 1.0
    """`kalman`: how much the level changes by itself from window to window (variance)."""
    kalman_q_trend: Positive = 0.1
    """`kalman`: the same of the trend."""
    kalman_r: Positive = 10.0
    """`kalman`: how much a window says of the level (variance of the noise)."""
    kalman_min_points: Count = 5
    """Windows before `kalman` forecasts; until then the last one is what is expected."""
    adaptive_intervals: bool = False
    """Let what starts and drains really take be the forecast's lead, and the shortest interval."""
    throughput_metrics_source: Literal["frontend", "router"] = "frontend"
    """Where requests, lengths and latencies are measured."""

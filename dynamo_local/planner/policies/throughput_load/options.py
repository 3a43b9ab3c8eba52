"""Options of the throughput-load policy as a value, with Dynamo's defaults; `config` checks what people write."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from dynamo_local.planner.pass_model import Features, Learning
from dynamo_local.planner.values import WINDOWS_MAX


class Mode(enum.StrEnum):
    """Which components it moves. `agg`: the workers of an aggregated graph."""

    DISAGG = "disagg"
    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


class Target(enum.StrEnum):
    """`sla`: by models, towards `ttft_ms` and `itl_ms`; either loop or both. The others are static tables for the load
    loop alone, without models: `throughput` waits until engines are full, `latency` acts early, `load` goes by
    thresholds of your own."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    LOAD = "load"
    SLA = "sla"


class DownRule(enum.StrEnum):
    """When a role may lose an engine under `sla`. `consolidation` (Dynamo 1.6.1): its load, on one engine less, would
    still be below the sensitivity. `flat` (seed 001): all estimates are below the target times the sensitivity."""

    CONSOLIDATION = "consolidation"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class ThroughputLoadOptions:
    """The defaults are Dynamo's, but for the predictor's (Dynamo's needs a library). Budgets count GPUs, a negative one
    is off.

    `mode` None: as the graph is, `disagg` or `agg`. `scale_interval_s` None: the greatest common divisor of the
    intervals of the loops that run. `load_scaling_down_sensitivity` and `decode_*_kv_rate` are percent,
    `prefill_*_queue_tokens` tokens per engine. `min_endpoint` holds for each role without a floor of its own.
    `profile` is the name or folder of a profile that the models begin with, `warmup_trace` a trace that the predictor
    learns from before it starts; it sees the last `windows_max` windows. With `adaptive_intervals` the throughput loop
    also looks as far ahead as a start-up takes. A source must answer within `metric_pulling_interval_s`.
    """

    mode: Mode | None = None
    optimization_target: Target = Target.THROUGHPUT
    enable_throughput_scaling: bool = True
    enable_load_scaling: bool = False
    throughput_adjustment_interval_s: float = 180.0
    load_adjustment_interval_s: float = 5.0
    scale_interval_s: float | None = None
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    down_rule: DownRule = DownRule.CONSOLIDATION
    regression_features: Features = Features.DYNAMO
    load_scaling_down_sensitivity: int = 80
    load_min_observations: int = 5
    max_num_fpm_samples: int = 64
    fpm_sample_bucket_size: int = 16
    prefill_scale_up_queue_tokens: float | None = None
    prefill_scale_down_queue_tokens: float | None = None
    decode_scale_up_kv_rate: float | None = None
    decode_scale_down_kv_rate: float | None = None
    max_throughput_scaling_replicas: int = 8
    max_gpu_budget: int = 8
    min_gpu_budget: int = -1
    min_endpoint: int = 1
    prefill_min_endpoint: int | None = None
    decode_min_endpoint: int | None = None
    speculative_nextn: int = 0
    load_predictor: str = "constant"
    predictor_options: tuple[tuple[str, float | str | bool], ...] = ()
    windows_max: int = WINDOWS_MAX
    warmup_trace: str | None = None
    adaptive_intervals: bool = False
    profile: str | None = None
    metric_pulling_interval_s: float = 1.0

    @property
    def loads(self) -> bool:
        """Whether the load loop runs: static targets are for it alone."""
        return self.optimization_target is not Target.SLA or self.enable_load_scaling

    @property
    def predicts(self) -> bool:
        """Whether the throughput loop runs."""
        return self.optimization_target is Target.SLA and self.enable_throughput_scaling

    @property
    def learning(self) -> Learning:
        """How models keep their samples."""
        return Learning(
            self.load_min_observations,
            self.max_num_fpm_samples,
            self.fpm_sample_bucket_size,
            self.regression_features,
        )

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks: each interval is a whole number of them."""
        if self.scale_interval_s is not None:
            return self.scale_interval_s
        intervals = []
        if self.loads:
            intervals.append(self.load_adjustment_interval_s)
        if self.predicts:
            intervals.append(self.throughput_adjustment_interval_s)
        return math.gcd(*(max(1, round(seconds * 1000)) for seconds in intervals)) / 1000

    @property
    def gpus_max(self) -> float:
        """`max_gpu_budget`, infinite where it is off."""
        return math.inf if self.max_gpu_budget < 0 else self.max_gpu_budget

    @property
    def gpus_min(self) -> int:
        """`min_gpu_budget`, 0 where it is off."""
        return max(0, self.min_gpu_budget)

    def floor(self, role: str) -> int:
        """The fewest replicas of `prefill` or `decode` (an aggregated graph's: decode)."""
        own = self.prefill_min_endpoint if role == "prefill" else self.decode_min_endpoint
        return self.min_endpoint if own is None else own

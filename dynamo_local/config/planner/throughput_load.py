"""Options of the policy `throughput-load` alone. Names and defaults are Dynamo 1.6.1's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field

from dynamo_local.config.planner.kinds import OPTIONS, Count, Percent, Seconds, Threshold

if TYPE_CHECKING:
    from dynamo_local.config.planner.options import PlannerConfig

ALIASES: dict[str, str] = {"load_adjustment_interval": "load_adjustment_interval_seconds"}
"""Dynamo 1.6.1's second name for it."""


class ThroughputLoadFields(BaseModel):
    """Which loops run, and how the load loop moves."""

    model_config = OPTIONS

    mode: Literal["disagg", "prefill", "decode", "agg"] | None = None
    """Which components are moved; by default those that the graph has (`disagg` or `agg`)."""
    optimization_target: Literal["throughput", "latency", "load", "sla"] = "throughput"
    """`sla`: by models, towards `ttft_ms` and `itl_ms`. Else the load loop alone, by a table for each target."""
    enable_throughput_scaling: bool = True
    """Under `sla`: size for the forecast of the next interval."""
    enable_load_scaling: bool = False
    """Under `sla`: also move by one, above that size, by what the engines are loaded with now."""
    load_adjustment_interval_seconds: Seconds = 5.0
    """Seconds between adjustments by the load of the engines."""
    scale_down_rule: Literal["consolidation", "flat"] = "consolidation"
    """Under `sla`, one less: if its load fits on the others, or (`flat`) if all estimates are below the sensitivity."""
    load_scaling_down_sensitivity: Percent = 80
    """Per cent of the target below which a worker may go; 0: never, 100: as soon as the target would still be kept."""
    regression_features: Literal["dynamo", "seed"] = "dynamo"
    """What the time of a decode pass depends on: requests and KV (Dynamo 1.6.1), or the KV alone (its first design)."""
    load_min_observations: Annotated[int, Field(ge=3)] = 5
    """Passes that a model needs before it answers."""
    max_num_fpm_samples: Count = 64
    """Passes that a model keeps."""
    fpm_sample_bucket_size: Count = 16
    """Buckets by which kept passes are spread over the loads that were seen; a perfect square."""
    prefill_scale_up_queue_tokens: Threshold | None = None
    """Target `load`: queued prompt tokens of any prefill engine at which one is added."""
    prefill_scale_down_queue_tokens: Threshold | None = None
    """Target `load`: queued prompt tokens of all prefill engines at or below which one is taken away."""
    decode_scale_up_kv_rate: Threshold | None = None
    """Target `load`: KV of any decode engine, scheduled and queued, in per cent of its cache, at which one is added."""
    decode_scale_down_kv_rate: Threshold | None = None
    """Target `load`: the same of all decode engines, at or below which one is taken away."""
    prefill_min_endpoint: Count | None = None
    """Prefill workers, at least; by default `min_endpoint`."""
    decode_min_endpoint: Count | None = None
    """Decode workers, at least; by default `min_endpoint`."""
    speculative_nextn: Annotated[int, Field(ge=0)] = 0
    """Tokens that the engines speculate; a measured accept length counts up to one more."""


def wrong(config: PlannerConfig) -> str | None:
    """What of these options does not go together, in words that name the option; None if all is well."""
    if config.optimization_target == "sla":
        if not (config.enable_throughput_scaling or config.enable_load_scaling):
            return "enable_throughput_scaling and enable_load_scaling are both off: one of them must be on"
        if config.enable_throughput_scaling and config.enable_load_scaling:
            load_s, throughput_s = (
                config.load_adjustment_interval_seconds,
                config.throughput_adjustment_interval_seconds,
            )
            if load_s >= throughput_s:
                return (
                    f"load_adjustment_interval_seconds ({load_s:g}) must be below "
                    f"throughput_adjustment_interval_seconds ({throughput_s:g})"
                )
    return _grid(config) or _samples(config) or _thresholds(config) or _floors(config)


def _grid(config: PlannerConfig) -> str | None:
    tick_s = config.scheduling.scale_interval_seconds
    if tick_s is None:
        return None
    for name in ("load_adjustment_interval_seconds", "throughput_adjustment_interval_seconds"):
        ratio = getattr(config, name) / tick_s
        if abs(ratio - round(ratio)) > 1e-6 or round(ratio) < 1:
            return f"scheduling.scale_interval_seconds ({tick_s:g}) must divide {name} ({getattr(config, name):g})"
    return None


def _samples(config: PlannerConfig) -> str | None:
    if math.isqrt(config.fpm_sample_bucket_size) ** 2 != config.fpm_sample_bucket_size:
        return f"fpm_sample_bucket_size ({config.fpm_sample_bucket_size}) must be a perfect square, such as 16"
    if config.max_num_fpm_samples < config.load_min_observations:
        return (
            f"max_num_fpm_samples ({config.max_num_fpm_samples}) must not be below "
            f"load_min_observations ({config.load_min_observations})"
        )
    return None


def _thresholds(config: PlannerConfig) -> str | None:
    pairs = {"prefill": "queue_tokens", "decode": "kv_rate"}
    needed = {"prefill": ["prefill"], "decode": ["decode"], "agg": ["decode"]}.get(config.mode or "", list(pairs))
    for role, what in pairs.items():
        up_name, down_name = f"{role}_scale_up_{what}", f"{role}_scale_down_{what}"
        up, down = getattr(config, up_name), getattr(config, down_name)
        given = up is not None and down is not None
        if config.optimization_target == "load" and role in needed and not given:
            return f"the optimization_target is load: {up_name} and {down_name} must be given"
        if given and up <= down:
            return f"{down_name} ({down:g}) must be below {up_name} ({up:g})"
    return None


def _floors(config: PlannerConfig) -> str | None:
    without = {"prefill": ("decode",), "decode": ("prefill",), "agg": ("prefill", "decode")}.get(config.mode or "", ())
    for role in without:
        if getattr(config, f"{role}_min_endpoint") is not None:
            return f"{role}_min_endpoint has no effect: the mode is {config.mode}"
    return None

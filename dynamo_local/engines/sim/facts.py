"""An engine's configuration and load, from its options and scheduler. Used by processes and the simulator. Pure."""

from __future__ import annotations

from dynamo_local.core.types import Load
from dynamo_local.engines.sim.options import Faults, SimOptions
from dynamo_local.engines.sim.requests import SchedulerConfig
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.errors import ConfigError
from dynamo_local.profile.interpolation import PerfModel

_DEFAULT_MAX_MODEL_LEN = 131_072


def shape_of(options: SimOptions, perf: PerfModel, faults: Faults | None = None) -> tuple[SchedulerConfig, int]:
    """The scheduler's configuration and `max_model_len`. Raises `ConfigError` if one request cannot fit the cache."""
    num_gpu_blocks = options.num_gpu_blocks or perf.max_kv_tokens // options.block_size
    capacity = num_gpu_blocks * options.block_size
    max_model_len = options.max_model_len or min(_DEFAULT_MAX_MODEL_LEN, capacity)
    if max_model_len > capacity:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit the KV cache of {capacity} tokens "
            f"({num_gpu_blocks} blocks of {options.block_size}): lower it, or raise num_gpu_blocks"
        )
    config = SchedulerConfig(
        num_gpu_blocks=num_gpu_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        speed=options.speed,
        kv_lease_duration_s=options.kv_lease_duration_s,
        faults=faults,
        accept_length=options.accept_length,
    )
    return config, max_model_len


def load_of(scheduler: SimScheduler) -> Load:
    """The scheduler's load, as of the last call that took a time."""
    used, total = scheduler.pool.used, scheduler.pool.total
    return Load(
        request_active_slots=scheduler.num_running,
        request_total_slots=scheduler.config.max_num_seqs,
        kv_active_blocks=used,
        kv_total_blocks=total,
        num_requests_waiting=scheduler.num_waiting,
        gpu_cache_usage_perc=used / total,
        gpu_prefix_cache_hit_rate=scheduler.prefix_hit_rate,
        remaining_tokens=scheduler.remaining_tokens,
        itl_ms=None if scheduler.itl_s is None else scheduler.itl_s * 1000,
    )

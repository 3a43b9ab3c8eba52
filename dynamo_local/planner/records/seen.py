"""What a record keeps of engines and options: few numbers, so that a day of decisions fits into the log."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.adapting import steps_ahead
from dynamo_local.planner.policies.options import LoadOptions, PolicyOptions
from dynamo_local.planner.policies.sla.options import SlaOptions
from dynamo_local.planner.policies.slo.options import SloOptions
from dynamo_local.planner.policies.throughput_load.options import Target, ThroughputLoadOptions
from dynamo_local.planner.values.passes import Engines
from dynamo_local.planner.values.pools import WorkerPools


@dataclass(frozen=True, slots=True)
class EngineLoads:
    """The engines of one component that were heard of, by their last passes.

    Tokens of prompts that wait, KV tokens of decodes that wait and of those that run; each on all engines together, and
    (`_max`) on the one that has most.
    """

    engines: int
    queued_prefill_tokens: int = 0
    queued_prefill_tokens_max: int = 0
    queued_decode_kv_tokens: int = 0
    queued_decode_kv_tokens_max: int = 0
    inflight_decode_kv_tokens: int = 0
    inflight_decode_kv_tokens_max: int = 0


@dataclass(frozen=True, slots=True)
class Aims:
    """What the options ask for: targets (ms; None: the policy has none), GPUs (None: no bound), and the forecast's
    window, in seconds (None: nothing is forecast), the `ahead`th after the one that was seen."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    min_gpu_budget: int | None = None
    max_gpu_budget: int | None = None
    window_s: float | None = None
    ahead: int = 1


def engine_loads(engines: Engines) -> dict[str, EngineLoads]:
    """By component; one of whose engines nothing is known is absent."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for seen in engines.values():
        if not isinstance(seen.last, Missing):
            queued, scheduled = seen.last.queued, seen.last.scheduled
            tokens = (queued.sum_prefill_tokens, queued.sum_decode_kv_tokens, scheduled.sum_decode_kv_tokens)
            found.setdefault(seen.component, []).append(tokens)
    return {component: _summed(rows) for component, rows in found.items()}


def _summed(rows: list[tuple[int, int, int]]) -> EngineLoads:
    prompts, waiting, running = zip(*rows, strict=True)
    return EngineLoads(len(rows), sum(prompts), max(prompts), sum(waiting), max(waiting), sum(running), max(running))


def aims_of(options: PolicyOptions, pools: WorkerPools) -> Aims:
    """Of these options, with these workers."""
    lowest, highest = _bound(options.min_gpu_budget), _bound(options.max_gpu_budget)
    match options:
        case LoadOptions():
            return Aims(min_gpu_budget=lowest, max_gpu_budget=highest)
        case SlaOptions():
            window_s = options.adjustment_interval_s
            ahead = steps_ahead(window_s, pools) if options.adaptive_intervals else 1
            return Aims(options.ttft_ms, options.itl_ms, lowest, highest, window_s, ahead)
        case SloOptions():
            window_s = options.adjustment_interval_s
            return Aims(options.ttft_ms, options.itl_ms, lowest, highest, window_s, steps_ahead(window_s, pools))
        case ThroughputLoadOptions():
            window_s = options.throughput_adjustment_interval_s
            by_models = options.optimization_target is Target.SLA
            return Aims(
                options.ttft_ms if by_models else None,
                options.itl_ms if by_models else None,
                lowest,
                highest,
                window_s if options.predicts else None,
            )


def _bound(gpus: int) -> int | None:
    return None if gpus < 0 else gpus

"""The numbers of a reason of the SLA planner as a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.planner.policies.sla.bounds import SlaRule


def why(rule: SlaRule, numbers: Mapping[str, float]) -> str:
    """`7,200 requests of 3,000 tokens in 180 s: 120,000 tokens/s; an engine does 48,981 tokens/s: 3 wanted, 1 there`"""
    if "engine_tokens_per_s" not in numbers:
        if rule is SlaRule.NO_CHANGE:
            return "nobody asked for another number"
        told = "what the demand needs is not known"
    else:
        told = f"{_load(numbers)}; an engine does {_tokens(numbers['engine_tokens_per_s'])}{_bound(numbers)}: "
        told += f"{numbers['engines']:g} wanted"
    if rule is SlaRule.MIN_ENDPOINT:
        return f"{told}, but there are never fewer than {numbers['workers_min']:g}"
    if rule is SlaRule.MAX_STEP:
        return f"{told}, {numbers['workers']:g} there, but one step is at most {numbers['max_step']:g}"
    if rule is SlaRule.MAX_GPU_BUDGET:
        return f"{told}, but both roles share {numbers['max_gpu_budget']:g} GPUs"
    if rule is SlaRule.OVERRIDDEN:
        return f"{told}, but a plugin asked for {numbers['workers_wanted']:g}"
    return f"{told}, {'as many' if rule is SlaRule.NO_CHANGE else format(numbers['workers'], 'g')} there"


def _load(numbers: Mapping[str, float]) -> str:
    """`7,200 requests of 3,000 tokens in 180 s × 0.4 (TTFT measured / expected): 48,000 tokens/s`"""
    prefill = "p_correction" in numbers
    length = numbers["next_isl" if prefill else "next_osl"]
    told = f"{numbers['next_num_req']:,.6g} requests of {length:,.6g} tokens in {numbers['adjustment_interval_s']:g} s"
    if prefill and numbers["p_correction"] < 1:
        told += f" × {numbers['p_correction']:.3g} (TTFT measured / expected)"
    return f"{told}: {_tokens(numbers['load_tokens_per_s'])}"


def _bound(numbers: Mapping[str, float]) -> str:
    """Under which target a decode engine does that."""
    if "d_correction" not in numbers:
        return ""
    told = f" within ITL {numbers['itl_ms']:g} ms"
    if numbers["d_correction"] != 1:
        told += f" / {numbers['d_correction']:.3g} (measured / expected)"
    return f"{told} at {numbers['context_length']:,.6g} tokens"


def _tokens(value: float) -> str:
    return f"{value:,.0f} tokens/s"

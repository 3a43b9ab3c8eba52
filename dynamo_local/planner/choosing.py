"""Makes the policy that options describe, for the arbiter and for `dynamo simulate`.

This may read files (profiles, traces) and imports all policies, so the arbiter imports and calls it in a thread.
"""

from __future__ import annotations

from typing import Any

from dynamo_local.planner.models.bootstrap import bootstrapped, decode_passes, prefill_passes
from dynamo_local.planner.models.pass_model import Kind, PassModel
from dynamo_local.planner.policies.load_planner import LoadPlanner
from dynamo_local.planner.policies.options import LoadOptions, PolicyOptions
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.policies.sla.options import SlaOptions
from dynamo_local.planner.policies.sla.policy import SlaPolicy
from dynamo_local.planner.policies.slo.options import SloOptions
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.policies.throughput_load.options import Target, ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.planner.queueing.task import passes_of
from dynamo_local.planner.values.series import Window
from dynamo_local.planner.warmup import read_warmup
from dynamo_local.profiles import interpolators
from dynamo_local.profiles.reading import read_profile


def policy_of(options: PolicyOptions) -> Policy[Any]:
    """A new policy with these options. Raises `ConfigError` where what they name cannot be used."""
    match options:
        case LoadOptions():
            return LoadPlanner(options)
        case SlaOptions():
            return sla(options)
        case SloOptions():
            return SloPolicy(options, passes_of(options.profile, options.speed))
        case ThroughputLoadOptions():
            return throughput_load(options)


def sla(options: SlaOptions) -> SlaPolicy:
    """With its profile and, where it has one, its warm-up trace."""
    warmup: tuple[Window, ...] = ()
    if options.warmup_trace is not None:
        warmup = read_warmup(options.warmup_trace, options.adjustment_interval_s, options.predictor.windows_max)
    return SlaPolicy(options, *interpolators(options.profile), warmup=warmup)


def throughput_load(options: ThroughputLoadOptions) -> ThroughputLoadPolicy:
    """With what its profile and its warm-up trace say, where it has them."""
    known: dict[Kind, PassModel] = {}
    if options.profile is not None and options.optimization_target is Target.SLA:
        profile = read_profile(options.profile)
        decode = profile.decode
        passes = {
            Kind.PREFILL: prefill_passes(profile.prefill.isl, profile.prefill.ttft_ms),
            Kind.DECODE: decode_passes(decode.kv_usage, decode.context_length, decode.itl_ms, decode.max_kv_tokens),
        }
        passes[Kind.AGG] = passes[Kind.PREFILL] + passes[Kind.DECODE]
        known = {kind: bootstrapped(PassModel(kind, options.learning), passes[kind]) for kind in Kind}
    warmup: tuple[Window, ...] = ()
    if options.warmup_trace is not None and options.predicts:
        warmup = read_warmup(options.warmup_trace, options.throughput_adjustment_interval_s, options.windows_max)
    return ThroughputLoadPolicy(options, known, warmup)

"""The throughput loop: from what is expected of the next window to so many replicas of each role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynamo_local.planner.models.estimates import (
    Capacity,
    Engine,
    agg_capacity,
    decode_capacity,
    limits_of,
    prefill_capacity,
)
from dynamo_local.planner.models.pass_model import Kind
from dynamo_local.planner.policies.throughput_load.budget import fitting
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.state import Role, ScalingState, ThroughputVerdict
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.scaling import ThroughputScaling

_ROUNDING = 1e-9
"""2.0000000001 engines are 2."""


def planned(
    roles: Sequence[Role], prediction: Prediction | None, state: ScalingState, options: ThroughputLoadOptions
) -> dict[str, ThroughputVerdict]:
    """One verdict for each role. Where one cannot be sized none is: what was planned before stands."""
    num_req = None if prediction is None else prediction.num_req
    if prediction is None or num_req is None:
        why = state.why_not_predicted or ThroughputScaling.NO_TRAFFIC_DATA
        return {role.name: ThroughputVerdict(why) for role in roles}
    rps = max(0.0, num_req) / options.throughput_adjustment_interval_s
    capacities = {role.name: capacity(role, prediction, state, options) for role in roles}
    if None in capacities.values():
        return {
            name: ThroughputVerdict(
                ThroughputScaling.MODEL_NOT_READY if known is None else ThroughputScaling.PARTNER_NOT_READY,
                engine_rps=None if known is None else known.rps,
                predicted_rps=rps,
            )
            for name, known in capacities.items()
        }
    return _sized(roles, {name: known for name, known in capacities.items() if known is not None}, rps, options)


def needed_replicas(rps: float, engine_rps: float, floor: int) -> int:
    """So many workers for that many requests per second."""
    return max(floor, math.ceil(rps / engine_rps - _ROUNDING))


def capacity(
    role: Role, prediction: Prediction, state: ScalingState, options: ThroughputLoadOptions
) -> Capacity | None:
    """Of one worker of that role, all its ranks together; None while its model, or what requests look like, is not
    known."""
    isl, osl = prediction.isl or 0.0, prediction.osl or 0.0
    engine = engine_of(role, state, options, prediction)
    if not engine.model.ready or isl <= 0 or (role.kind is not Kind.PREFILL and osl <= 0):
        return None
    ttft, itl = options.ttft_ms / 1000, options.itl_ms / 1000
    if role.kind is Kind.PREFILL:
        one = prefill_capacity(engine, isl=isl, ttft_target_s=ttft)
    elif role.kind is Kind.DECODE:
        one = decode_capacity(engine, isl=isl, osl=osl, itl_target_s=itl)
    else:
        one = agg_capacity(engine, isl=isl, osl=osl, ttft_target_s=ttft, itl_target_s=itl)
    told = state.told.get(role.pool.component)
    return one._replace(rps=one.rps * (told.dp_size if told is not None else 1))


def engine_of(
    role: Role, state: ScalingState, options: ThroughputLoadOptions, prediction: Prediction | None = None
) -> Engine:
    """An engine of that role as it is for estimates; the prediction's hit rate and accept length go first."""
    hit = prediction.kv_hit_rate if prediction is not None and prediction.kv_hit_rate is not None else state.kv_hit_rate
    accept = state.accept_length
    if prediction is not None and prediction.accept_length is not None:
        accept = prediction.accept_length
    return Engine(
        state.models[role.kind],
        limits_of(state.told.get(role.pool.component)),
        hit or 0.0,
        min(options.speculative_nextn + 1.0, max(1.0, accept or 1.0)),
    )


def _sized(
    roles: Sequence[Role], capacities: Mapping[str, Capacity], rps: float, options: ThroughputLoadOptions
) -> dict[str, ThroughputVerdict]:
    needed = [needed_replicas(rps, capacities[role.name].rps, role.floor) for role in roles]
    jump = options.max_throughput_scaling_replicas
    wanted = [
        max(role.floor, min(max(count, role.pool.ready - jump), role.pool.ready + jump))
        for role, count in zip(roles, needed, strict=True)
    ]
    floors = [role.floor for role in roles]
    sizes = [role.pool.gpus_per_worker for role in roles]
    bounds = fitting(wanted, floors, sizes, options.gpus_max) or floors
    rule = ThroughputScaling.SET_LOWER_BOUND if options.loads else ThroughputScaling.SCALE
    verdicts = {}
    for role, count, bound in zip(roles, needed, bounds, strict=True):
        one = capacities[role.name]
        verdict = ThroughputVerdict(rule, bound, count, one.rps, rps, one.within)
        if rule is ThroughputScaling.SCALE and bound == role.pool.capacity:
            verdict = replace(verdict, rule=ThroughputScaling.NO_CHANGE)
        verdicts[role.name] = verdict
    return verdicts

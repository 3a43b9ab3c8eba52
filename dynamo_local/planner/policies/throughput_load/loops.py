"""The load loop: what each role's engines are loaded with now, one replica up or down.

It asks in this order: is anything known of the engines, is nothing under way, is every rank of every worker among
them, can their load be judged. Where one role of a disaggregated graph cannot be judged, the other holds, too.

While workers start, the policy does one thing only: it may take a starting worker back. The same reduction must be
wanted twice from the same workers, a load interval apart, and no worker may be leaving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.pass_model import (
    Capacity,
    Engine,
    Kind,
    agg_capacity,
    decode_capacity,
    limits_of,
    prefill_capacity,
)
from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.policies.throughput_load.signals import (
    EngineLoad,
    EngineWatch,
    RoleLoad,
    judged,
    signals_of,
    worst_estimates,
)
from dynamo_local.planner.policies.throughput_load.state import (
    Cancel,
    LoadVerdict,
    Role,
    ScalingState,
    ThroughputVerdict,
)
from dynamo_local.planner.values import LoadScaling, Prediction, ThroughputScaling, WorkerPools

# --- throughput
# The throughput loop: from what is expected of the next window to so many replicas of each role.

_ROUNDING = 1e-9
"""2.0000000001 engines are 2."""


def planned(
    roles: Sequence[Role], prediction: Prediction | None, state: ScalingState, options: PlannerConfig
) -> dict[str, ThroughputVerdict]:
    """One verdict for each role. Where one cannot be sized none is: what was planned before stands."""
    num_req = None if prediction is None else prediction.num_req
    if prediction is None or num_req is None:
        why = state.why_not_predicted or ThroughputScaling.NO_TRAFFIC_DATA
        return {role.name: ThroughputVerdict(why) for role in roles}
    rps = max(0.0, num_req) / options.throughput_adjustment_interval_seconds
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


def capacity(role: Role, prediction: Prediction, state: ScalingState, options: PlannerConfig) -> Capacity | None:
    """Capacity of one worker of that role, all its ranks together; None while its model, or what requests look like, is
    not known."""
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
    reported = state.reported.get(role.pool.component)
    return one._replace(rps=one.rps * (reported.dp_size if reported is not None else 1))


def engine_of(role: Role, state: ScalingState, options: PlannerConfig, prediction: Prediction | None = None) -> Engine:
    """An engine of that role as it is for estimates; the prediction's hit rate and accept length go first."""
    hit = prediction.kv_hit_rate if prediction is not None and prediction.kv_hit_rate is not None else state.kv_hit_rate
    accept = state.accept_length
    if prediction is not None and prediction.accept_length is not None:
        accept = prediction.accept_length
    return Engine(
        state.models[role.kind],
        limits_of(state.reported.get(role.pool.component)),
        hit or 0.0,
        min(options.speculative_nextn + 1.0, max(1.0, accept or 1.0)),
    )


def _sized(
    roles: Sequence[Role], capacities: Mapping[str, Capacity], rps: float, options: PlannerConfig
) -> dict[str, ThroughputVerdict]:
    needed = [needed_replicas(rps, capacities[role.name].rps, role.floor) for role in roles]
    jump = options.max_throughput_scaling_replicas
    wanted = [
        max(role.floor, min(max(count, role.pool.ready - jump), role.pool.ready + jump))
        for role, count in zip(roles, needed, strict=True)
    ]
    floors = [role.floor for role in roles]
    sizes = [role.pool.gpus_per_worker for role in roles]
    bounds = fitting(wanted, floors, sizes, options.max_gpu_budget) or floors
    rule = ThroughputScaling.SET_LOWER_BOUND if options.loads else ThroughputScaling.SCALE
    verdicts = {}
    for role, count, bound in zip(roles, needed, bounds, strict=True):
        one = capacities[role.name]
        verdict = ThroughputVerdict(rule, bound, count, one.rps, rps, one.within)
        if rule is ThroughputScaling.SCALE and bound == role.pool.capacity:
            verdict = replace(verdict, rule=ThroughputScaling.NO_CHANGE)
        verdicts[role.name] = verdict
    return verdicts


_SLACK = 1e-6


def loaded(
    roles: Sequence[Role], pools: WorkerPools, state: ScalingState, options: PlannerConfig, now_s: float
) -> tuple[dict[str, LoadVerdict], Cancel | None, bool]:
    """A verdict for each role, the reduction to be remembered while workers start, and whether it is to be done now."""
    busy = pools.adjusting
    growing = busy and not pools.pending and not any(pool.leaving for pool in pools.all)
    if busy and not growing:
        return dict.fromkeys(_names(roles), LoadVerdict(LoadScaling.SCALING_IN_PROGRESS)), None, False
    verdicts = _judged_all(roles, state, options, now_s)
    if not busy:
        return verdicts, None, False
    targets = {
        role.name: verdict.wanted
        for role in roles
        if (verdict := verdicts[role.name]).rule is LoadScaling.SCALE_DOWN
        and verdict.wanted is not None
        and role.pool.coming > 0
    }
    if not targets:
        return dict.fromkeys(_names(roles), LoadVerdict(LoadScaling.SCALING_IN_PROGRESS)), None, False
    inventory = tuple((role.name, role.pool.ready, role.pool.coming) for role in roles)
    cancel = Cancel(inventory, tuple(sorted(targets.items())), now_s)
    before = state.cancel
    if before is None or (before.inventory, before.targets) != (cancel.inventory, cancel.targets):
        return _held(verdicts), cancel, False
    if now_s < before.at_s + options.load_adjustment_interval_seconds * (1 - _SLACK):
        return _held(verdicts), before, False
    return {name: one if name in targets else _hold(one) for name, one in verdicts.items()}, None, True


def _names(roles: Sequence[Role]) -> list[str]:
    return [role.name for role in roles]


def _held(verdicts: Mapping[str, LoadVerdict]) -> dict[str, LoadVerdict]:
    return {name: _hold(verdict) for name, verdict in verdicts.items()}


def _hold(verdict: LoadVerdict) -> LoadVerdict:
    return LoadVerdict(LoadScaling.SCALING_IN_PROGRESS, None, verdict.signals, verdict.numbers)


def _judged_all(
    roles: Sequence[Role], state: ScalingState, options: PlannerConfig, now_s: float
) -> dict[str, LoadVerdict]:
    watches = state.watches.values()
    engines = {role.name: [one for one in watches if one.component == role.pool.component] for role in roles}
    unknown: dict[str, LoadVerdict] = {}
    for role in roles:
        if (why := _not_covered(role, engines[role.name], state)) is not None:
            unknown[role.name] = why
    verdicts: dict[str, LoadVerdict] = {}
    if not unknown:
        for role in roles:
            verdict = _one(role, engines[role.name], state, options, now_s)
            (verdicts if verdict.rule is not LoadScaling.INSUFFICIENT_DATA else unknown)[role.name] = verdict
    if not unknown:
        return verdicts
    partner = LoadVerdict(LoadScaling.PARTNER_NOT_READY)
    return {name: unknown.get(name, partner) for name in _names(roles)}


def _not_covered(role: Role, engines: Sequence[EngineWatch], state: ScalingState) -> LoadVerdict | None:
    """Why not every rank of every worker is known; None where it is."""
    reported = state.reported.get(role.pool.component)
    expected = role.pool.ready * (reported.dp_size if reported is not None else 1)
    known = sum(one.now is not None for one in engines)
    if known and known == expected == len(engines):
        return None
    rule = LoadScaling.WORKER_COUNT_MISMATCH if known else LoadScaling.NO_FPM_DATA
    return LoadVerdict(rule, numbers={"fpm_engines": known, "fpm_engines_expected": expected})


def _one(
    role: Role, engines: Sequence[EngineWatch], state: ScalingState, options: PlannerConfig, now_s: float
) -> LoadVerdict:
    pool = role.pool
    queue, prompt = state.queue, state.models[role.kind].isl.mean
    if role.kind is Kind.PREFILL and not (queue.known and (prompt is not None or not queue.most)):
        return LoadVerdict(LoadScaling.INSUFFICIENT_DATA)
    each = (prompt or 0.0) / len(engines)
    after = pool.capacity - 1
    elapsed_s = now_s - state.watched_since_s
    load = RoleLoad(
        kind=role.kind,
        now=[_with_shared(one.now, role, queue.now, each) for one in engines if one.now is not None and not one.hung],
        most=[_with_shared(one.most, role, queue.most, each) for one in engines],
        hung=sum(one.hung for one in engines),
        shared=pool.ready / max(1, min(pool.ready, after)),
        busy=min(1.0, max((one.busy_s for one in engines), default=0.0) / elapsed_s) if elapsed_s > 0 else 0.0,
        engine=engine_of(role, state, options),
        reported=state.reported.get(pool.component),
    )
    signals = signals_of(load, options)
    if signals is None:
        samples = len(state.models[role.kind].samples)
        numbers = {"samples": samples, "samples_min": options.load_min_observations}
        return LoadVerdict(LoadScaling.INSUFFICIENT_DATA, numbers=numbers)
    rule = judged(signals, capacity=pool.capacity, floor=role.floor)
    wanted = None
    if rule is LoadScaling.SCALE_UP:
        wanted = max(pool.capacity, pool.ready + 1)
    elif rule is LoadScaling.SCALE_DOWN and after < state.bounds.get(role.name, 0):
        rule = LoadScaling.SCALE_DOWN_CAPPED_BY_THROUGHPUT
    elif rule is LoadScaling.SCALE_DOWN:
        wanted = after
    return LoadVerdict(rule, wanted, signals, worst_estimates(load, options))


def _with_shared(load: EngineLoad, role: Role, waiting: float | None, each: float) -> EngineLoad:
    """With an engine's part of the prompts in the graph's queue. Its own may be among them, so the larger counts."""
    if role.kind is not Kind.PREFILL or not waiting or waiting * each <= load.queued_prefill_tokens:
        return load
    return load._replace(queued_prefill_tokens=waiting * each)

"""The load loop: what each role's engines are loaded with now, one replica up or down.

It asks in this order: is anything known of the engines, is nothing under way, is every rank of every worker among
them, can their load be judged. Where one role of a disaggregated graph cannot be judged, the other holds, too.

While workers start, only one thing may be done: a starting one may be taken back, when the same reduction was wanted
twice from the same workers, a load interval apart, and nobody leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_local.planner.models.pass_model import Kind
from dynamo_local.planner.policies.throughput_load.engines import EngineLoad, EngineWatch
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.signals import RoleLoad, judged, signals_of, worst_estimates
from dynamo_local.planner.policies.throughput_load.state import Cancel, LoadVerdict, Role, ScalingState
from dynamo_local.planner.policies.throughput_load.throughput import engine_of
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.scaling import LoadScaling

_SLACK = 1e-6


def loaded(
    roles: Sequence[Role], pools: WorkerPools, state: ScalingState, options: ThroughputLoadOptions, now_s: float
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
    if now_s < before.at_s + options.load_adjustment_interval_s * (1 - _SLACK):
        return _held(verdicts), before, False
    return {name: one if name in targets else _hold(one) for name, one in verdicts.items()}, None, True


def _names(roles: Sequence[Role]) -> list[str]:
    return [role.name for role in roles]


def _held(verdicts: Mapping[str, LoadVerdict]) -> dict[str, LoadVerdict]:
    return {name: _hold(verdict) for name, verdict in verdicts.items()}


def _hold(verdict: LoadVerdict) -> LoadVerdict:
    return LoadVerdict(LoadScaling.SCALING_IN_PROGRESS, None, verdict.signals, verdict.numbers)


def _judged_all(
    roles: Sequence[Role], state: ScalingState, options: ThroughputLoadOptions, now_s: float
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
    told = state.told.get(role.pool.component)
    expected = role.pool.ready * (told.dp_size if told is not None else 1)
    known = sum(one.now is not None for one in engines)
    if known and known == expected == len(engines):
        return None
    rule = LoadScaling.WORKER_COUNT_MISMATCH if known else LoadScaling.NO_FPM_DATA
    return LoadVerdict(rule, numbers={"fpm_engines": known, "fpm_engines_expected": expected})


def _one(
    role: Role, engines: Sequence[EngineWatch], state: ScalingState, options: ThroughputLoadOptions, now_s: float
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
        told=state.told.get(pool.component),
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

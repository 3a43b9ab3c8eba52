"""Why each role's step is what it is: Dynamo's enums, and the numbers that were compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dynamo_local.planner.policies.throughput_load.budget import Fit, Granted
from dynamo_local.planner.policies.throughput_load.explaining import why
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.otherwise import Settled, nearest
from dynamo_local.planner.policies.throughput_load.state import LoadVerdict, Role, ScalingState, ThroughputVerdict
from dynamo_local.planner.values.decisions import Reason
from dynamo_local.planner.values.scaling import LoadScaling, ThroughputScaling

LOAD_DECISION, THROUGHPUT_DECISION = "load_scaling_decision", "throughput_scaling_decision"
"""The names of Dynamo's enums: the keys of `Reason.decisions`."""


class Outcome(NamedTuple):
    """One role at the end of a tick. `wanted`: what was proposed; `grant`: what floors and budget left of it; `busy`:
    something starts or leaves; `blind`: why the workers cannot be observed; `overridden`: plugins of others said
    otherwise than our own stages."""

    role: Role
    wanted: int
    grant: Granted
    busy: bool
    blind: str | None
    overridden: bool

    @property
    def replicas(self) -> int:
        """The workers that are to serve."""
        return self.grant.replicas

    @property
    def step(self) -> int:
        """What is to be changed."""
        return self.grant.replicas - self.role.pool.capacity


def reason_of(
    outcome: Outcome, outcomes: Sequence[Outcome], state: ScalingState, options: ThroughputLoadOptions
) -> Reason:
    """The reason of one of these outcomes."""
    name = outcome.role.name
    load, throughput = state.load.get(name), state.throughput.get(name)
    rule = _rule(outcome, load, throughput, options)
    settled = Settled(rule, outcome.role, outcome.step, load, throughput, state.bounds.get(name))
    numbers = _numbers(outcome, outcomes, state, options)
    held = outcome.busy or outcome.blind is not None
    return Reason(
        outcome.role.pool.component,
        outcome.step,
        rule.value,
        numbers,
        None if held else nearest(settled, [(one.role, one.wanted) for one in outcomes], options),
        why=why(rule.value, numbers) if outcome.blind is None else outcome.blind,
        decisions={
            LOAD_DECISION: _load_decision(rule, load, options),
            THROUGHPUT_DECISION: _throughput_decision(rule, throughput, options),
        },
    )


def _rule(
    outcome: Outcome,
    load: LoadVerdict | None,
    throughput: ThroughputVerdict | None,
    options: ThroughputLoadOptions,
) -> LoadScaling | ThroughputScaling:
    """What decided, the last word first."""
    enum = LoadScaling if options.loads else ThroughputScaling
    if outcome.blind is not None:
        return LoadScaling.NO_FPM_DATA if options.loads else ThroughputScaling.NO_TRAFFIC_DATA
    if outcome.busy and not outcome.step:
        return LoadScaling.SCALING_IN_PROGRESS
    if outcome.grant.fit is Fit.RECONCILED:
        return enum.GPU_BUDGET_RECONCILE
    if outcome.grant.fit is Fit.GUARD_HOLD and not outcome.step:
        return enum.GPU_BUDGET_GUARD_HOLD
    if outcome.overridden:
        return enum.OVERRIDE_BY_USER_PLUGIN
    raised = load is None or load.wanted is None or load.wanted < outcome.replicas
    if outcome.step > 0 and raised:
        return ThroughputScaling.SET_LOWER_BOUND if options.loads else ThroughputScaling.SCALE
    if load is not None:
        return load.rule
    if outcome.step:
        return ThroughputScaling.SCALE
    return ThroughputScaling.NO_CHANGE if throughput is None else throughput.rule


_SETTLED = {"gpu_budget_guard_hold", "gpu_budget_reconcile", "override_by_user_plugin", "scaling_in_progress"}
"""What was said after both loops."""


def _load_decision(
    rule: LoadScaling | ThroughputScaling, load: LoadVerdict | None, options: ThroughputLoadOptions
) -> str:
    if not options.loads:
        return LoadScaling.DISABLED.value
    if rule.value in _SETTLED:
        return rule.value
    return (LoadScaling.UNSET if load is None else load.rule).value


def _throughput_decision(
    rule: LoadScaling | ThroughputScaling, throughput: ThroughputVerdict | None, options: ThroughputLoadOptions
) -> str:
    if not options.predicts:
        return ThroughputScaling.DISABLED.value
    if rule.value in _SETTLED and not options.loads:
        return rule.value
    return (ThroughputScaling.UNSET if throughput is None else throughput.rule).value


def _numbers(
    outcome: Outcome, outcomes: Sequence[Outcome], state: ScalingState, options: ThroughputLoadOptions
) -> dict[str, float]:
    role = outcome.role
    pool, name = role.pool, role.name
    numbers: dict[str, float] = {
        "workers": pool.capacity,
        "workers_ready": pool.ready,
        "workers_wanted": outcome.wanted,
        "workers_min": role.floor,
        "gpus_per_worker": pool.gpus_per_worker,
        "gpus_counted": sum(one.role.pool.capacity * one.role.pool.gpus_per_worker for one in outcomes),
    }
    if math.isfinite(options.gpus_max):
        numbers["max_gpu_budget"] = options.gpus_max
    if options.gpus_min:
        numbers["min_gpu_budget"] = options.gpus_min
    if name in state.bounds:
        numbers["throughput_lower_bound"] = state.bounds[name]
    load, throughput = state.load.get(name), state.throughput.get(name)
    if load is not None:
        numbers.update(load.numbers)
        for compared in (*load.signals.up, *load.signals.low, *load.signals.down):
            numbers[compared.name], numbers[f"{compared.name}_limit"] = compared.value, compared.limit
    if throughput is not None:
        numbers.update(_of_throughput(throughput, state))
    return numbers


def _of_throughput(verdict: ThroughputVerdict, state: ScalingState) -> dict[str, float]:
    found = {
        "predicted_requests_per_second": verdict.predicted_rps,
        "engine_capacity_requests_per_second": verdict.engine_rps,
        "predicted_replicas": verdict.replicas,
        "sla_unreachable": None if verdict.within else 1.0,
    }
    if (seen := state.prediction) is not None:
        found |= {"predicted_num_req": seen.num_req, "predicted_isl": seen.isl, "predicted_osl": seen.osl}
        found |= {"kv_hit_rate": seen.kv_hit_rate, "accept_length": seen.accept_length}
    return {name: value for name, value in found.items() if value is not None}

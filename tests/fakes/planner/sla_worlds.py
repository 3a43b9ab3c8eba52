"""The SLA planner in a test: traffic of a window, a pull, one whole tick."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.sla import SlaPolicy, SlaState
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    Observation,
    Override,
    Reading,
    Reason,
    Traffic,
)
from dynamo_local.profile.interpolation import interpolators
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.planner.observations import DECODE, PREFILL, worker_pools
from tests.fakes.planner.options import sla_options

INTERVAL_S = 180.0
H200 = interpolators(DEFAULT_PROFILE)


def policy(**options: Any) -> SlaPolicy:
    """On the H200's profile, with an ITL target of 10 ms and a budget that does not bind."""
    return SlaPolicy(sla_options(**{"itl_ms": 10.0, "max_gpu_budget": 64} | options), *H200)


def traffic(num_req: float | Missing = 7200.0, **more: Any) -> Traffic:
    """The worked case of planning-facts: prompts of 3000 tokens, answers of 300. Latencies are not known."""
    usual = {"at_s": INTERVAL_S, "duration_s": INTERVAL_S, "num_req": num_req, "isl": 3000.0, "osl": 300.0}
    return Traffic(**usual | more)


def observation(
    seen: Traffic | Missing | None, pools: tuple[Any, Any] = (1, 1), at_s: float = INTERVAL_S, **more: Any
) -> Observation:
    gpus = {name: more.pop(name) for name in ("prefill_gpus", "decode_gpus") if name in more}
    return Observation(Reading(at_s, None, {}), worker_pools(*pools, **gpus), seen, **more)


def constant(one: SlaPolicy, state: SlaState, seen: Observation) -> Forecasts | None:
    """The last window again; None where nothing is to be forecast."""
    task = one.forecasting(state, seen)
    return None if task is None else Forecasts(tuple((series[-1],) * task.steps for series in task.series))


def tick(
    one: SlaPolicy,
    state: SlaState,
    seen: Observation,
    forecasts: Forecasts | Missing | None = None,
    plugin: tuple[ComponentTarget, ...] | None = None,
) -> tuple[SlaState, Decision | None]:
    task = constant(one, state, seen)
    state, prediction = one.predicted(state, seen, forecasts or task)
    state, proposals = one.propose(state, seen, prediction)
    targets: tuple[ComponentTarget, ...] = ()
    for proposal in proposals:
        assert isinstance(proposal.result, Override)
        targets = proposal.result.targets
    return one.settle(state, seen, targets if plugin is None else plugin)


def decided(one: SlaPolicy, seen: Observation, **more: Any) -> Decision:
    decision = tick(one, one.first(0.0), seen, **more)[1]
    assert decision is not None
    return decision


def reason_of(decision: Decision, component: str) -> Reason:
    return next(reason for reason in decision.reasons if reason.component == component)


def targets_of(decision: Decision) -> tuple[int, int]:
    return decision.targets[PREFILL], decision.targets[DECODE]

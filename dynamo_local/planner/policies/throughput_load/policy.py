"""The throughput-load policy: Dynamo's first design and Dynamo 1.6.1, as one pure object.

In prose:

* Two loops on one grid of ticks, whose length divides both intervals. The first of each fires one whole interval after
  the start. Points of the grid are absolute times: a late tick moves no other.
* The throughput loop sizes each role for the predicted window. Alone it sets targets. Beside the load loop it sets
  lower bounds. They hold until its next decision and are proposed at each tick, so they need no load loop to be
  reached.
* The load loop moves each role by one, above the lower bound, by what its engines are loaded with now.
* Unknown values change nothing: no metrics, no traffic, no model. The bound of before stands.
* While something starts or leaves, nothing else is decided (but see `loading`); a throughput decision that comes at
  such a time is carried out afterwards, not lost.
* Floors and GPU budget are kept at the very end, whoever proposed (see `budget`).
* With `adaptive-intervals` the throughput loop sizes for the most of all windows until a worker that is started now
  serves. Its interval stays: a decision that comes during a start is not lost.
* A person's change is respected: bounds are forgotten and both intervals begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.pass_model import Kind, PassModel
from dynamo_local.planner.policies.budget import Claim, Fit, Granted, granted
from dynamo_local.planner.policies.protocol import steps_ahead
from dynamo_local.planner.policies.throughput_load.loops import loaded, planned
from dynamo_local.planner.policies.throughput_load.reasons import Outcome, reason_of
from dynamo_local.planner.policies.throughput_load.signals import begun_anew
from dynamo_local.planner.policies.throughput_load.state import (
    Role,
    ScalingState,
    absorbed,
    due,
    learning_of,
    model_sources,
    passed,
    roles_of,
)
from dynamo_local.planner.predictors import forecast_task, windows_max
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    LoadScaling,
    Needs,
    Observation,
    Override,
    OverrideType,
    PolicyStatus,
    Prediction,
    Proposal,
    Series,
    ThroughputScaling,
    Traffic,
    Window,
)

LOAD_PROPOSE, THROUGHPUT_PROPOSE = "builtin_load_propose", "builtin_throughput_propose"
PRIORITIES = {LOAD_PROPOSE: 10, THROUGHPUT_PROPOSE: 20}

METADATA_WINDOW_S = 60.0
"""Hit rate and accept length for the load loop alone: several scrapes of any usual Prometheus. (Dynamo asks for the
last 5 s, in which there is often none.)"""


@dataclass(frozen=True, slots=True)
class ThroughputLoadPolicy:
    """`planner.policies.protocol.Policy` of `ScalingState`. `known`: models that were trained before there is traffic
    (`models.bootstrap`), by kind. `warmup` are windows of a trace, as if they had been before."""

    options: PlannerConfig
    known: Mapping[Kind, PassModel] = field(default_factory=dict)
    warmup: tuple[Window, ...] = ()

    def first(self, now_s: float) -> ScalingState:
        """Models as they were trained; both intervals begin."""
        options = self.options
        series = Series(options.throughput_adjustment_interval_seconds, windows_max=windows_max(options))
        series = series.warmed_up(self.warmup)
        return ScalingState(now_s, now_s, series, models=self._models({}), watched_since_s=now_s)

    def taking_over(self, state: ScalingState) -> ScalingState:
        """Models and history stay. Bounds were made for other options, and are forgotten. Both intervals begin
        at the last tick."""
        window_s = self.options.throughput_adjustment_interval_seconds
        longer = window_s / state.series.window_s
        windows = tuple(replace(window, num_req=window.num_req * longer) for window in state.series.windows)
        series = replace(state.series, window_s=window_s, windows=windows, windows_max=windows_max(self.options))
        models = self._models(state.models)
        begun = {kind: one for kind, one in state.benchmarks.items() if models[kind] is state.models[kind]}
        return replace(self.manual(state, state.seen_s), series=series, models=models, benchmarks=begun)

    def next_at_s(self, state: ScalingState) -> float:
        """The grid's next point; sooner where a decision waits for the end of a start."""
        tick_s = self.options.tick_s
        at_s = state.began_s + (passed(state, state.seen_s, tick_s) + 1) * tick_s
        return min(at_s, state.seen_s + self.options.load_adjustment_interval_seconds) if state.starved else at_s

    def needs(self, state: ScalingState) -> Needs:
        """The passes always, so that none are lost; the traffic where the throughput loop is due."""
        options, at_s = self.options, self.next_at_s(state)
        window_s = None
        if options.predicts and due(state, at_s, options.throughput_adjustment_interval_seconds):
            window_s = options.throughput_adjustment_interval_seconds
        elif options.optimization_target == "sla" and not options.predicts:
            window_s = max(METADATA_WINDOW_S, options.load_adjustment_interval_seconds)
        return Needs(traffic_window_s=window_s, passes=True)

    def status(self, state: ScalingState) -> PolicyStatus:
        """The policy observes while something starts. It is adjusting only while a decision waits for that."""
        began_s, readings = state.decided_from
        models = model_sources(state) if self.options.optimization_target == "sla" else {}
        return PolicyStatus(
            self.next_at_s(state), state.starved, interval_began_s=began_s, readings=readings, models=models
        )

    def forecasting(self, state: ScalingState, observation: Observation) -> ForecastTask | None:
        """Requests, ISL and OSL of the windows to come. Nothing before the first request."""
        options = self.options
        if not options.predicts or not due(state, observation.at_s, options.throughput_adjustment_interval_seconds):
            return None
        series = state.series.after(observation.traffic)
        if not _counted(observation) or not series.known:
            return None
        return forecast_task(options, series, self._lead_windows(observation))

    def predicted(
        self, state: ScalingState, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[ScalingState, Prediction | None]:
        """The whole observation is taken in here. No prediction where one of the three numbers is not known."""
        state = absorbed(state, observation, self.options)
        if not state.throughput_due:
            return state, None
        if not _counted(observation):
            return replace(state, why_not_predicted=ThroughputScaling.NO_TRAFFIC_DATA), None
        if not state.series.known:
            return replace(state, why_not_predicted=ThroughputScaling.MODEL_NOT_READY), None
        requested = forecasts or Missing("nobody was asked")
        windows = [state.series.prediction(requested, step) for step in range(1, self._lead_windows(observation) + 1)]
        known = [ahead for ahead in windows if _sensible(ahead)]
        if len(known) < len(windows):
            return replace(state, why_not_predicted=ThroughputScaling.PREDICT_FAILED), None
        ahead = max(known, key=lambda one: one.num_req or 0.0)
        return state, replace(ahead, kv_hit_rate=state.kv_hit_rate, accept_length=state.accept_length)

    def propose(
        self, state: ScalingState, observation: Observation, prediction: Prediction | None
    ) -> tuple[ScalingState, tuple[Proposal, ...]]:
        """The load loop's steps, and the throughput loop's bounds (or targets, where it is alone)."""
        if observation.blind is not None:
            return state, ()
        options, roles = self.options, roles_of(observation.pools, self.options)
        if state.throughput_due:
            verdicts = planned(roles, prediction, state, options)
            found = {name: one.bound for name, one in verdicts.items() if one.bound is not None}
            state = replace(state, throughput=verdicts, bounds={**state.bounds, **found}, prediction=prediction)
        if state.load_due:
            load, cancel, cancelling = loaded(roles, observation.pools, state, options, observation.at_s)
            state = replace(
                state,
                load=load,
                cancel=cancel,
                cancelling=cancelling,
            )
            state = self._watching_anew(state, observation.at_s)
        return self._proposals(state, roles)

    def settle(
        self, state: ScalingState, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[ScalingState, Decision | None]:
        """Within floors and budget. While something starts or leaves: only what may be done then."""
        options, roles = self.options, roles_of(observation.pools, self.options)
        merged = {target.sub_component_type: target.replicas for target in targets}
        busy = observation.pools.adjusting
        holds = observation.pools.pending or observation.blind is not None
        wanted = {role.name: _wanted(role, merged.get(role.name), state) for role in roles}
        changes = any(wanted[role.name] != role.pool.capacity for role in roles)
        state = replace(state, starved=busy and changes and not options.loads)
        if busy or holds:
            wanted = {role.name: _taken_back(role, merged.get(role.name), state) for role in roles}
        grants = self._granted(roles, wanted, busy=busy, holds=holds)
        outcomes = [
            Outcome(
                role, wanted[role.name], grant, busy, observation.blind, _overridden(role, merged.get(role.name), state)
            )
            for role, grant in zip(roles, grants, strict=True)
        ]
        if not state.load_due and not state.throughput_due and not any(outcome.step for outcome in outcomes):
            return state, None
        reasons = [reason_of(outcome, outcomes, state, options) for outcome in outcomes]
        decision = Decision(
            now_s=observation.at_s,
            targets={one.role.pool.component: one.replicas for one in outcomes},
            reasons=tuple(sorted(reasons, key=lambda reason: reason.step >= 0)),
            next_tick_at=self.next_at_s(state),
        )
        looked_s = (
            options.load_adjustment_interval_seconds
            if state.load_due
            else options.throughput_adjustment_interval_seconds
        )
        return replace(state, decided_from=(observation.at_s - looked_s, (observation.reading,))), decision

    def manual(self, state: ScalingState, now_s: float) -> ScalingState:
        """A whole interval of both loops from now on; what was planned is forgotten."""
        state = replace(state, began_s=now_s, seen_s=now_s, bounds={}, starved=False, cancel=None)
        return self._watching_anew(state, now_s)

    # --- inside ----------------------------------------------------------------------------------

    def _lead_windows(self, observation: Observation) -> int:
        """How many windows to look ahead: until a worker that is started now serves, or one."""
        if not self.options.adaptive_intervals:
            return 1
        return steps_ahead(self.options.throughput_adjustment_interval_seconds, observation.pools)

    def _granted(
        self, roles: tuple[Role, ...], wanted: Mapping[str, int], *, busy: bool, holds: bool
    ) -> tuple[Granted, ...]:
        """Within floors and budget. While something starts or leaves, only less is granted; if all `holds`, nothing."""
        claims = [
            Claim(pool.capacity, wanted[name], min(floor, pool.capacity) if busy else floor, pool.gpus_per_worker)
            for name, _, pool, floor in roles
        ]
        if holds:
            return tuple(Granted(claim.current, Fit.AS_WANTED) for claim in claims)
        grants = granted(claims, gpus_max=self.options.max_gpu_budget, gpus_min=self.options.gpus_floor)
        if not busy:
            return grants
        return tuple(
            grant if grant.replicas < claim.current else Granted(claim.current, Fit.AS_WANTED)
            for claim, grant in zip(claims, grants, strict=True)
        )

    def _watching_anew(self, state: ScalingState, now_s: float) -> ScalingState:
        queue = state.queue._replace(most=state.queue.now or 0.0)
        return replace(state, watches=begun_anew(state.watches), queue=queue, watched_since_s=now_s)

    def _models(self, before: Mapping[Kind, PassModel]) -> dict[Kind, PassModel]:
        learning = learning_of(self.options)
        kept = {kind: model for kind, model in before.items() if model.learning == learning}
        return {kind: kept.get(kind) or self.known.get(kind) or PassModel(kind, learning) for kind in Kind}

    def _proposals(self, state: ScalingState, roles: tuple[Role, ...]) -> tuple[ScalingState, tuple[Proposal, ...]]:
        """A fleet goes to nothing by the throughput loop alone (and by floors of 0)."""
        bounds = {role.name: state.bounds[role.name] for role in roles if role.name in state.bounds}
        to_zero = bool(bounds) and not any(bounds.values())
        steps = {
            name: max(one.wanted, bounds.get(name, 0))
            for name, one in state.load.items()
            if one.wanted is not None and (not to_zero or one.rule is LoadScaling.SCALE_UP)
        }
        if not self.options.loads or to_zero:
            requested, kind = {**bounds, **steps}, OverrideType.SET
        else:
            raised = {role.name: bounds[role.name] for role in roles if bounds.get(role.name, 0) > role.pool.ready}
            requested, kind = {**raised, **steps}, OverrideType.AT_LEAST
        proposals = []
        for plugin, targets, how in ((LOAD_PROPOSE, steps, OverrideType.SET), (THROUGHPUT_PROPOSE, bounds, kind)):
            if targets:
                said = tuple(ComponentTarget(name, count, how) for name, count in targets.items())
                proposals.append(Proposal(plugin, PRIORITIES[plugin], Override(said)))
        return replace(state, requested=requested), tuple(proposals)


def _counted(observation: Observation) -> bool:
    """Whether it is known how many requests came."""
    return isinstance(observation.traffic, Traffic) and not isinstance(observation.traffic.num_req, Missing)


def _sensible(ahead: Prediction | Missing) -> TypeGuard[Prediction]:
    """Whether all of it is known, and may be."""
    if isinstance(ahead, Missing):
        return False
    return all(
        value is not None and math.isfinite(value) and value >= 0 for value in (ahead.num_req, ahead.isl, ahead.osl)
    )


def _wanted(role: Role, merged: int | None, state: ScalingState) -> int:
    """In workers that serve or will. A merged target of as many as are ready is no wish, unless it is our own."""
    own = state.requested.get(role.name)
    if merged is None:
        return role.pool.capacity
    if own is not None and merged == own:
        return own
    return role.pool.capacity if merged == role.pool.ready else merged


def _taken_back(role: Role, merged: int | None, state: ScalingState) -> int:
    """While workers start: as many as there are, but for those of our own that are not needed after all."""
    own, capacity = state.requested.get(role.name), role.pool.capacity
    return own if state.cancelling and own is not None and own == merged and own < capacity else capacity


def _overridden(role: Role, merged: int | None, state: ScalingState) -> bool:
    """Whether plugins of others changed what our own stages proposed."""
    own = state.requested.get(role.name)
    return merged != own if own is not None else merged not in (None, role.pool.ready)

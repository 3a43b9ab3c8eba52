"""The state of the throughput-load policy between ticks: an immutable value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.pass_model import WORKER, Kind, Learning, PassModel, begun_anew
from dynamo_local.planner.policies.throughput_load.signals import (
    MAX_AGE_INTERVALS,
    NO_SIGNALS,
    EngineWatch,
    Signals,
    spread,
    watched,
)
from dynamo_local.planner.values import (
    Capabilities,
    Engines,
    LoadScaling,
    Observation,
    Pool,
    Prediction,
    Reading,
    Series,
    ThroughputScaling,
    Traffic,
    WorkerPools,
)


class Role(NamedTuple):
    """One component that is planned. `name` is `prefill` or `decode` (an aggregated graph's workers, too); `floor` its
    fewest replicas."""

    name: str
    kind: Kind
    pool: Pool
    floor: int


def learning_of(options: PlannerConfig) -> Learning:
    """How the models keep their samples."""
    return Learning(
        options.load_min_observations,
        options.max_num_fpm_samples,
        options.fpm_sample_bucket_size,
        options.regression_features,
    )


def roles_of(pools: WorkerPools, options: PlannerConfig) -> tuple[Role, ...]:
    """The roles that are planned, prefill first."""
    mode = options.mode or ("agg" if pools.prefill is None else "disagg")
    if mode == "agg":
        return (Role("decode", Kind.AGG, pools.decode, options.min_endpoint),)
    roles = []
    if mode != "decode" and pools.prefill is not None:
        roles.append(Role("prefill", Kind.PREFILL, pools.prefill, options.floor("prefill")))
    if mode != "prefill":
        roles.append(Role("decode", Kind.DECODE, pools.decode, options.floor("decode")))
    return tuple(roles)


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """The verdict of the load loop for one role. `wanted` None: it has no opinion. `numbers`: what else it looked
    at."""

    rule: LoadScaling
    wanted: int | None = None
    signals: Signals = NO_SIGNALS
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ThroughputVerdict:
    """The verdict of the throughput loop for one role. `engine_rps`: requests per second of a worker within the targets
    (`within`: they can be kept at all). `replicas` are those that the prediction needs, before jump and budget. `bound`
    is the number after them (None: the former bound holds)."""

    rule: ThroughputScaling
    bound: int | None = None
    replicas: int | None = None
    engine_rps: float | None = None
    predicted_rps: float | None = None
    within: bool = True


class Cancel(NamedTuple):
    """A reduction that was wanted while workers start: of which inventory, to what, since when."""

    inventory: tuple[tuple[str, int, int], ...]
    targets: tuple[tuple[str, int], ...]
    at_s: float


class SharedQueue(NamedTuple):
    """Prompts in the prefill queue of the graph: those in it now, and the most since the load loop's last decision.
    None: there is no such queue, or it is not `known`."""

    now: float | None = None
    most: float = 0.0
    known: bool = True


NO_QUEUE = SharedQueue()


@dataclass(frozen=True, slots=True)
class ScalingState:
    """`began_s` is the zero of both loops' grids, `seen_s` the last observation; `series` are the windows of traffic so
    far.

    `bounds` are the throughput loop's: lower bounds where the load loop runs, too, else targets; a role without one has
    only its floor. `starved`: a throughput decision could not be carried out while workers start. `asked`: what its own
    proposals of this tick want, by role. `planned`: the
    component of each kind. `benchmarks`: the workers' own that models have begun with, or could not.
    `decided_from`: when the interval of the last decision began, and its reading.
    """

    began_s: float
    seen_s: float
    series: Series
    load_due: bool = False
    throughput_due: bool = False
    models: Mapping[Kind, PassModel] = field(default_factory=dict)
    benchmarks: Mapping[Kind, tuple[ForwardPass, ...]] = field(default_factory=dict)
    planned: Mapping[Kind, str] = field(default_factory=dict)
    watches: Mapping[EngineId, EngineWatch] = field(default_factory=dict)
    watched_since_s: float = 0.0
    queue: SharedQueue = NO_QUEUE
    reported: Mapping[str, Capabilities] = field(default_factory=dict)
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    prediction: Prediction | None = None
    why_not_predicted: ThroughputScaling | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)
    starved: bool = False
    cancel: Cancel | None = None
    requested: Mapping[str, int] = field(default_factory=dict)
    cancelling: bool = False
    load: Mapping[str, LoadVerdict] = field(default_factory=dict)
    throughput: Mapping[str, ThroughputVerdict] = field(default_factory=dict)
    decided_from: tuple[float, tuple[Reading, ...]] = (0.0, ())


# --- absorbing
# Takes one observation in: what is due, what the engines did, what the traffic was.

SLACK = 1e-6
"""A observation counts as one at the grid's point within this share of an interval (rounding)."""


LEARNED_FROM = 16
"""Passes of a role and tick, or one of each engine where there are more of these: a model is full in four ticks."""


def passed(state: ScalingState, now_s: float, interval_s: float) -> int:
    """How many of the grid's intervals have ended by then. Points are absolute: a late tick does not move the next."""
    return math.floor((now_s - state.began_s) / interval_s + SLACK)


def due(state: ScalingState, now_s: float, interval_s: float) -> bool:
    """Whether an interval has ended since the last observation."""
    return passed(state, now_s, interval_s) > passed(state, state.seen_s, interval_s)


def absorbed(state: ScalingState, observation: Observation, options: PlannerConfig) -> ScalingState:
    """The state after this observation, before anything is decided."""
    now_s = observation.at_s
    roles = roles_of(observation.pools, options)
    reported = {
        **state.reported,
        **{name: _reported(state.reported.get(name), new) for name, new in observation.capabilities.items()},
    }
    watches = watched(
        state.watches,
        observation.engines,
        now_s=now_s,
        max_age_s=MAX_AGE_INTERVALS * options.load_adjustment_interval_seconds,
    )
    benchmarks = {**state.benchmarks, **_benchmarks(roles, reported)}
    begun = {
        kind: begun_anew(model, benchmarks[kind]) if benchmarks.get(kind) != state.benchmarks.get(kind) else model
        for kind, model in state.models.items()
    }
    learned = {role.kind: _learned(begun[role.kind], role, observation.engines) for role in roles}
    traffic = observation.traffic if isinstance(observation.traffic, Traffic) else None
    counts = options.predicts and due(state, now_s, options.throughput_adjustment_interval_seconds)
    series = state.series.after(traffic) if counts else state.series
    return replace(
        state,
        seen_s=now_s,
        load_due=options.loads and due(state, now_s, options.load_adjustment_interval_seconds),
        throughput_due=counts,
        reported=reported,
        watches=watches,
        models={**begun, **learned},
        benchmarks=benchmarks,
        planned={role.kind: role.pool.component for role in roles},
        queue=absorbed_queue(state.queue, observation.reading.queue),
        series=series,
        kv_hit_rate=_last(traffic.kv_hit_rate if traffic else None, state.kv_hit_rate, 0.0, 1.0),
        accept_length=_last(traffic.accept_length if traffic else None, state.accept_length, 1.0, math.inf),
        prediction=None,
        why_not_predicted=None,
        requested={},
        cancelling=False,
        load={},
        throughput={},
    )


def absorbed_queue(before: SharedQueue, depth: float | Missing | None) -> SharedQueue:
    """With one more look at the queue that prefill workers observation from."""
    if isinstance(depth, Missing) or (depth is not None and not math.isfinite(depth)):
        return SharedQueue(None, before.most, known=False)
    return SharedQueue(depth, before.most if depth is None else max(before.most, depth))


def _reported(before: Capabilities | None, now: Capabilities) -> Capabilities:
    """The last report of each limit: engines of a new configuration report others."""
    if before is None:
        return now
    known = {f.name: value for f in fields(now) if (value := getattr(now, f.name)) is not None}
    return replace(before, **known)


def _benchmarks(roles: Iterable[Role], reported: Mapping[str, Capabilities]) -> dict[Kind, tuple[ForwardPass, ...]]:
    """The benchmarks of the roles whose workers have measured themselves."""
    known = ((role.kind, reported.get(role.pool.component)) for role in roles)
    return {kind: can.benchmark for kind, can in known if can is not None and isinstance(can.benchmark, tuple)}


def model_sources(state: ScalingState) -> dict[str, str]:
    """The source of the first samples of each model, by component, and why it is not the worker."""
    reported = {}
    for kind, component in state.planned.items():
        model, can = state.models[kind], state.reported.get(component)
        source = model.source if model.ready else f"{model.source}, not ready yet" if model.source else "none yet"
        why = can.benchmark if can is not None else None
        if isinstance(why, tuple) and model.source != WORKER:
            why = Missing("its own benchmark makes no model")
        reported[component] = f"{source} ({why.reason})" if isinstance(why, Missing) else source
    return reported


def _last(value: float | Missing | None, before: float | None, low: float, high: float) -> float | None:
    """The last valid one stands."""
    if value is None or isinstance(value, Missing) or not math.isfinite(value) or not low <= value <= high:
        return before
    return value


def _learned(model: PassModel, role: Role, engines: Engines) -> PassModel:
    """With some passes of each engine: so a tick takes about the same time with 64 workers as with 4."""
    own = [seen.passes for seen in engines.values() if seen.component == role.pool.component and seen.passes]
    if not own:
        return model
    averaged = role.kind is Kind.AGG and model.learning.features == "seed"
    each = LEARNED_FROM if averaged else max(1, LEARNED_FROM // len(own))
    return model.observed(*(spread(passes, each) for passes in own))

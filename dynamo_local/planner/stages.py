"""The four stages that plugins may take part in, and what a plugin says of itself when it registers."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import (
    Accept,
    ComponentTarget,
    Needs,
    Observation,
    Override,
    OverrideType,
    Pool,
    Prediction,
    Proposal,
    Reject,
    Traffic,
    WorkerPools,
)

BUILTIN_PREDICT = "builtin_load_predict"
BUILTIN_PREDICT_PRIORITY = 100
"""Not 0 as in Dynamo: priorities on the wire begin with 0, so that nobody could come before it."""


class Stage(enum.StrEnum):
    """In the order of a tick. The names are `plugin_type` on the wire."""

    PREDICT = "predict"
    PROPOSE = "propose"
    RECONCILE = "reconcile"
    CONSTRAIN = "constrain"


class HoldPolicy(enum.IntEnum):
    """The contribution of a plugin in ticks in which it is not due. The numbers are those of the wire."""

    ACCEPT_WHEN_IDLE = 0
    HOLD_LAST = 1


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A plugin, as it registered.

    `priority`: the smaller number wins. `interval_s` is the least time between two calls (0: in each tick). `needs` are
    paths of the context that are to be collected for it (none: all), `requires` paths without which it is not called.
    `window_s` is the length of the traffic's window that it wants (0: the planner's own).
    """

    plugin_id: str
    stage: Stage
    priority: int = 0
    version: str = ""
    protocol_version: str = "1.0"
    interval_s: float = 0.0
    hold_policy: HoldPolicy = HoldPolicy.ACCEPT_WHEN_IDLE
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """The answer of a plugin of PREDICT; None is no opinion. `final`: nobody with a higher number is asked after it."""

    prediction: Prediction | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Nothing:
    """An answer in which nothing is set. It counts as an error, and as `Accept`."""


Answer = Predicted | Accept | Override | Reject | Nothing


# --- context
# The context of plugins in a tick, under the names of Dynamo's `PipelineContext`.

TRAFFIC, FPM = "observations.traffic", "observations.fpm"


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers serve, and how many will when nobody asks again. None: there is no such role."""

    ready_prefill: int | None = None
    ready_decode: int | None = None
    expected_prefill: int | None = None
    expected_decode: int | None = None
    prefill_scaling_in_progress: bool | None = None
    decode_scaling_in_progress: bool | None = None


@dataclass(frozen=True, slots=True)
class Fpm:
    """The last forward pass of each engine (of each rank of a worker) of which one is known."""

    prefill_engines: Mapping[EngineId, ForwardPass]
    decode_engines: Mapping[EngineId, ForwardPass]


@dataclass(frozen=True, slots=True)
class Observations:
    """The observed values. None: not collected, or not known; never 0 in its place."""

    traffic: Traffic | None = None
    fpm: Fpm | None = None
    workers: Workers | None = None


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """All that a plugin is shown. `at_s` is the tick's time on the planner's clock.

    Each stage sees what the stages before have added: `predictions` after PREDICT, `proposal` (and the `decision_id`)
    after PROPOSE. `constrained` is never filled, as in Dynamo.
    """

    request_id: str
    at_s: float
    decision_id: str = ""
    observations: Observations = Observations()
    predictions: Prediction | None = None
    proposal: tuple[ComponentTarget, ...] | None = None
    constrained: tuple[ComponentTarget, ...] | None = None


def context_of(observation: Observation, request_id: str) -> PipelineContext:
    """The context at the beginning of a tick."""
    observations = Observations(_traffic(observation), _fpm(observation), workers_of(observation.pools))
    return PipelineContext(request_id, observation.at_s, observations=observations)


def workers_of(pools: WorkerPools) -> Workers:
    """Both roles, counted."""
    prefill, decode = pools.prefill, pools.decode
    return Workers(
        ready_prefill=None if prefill is None else prefill.ready,
        ready_decode=decode.ready,
        expected_prefill=None if prefill is None else prefill.capacity,
        expected_decode=decode.capacity,
        prefill_scaling_in_progress=None if prefill is None else _moves(prefill, pools.pending),
        decode_scaling_in_progress=_moves(decode, pools.pending),
    )


def _moves(pool: Pool, pending: bool) -> bool:
    return pending or pool.adjusting


def _traffic(observation: Observation) -> Traffic | None:
    """Dynamo's message has no way to leave the first three numbers out; without one of them all of it is unknown. The
    lengths of no requests are 0 there."""
    traffic = observation.traffic
    if not isinstance(traffic, Traffic) or isinstance(traffic.num_req, Missing):
        return None
    lengths_known = not isinstance(traffic.isl, Missing) and not isinstance(traffic.osl, Missing)
    return traffic if lengths_known or traffic.num_req == 0 else None


def _fpm(observation: Observation) -> Fpm | None:
    prefill = None if observation.pools.prefill is None else observation.pools.prefill.component
    sides: dict[bool, dict[EngineId, ForwardPass]] = {True: {}, False: {}}
    for engine, seen in observation.engines.items():
        if isinstance(seen.last, ForwardPass):
            sides[seen.component == prefill][engine] = seen.last
    return Fpm(sides[True], sides[False]) if sides[True] or sides[False] else None


def unset(context: PipelineContext, paths: tuple[str, ...]) -> str | None:
    """The first of these paths (`observations.traffic`, `predictions.predicted_isl`) that holds no value; None where
    all do. A path that no context has never holds one."""
    return next((path for path in paths if not _is_set(context, path)), None)


def _is_set(context: PipelineContext, path: str) -> bool:
    value: object = context
    for name in path.split("."):
        if isinstance(value, Prediction):
            name = name.removeprefix("predicted_")
        if name not in getattr(value, "__dataclass_fields__", {}):
            return False
        value = getattr(value, name)
        if value is None or isinstance(value, Missing):
            return False
    return True


def wanted(needs: Needs, plugins: Iterable[PluginSpec], window_s: float) -> Needs:
    """The needs of the policy and of these plugins. A plugin without `needs` is shown everything.

    There is one window of traffic: the policy's, whose numbers it counts in; where it wants none, the longest that a
    plugin wants (`window_s` for one that says none).
    """
    windows, passes = [], needs.passes
    for plugin in plugins:
        paths = (*plugin.needs, *plugin.requires)
        if not plugin.needs or any(path.startswith(TRAFFIC) or path == "observations" for path in paths):
            windows.append(plugin.window_s or window_s)
        if not plugin.needs or any(path.startswith(FPM) or path == "observations" for path in paths):
            passes = True
    if needs.traffic_window_s is not None:
        windows = [needs.traffic_window_s]
    return replace(needs, traffic_window_s=max(windows, default=None), passes=passes)


# --- merging
# One target for each role out of the proposals of several plugins: PROPOSE, RECONCILE and CONSTRAIN.
#
# Merging the answers of one stage, in this order:
#
# 1. A `Reject` ends the tick: nothing is changed.
# 2. If overrides are `final`, the one with the smallest priority counts alone. (Not in CONSTRAIN.)
# 3. For each role: `max(all AT_LEAST, min(all AT_MOST, the SET with the smallest priority))`. Where there is no SET
# (none
#    counts in CONSTRAIN), the role's number after the stage before takes its place.
#
# A final override is merged by the third rule as any other: an AT_MOST in it stays a bound.


@dataclass(frozen=True, slots=True)
class Clamp:
    """A bound that changed something: the role would have had `wanted` replicas, and has `replicas` by the word of
    `source`."""

    sub_component_type: str
    source: str
    wanted: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Merged:
    """`targets` are those of all stages up to this one, each a SET, of the roles that anybody wants changed.

    `rejected` is the proposal that ended the tick, `final` the one that was heard alone. `dropped` are targets that do
    not count, as `(plugin_id, sub_component_type)`: a SET in CONSTRAIN, or a role that this graph does not have.
    """

    targets: tuple[ComponentTarget, ...] = ()
    rejected: Proposal | None = None
    final: Proposal | None = None
    clamps: tuple[Clamp, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


def merge(
    proposals: Iterable[Proposal],
    baseline: Mapping[str, int],
    so_far: Sequence[ComponentTarget] = (),
    *,
    bounds_only: bool = False,
) -> Merged:
    """One stage. `baseline` has the workers of each role of the graph, `so_far` the targets of the stage before.

    The targets have a role only if a proposal changes it, or if it is in `so_far`. A bound that the number keeps anyway
    changes nothing: a plugin that says "at most 8" of two workers wants nothing done. `bounds_only`: CONSTRAIN.
    """
    ordered = sorted(proposals, key=lambda proposal: (proposal.priority, proposal.plugin_id))
    for proposal in ordered:
        if isinstance(proposal.result, Reject):
            return Merged(rejected=proposal)
    heard = [(proposal, proposal.result) for proposal in ordered if isinstance(proposal.result, Override)]
    final = None if bounds_only else next((each for each in heard if each[1].final), None)
    if final is not None:
        heard = [final]
    said: dict[str, list[tuple[str, ComponentTarget]]] = {}
    dropped = []
    for proposal, override in heard:
        for target in override.targets:
            role = target.sub_component_type
            if role not in baseline or (bounds_only and target.type is OverrideType.SET):
                dropped.append((proposal.plugin_id, role))
            else:
                said.setdefault(role, []).append((proposal.plugin_id, target))
    numbers = {target.sub_component_type: target.replicas for target in so_far}
    clamps = []
    for role, targets in said.items():
        before = numbers.get(role, baseline[role])
        number, clamp = _decided(role, targets, before)
        if clamp is not None:
            clamps.append(clamp)
        if role in numbers or number != before or any(target.type is OverrideType.SET for _, target in targets):
            numbers[role] = number
    return Merged(
        targets=tuple(ComponentTarget(role, numbers[role]) for role in baseline if role in numbers),
        final=None if final is None else final[0],
        clamps=tuple(clamps),
        dropped=tuple(dropped),
    )


def _decided(role: str, said: Sequence[tuple[str, ComponentTarget]], before: int) -> tuple[int, Clamp | None]:
    """The role's number, and the bound that made it so. `said` is in the order of priorities."""
    sets = [target.replicas for _, target in said if target.type is OverrideType.SET]
    ceilings = [(target.replicas, source) for source, target in said if target.type is OverrideType.AT_MOST]
    floors = [(target.replicas, source) for source, target in said if target.type is OverrideType.AT_LEAST]
    wanted = number = sets[0] if sets else before
    source = None
    if ceilings and (lowest := min(ceilings))[0] < number:
        number, source = lowest
    if floors and (highest := max(floors))[0] > number:
        number, source = highest
    if source is None or number == wanted:
        return number, None
    return number, Clamp(role, source, wanted, number)


# --- predicting
# PREDICT: plugins are asked one after the other, and the first who says something about a field is believed.

FIELDS = ("num_req", "isl", "osl", "kv_hit_rate", "accept_length")


def filled(so_far: Prediction | None, said: Prediction | None, by: str) -> Prediction | None:
    """The prediction after the next one has spoken: only fields that nobody has filled yet are taken from it.

    `by` is who said it; `source` then names all who filled something, the first one first.
    """
    if said is None or all(getattr(said, name) is None for name in FIELDS):
        return so_far
    if so_far is None:
        return Prediction(**{name: getattr(said, name) for name in FIELDS}, source=said.source or by)
    added = {name: getattr(said, name) for name in FIELDS if getattr(so_far, name) is None}
    if all(value is None for value in added.values()):
        return so_far
    kept = {name: getattr(so_far, name) for name in FIELDS}
    return Prediction(**{**kept, **added}, source=f"{so_far.source}, {said.source or by}")


# --- answers
# Whether what a plugin answered can be used. A plugin is somebody else's code: anything may come back.

TARGETS_MAX = 64
REPLICAS_MAX = 100_000
PREDICTED_MAX = 1e15
TEXT_MAX = 500


class Unusable(ValueError):
    """Why an answer cannot be used, in words that hold no more of it than fits a log line."""


def shown(text: object) -> str:
    """Text of a stranger, fit for a log line and a table: printable, at most `TEXT_MAX` characters."""
    line = str(text)
    cut = line if len(line) <= TEXT_MAX else f"{line[:TEXT_MAX]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def usable(stage: Stage, answer: object) -> Answer:
    """The answer with its texts cut, or `Unusable`. None is no opinion."""
    if stage is Stage.PREDICT:
        return _predicted(answer)
    match answer:
        case None:
            return Accept()
        case Accept() | Nothing():
            return answer
        case Reject():
            return Reject(shown(answer.reason))
        case Override():
            return Override(_targets(answer.targets), shown(answer.reason), bool(answer.final))
    raise Unusable(f"{_kind(answer)} is no answer of {stage}: it must be Accept, Override or Reject")


def _predicted(answer: object) -> Predicted:
    match answer:
        case None:
            return Predicted()
        case Predicted(prediction=None):
            return Predicted(None, bool(answer.final))
        case Predicted(prediction=prediction, final=final):
            return Predicted(_prediction(prediction), bool(final))
        case Prediction():
            return Predicted(_prediction(answer))
    raise Unusable(f"{_kind(answer)} is no answer of predict: it must be a Prediction, or Predicted")


def _prediction(said: object) -> Prediction:
    if not isinstance(said, Prediction):
        raise Unusable(f"{_kind(said)} is no Prediction")
    for name in FIELDS:
        value = getattr(said, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unusable(f"predicted_{name} is no number")
        if not math.isfinite(value) or not 0 <= value <= PREDICTED_MAX:
            raise Unusable(f"predicted_{name} is {value!r}, and must be 0 or more")
    return Prediction(**{name: getattr(said, name) for name in FIELDS}, source=shown(said.source))


def _targets(targets: object) -> tuple[ComponentTarget, ...]:
    if not isinstance(targets, Iterable):
        raise Unusable("targets must be a list of ComponentTarget")
    found: list[ComponentTarget] = []
    for target in targets:
        if len(found) == TARGETS_MAX:
            raise Unusable(f"it has more than {TARGETS_MAX} targets")
        found.append(_target(target))
    return tuple(found)


def _target(target: object) -> ComponentTarget:
    if not isinstance(target, ComponentTarget) or not isinstance(target.sub_component_type, str):
        raise Unusable(f"{_kind(target)} is no ComponentTarget")
    count = target.replicas
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= REPLICAS_MAX:
        raise Unusable(f"replicas is {shown(repr(count))}, and must be 0 to {REPLICAS_MAX}")
    if target.type not in list(OverrideType):
        raise Unusable(f"type is {shown(repr(target.type))}, and must be SET, AT_LEAST or AT_MOST")
    return ComponentTarget(shown(target.sub_component_type)[:64], count, OverrideType(target.type))


def _kind(value: object) -> str:
    return f"something of type {type(value).__name__[:64]}"

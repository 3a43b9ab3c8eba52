"""What plugins are shown in a tick, under the names of Dynamo's `PipelineContext`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dynamo_local.core.types import Missing
from dynamo_local.planner.pipeline.stages import PluginSpec
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.passes import EngineId, ForwardPass
from dynamo_local.planner.values.pools import Pool, WorkerPools
from dynamo_local.planner.values.proposals import ComponentTarget
from dynamo_local.planner.values.pull import Pull, Wants
from dynamo_local.planner.values.traffic import Traffic

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
    """What was observed. None: not collected, or not known; never 0 in its place."""

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


def context_of(pull: Pull, request_id: str) -> PipelineContext:
    """The context at the beginning of a tick."""
    observations = Observations(_traffic(pull), _fpm(pull), workers_of(pull.pools))
    return PipelineContext(request_id, pull.at_s, observations=observations)


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


def _traffic(pull: Pull) -> Traffic | None:
    """Dynamo's message has no way to leave the first three numbers out; without one of them all of it is unknown. The
    lengths of no requests are 0 there."""
    traffic = pull.traffic
    if not isinstance(traffic, Traffic) or isinstance(traffic.num_req, Missing):
        return None
    lengths_known = not isinstance(traffic.isl, Missing) and not isinstance(traffic.osl, Missing)
    return traffic if lengths_known or traffic.num_req == 0 else None


def _fpm(pull: Pull) -> Fpm | None:
    prefill = None if pull.pools.prefill is None else pull.pools.prefill.component
    sides: dict[bool, dict[EngineId, ForwardPass]] = {True: {}, False: {}}
    for engine, seen in pull.engines.items():
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


def wanted(wants: Wants, plugins: Iterable[PluginSpec], window_s: float) -> Wants:
    """What is to be collected for the policy and for these plugins. A plugin without `needs` is shown everything.

    There is one window of traffic: the policy's, whose numbers it counts in; where it wants none, the longest that a
    plugin wants (`window_s` for one that says none).
    """
    windows, passes = [], wants.passes
    for plugin in plugins:
        paths = (*plugin.needs, *plugin.requires)
        if not plugin.needs or any(path.startswith(TRAFFIC) or path == "observations" for path in paths):
            windows.append(plugin.window_s or window_s)
        if not plugin.needs or any(path.startswith(FPM) or path == "observations" for path in paths):
            passes = True
    if wants.traffic_window_s is not None:
        windows = [wants.traffic_window_s]
    return replace(wants, traffic_window_s=max(windows, default=None), passes=passes)

"""Tests what plugins are shown, and what is collected for them."""

from __future__ import annotations

import pytest

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.stages import PipelineContext, PluginSpec, Stage, Workers, context_of, unset, wanted
from dynamo_local.planner.values import EngineSeen, Needs, Observation, Prediction, Traffic
from tests.fakes.planner.observations import DECODE, PREFILL, pool, reading, worker_pools

BUSY = Traffic(60.0, 60.0, num_req=100.0, isl=3000.0, osl=150.0)


def pulled(traffic: Traffic | Missing | None = None, **more: object) -> Observation:
    """Of two prefill workers and one decode worker."""
    return Observation(reading(60.0, 0, 0.5), worker_pools(2, 1), traffic, **more)


def test_workers_are_counted_and_an_absent_role_is_none() -> None:
    seen = context_of(
        Observation(reading(1.0, None, 0.5), worker_pools(None, pool(DECODE, 2, coming=1))), "r"
    ).observations
    assert seen.workers == Workers(ready_decode=2, expected_decode=3, decode_scaling_in_progress=True)


def test_unknown_traffic_is_not_silence() -> None:
    assert context_of(pulled(Missing("prometheus is away")), "r").observations.traffic is None
    assert context_of(pulled(Traffic(60.0, 60.0)), "r").observations.traffic is None
    assert context_of(pulled(Traffic(60.0, 60.0, num_req=5.0)), "r").observations.traffic is None, "lengths unknown"
    silence = Traffic(60.0, 60.0, num_req=0.0)
    assert context_of(pulled(silence), "r").observations.traffic == silence


def test_engines_are_parted_by_their_role() -> None:
    last = {name: ForwardPass(EngineId(name), 1, 0.02) for name in ("1", "2")}
    engines = {
        EngineId("1"): EngineSeen(PREFILL, last=last["1"]),
        EngineId("2"): EngineSeen(DECODE, last=last["2"]),
        EngineId("3"): EngineSeen(DECODE),
    }
    fpm = context_of(pulled(engines=engines), "r").observations.fpm
    assert fpm is not None
    assert dict(fpm.prefill_engines) == {EngineId("1"): last["1"]}
    assert dict(fpm.decode_engines) == {EngineId("2"): last["2"]}, "of an engine that is not known nothing is invented"


@pytest.mark.parametrize(
    ("paths", "first_unset"),
    [
        ((), None),
        (("observations.traffic", "observations.workers.ready_decode"), None),
        (("observations.traffic.num_req",), None),
        (("observations.traffic.kv_hit_rate",), "observations.traffic.kv_hit_rate"),
        (("predictions.predicted_num_req",), None),
        (("predictions.predicted_isl",), "predictions.predicted_isl"),
        (("observations.workers", "observations.fpm", "proposal"), "observations.fpm"),
        (("constrained",), "constrained"),
        (("observations.trafic",), "observations.trafic"),
        (("observations.traffic.at_s.real",), "observations.traffic.at_s.real"),
    ],
)
def test_required_paths(paths: tuple[str, ...], first_unset: str | None) -> None:
    seen = context_of(pulled(BUSY), "r").observations
    context = PipelineContext("r", 60.0, observations=seen, predictions=Prediction(num_req=0.0))
    assert unset(context, paths) == first_unset


def spec(*needs: str, window_s: float = 0.0) -> PluginSpec:
    """A plugin with these needs."""
    return PluginSpec("a", Stage.PROPOSE, needs=needs, window_s=window_s)


def test_needs_decide_what_is_collected() -> None:
    assert wanted(Needs(), (), 60.0) == Needs()
    assert wanted(Needs(), (spec("observations.workers"),), 60.0) == Needs()
    assert wanted(Needs(), (spec("observations.traffic", window_s=300.0),), 60.0) == Needs(traffic_window_s=300.0)
    assert wanted(Needs(), (spec("observations.fpm"),), 60.0) == Needs(passes=True)
    assert wanted(Needs(), (spec(),), 60.0) == Needs(traffic_window_s=60.0, passes=True), "none named: all"


def test_the_policy_keeps_its_window() -> None:
    assert (
        wanted(Needs(traffic_window_s=180.0), (spec("observations.traffic", window_s=600.0),), 60.0).traffic_window_s
        == 180.0
    )

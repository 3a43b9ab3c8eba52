"""The stages of a tick: contexts and answers of plugins, and how they become one target for each role."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.stages import (
    TARGETS_MAX,
    TEXT_MAX,
    Answer,
    Clamp,
    PipelineContext,
    PluginSpec,
    Predicted,
    Stage,
    Unusable,
    Workers,
    context_of,
    filled,
    merge,
    shown,
    unset,
    usable,
    wanted,
)
from dynamo_local.planner.values import (
    Accept,
    ComponentTarget,
    Decision,
    EngineSeen,
    Needs,
    Observation,
    Override,
    OverrideType,
    Prediction,
    Proposal,
    Reject,
    Traffic,
)
from tests.fakes.planner.observations import DECODE, PREFILL, pool, reading, worker_pools
from tests.fakes.planner.options import load_options, sla_options, slo_options, throughput_load_options
from tests.fakes.planner.plugins import Plugins, observation, override

SET, AT_LEAST, AT_MOST = OverrideType
READY = {"prefill": 2, "decode": 2}


def says(name: str, priority: int, *targets: tuple[str, int, OverrideType], final: bool = False) -> Proposal:
    """`says("a", 5, ("decode", 3, SET))`."""
    return Proposal(name, priority, Override(tuple(ComponentTarget(*target) for target in targets), final=final))


def numbers(*proposals: Proposal, bounds_only: bool = False, so_far: dict[str, int] | None = None) -> dict[str, int]:
    """The targets, by role."""
    before = tuple(ComponentTarget(role, count) for role, count in (so_far or {}).items())
    merged = merge(proposals, READY, before, bounds_only=bounds_only)
    assert all(target.type is SET for target in merged.targets)
    return {target.sub_component_type: target.replicas for target in merged.targets}


def test_the_smallest_number_sets() -> None:
    assert numbers(says("b", 10, ("decode", 8, SET)), says("a", 5, ("decode", 3, SET))) == {"decode": 3}


def test_floors_win_over_ceilings_and_ceilings_over_sets() -> None:
    ceiling = says("ceiling", 9, ("decode", 4, AT_MOST), ("decode", 5, AT_MOST))
    assert numbers(says("a", 1, ("decode", 8, SET)), ceiling) == {"decode": 4}
    assert numbers(says("a", 1, ("decode", 8, SET)), ceiling, says("floor", 99, ("decode", 6, AT_LEAST))) == {
        "decode": 6
    }


def test_a_bound_alone_moves_what_is_there_only_where_it_must() -> None:
    """Else "at most 8" would become "2 and no more", and take back a worker that is on its way."""
    assert numbers(says("a", 1, ("decode", 8, AT_MOST), ("prefill", 2, AT_LEAST))) == {}
    assert numbers(says("a", 1, ("decode", 1, AT_MOST), ("prefill", 3, AT_LEAST))) == {"decode": 1, "prefill": 3}


def test_a_final_one_is_heard_alone() -> None:
    loud = says("loud", 7, ("prefill", 5, SET), final=True)
    louder = says("louder", 6, ("prefill", 6, SET), final=True)
    others = says("a", 1, ("prefill", 9, SET), ("decode", 9, SET), ("prefill", 9, AT_LEAST))
    assert numbers(others, loud, louder) == {"prefill": 6}
    merged = merge((others, loud, louder), READY)
    assert merged.final is louder


def test_a_final_ceiling_is_a_ceiling() -> None:
    """Dynamo 1.6.1 takes a final AT_MOST 10 for a SET 10: two workers became ten."""
    assert numbers(says("a", 1, ("decode", 10, AT_MOST), final=True)) == {}
    assert numbers(says("a", 1, ("decode", 1, AT_MOST), final=True)) == {"decode": 1}


def test_a_reject_ends_it_whatever_the_others_say() -> None:
    reject = Proposal("no", 99, Reject("a freeze"))
    merged = merge((says("a", 0, ("decode", 9, SET), final=True), reject), READY, (ComponentTarget("decode", 5),))
    assert merged.rejected is reject
    assert merged.targets == ()


def test_an_accept_says_nothing() -> None:
    assert numbers(Proposal("a", 0, Accept())) == {}
    assert numbers(Proposal("a", 0, Accept()), so_far={"decode": 5}) == {"decode": 5}


def test_a_later_stage_goes_on_from_the_one_before() -> None:
    assert numbers(says("a", 0, ("prefill", 5, SET)), so_far={"decode": 7, "prefill": 7}) == {"prefill": 5, "decode": 7}
    assert numbers(says("a", 0, ("decode", 6, AT_MOST)), so_far={"decode": 7}) == {"decode": 6}


def test_constrain_takes_bounds_only() -> None:
    """A SET is dropped and named, `final` makes nobody else silent: there is no way around a budget."""
    loud = says("loud", 0, ("decode", 99, SET), ("decode", 3, AT_LEAST), final=True)
    budget = says("budget", 9, ("decode", 4, AT_MOST))
    assert numbers(loud, budget, bounds_only=True, so_far={"decode": 7}) == {"decode": 4}
    assert merge((loud, budget), READY, bounds_only=True).dropped == (("loud", "decode"),)


def test_a_role_that_the_graph_does_not_have_is_dropped() -> None:
    merged = merge((says("a", 0, ("encode", 3, SET), ("decode", 3, SET)),), {"decode": 1})
    assert merged.targets == (ComponentTarget("decode", 3),)
    assert merged.dropped == (("a", "encode"),)


@pytest.mark.parametrize(
    ("bound", "clamp"),
    [
        (("decode", 4, AT_MOST), Clamp("decode", "b", 8, 4)),
        (("decode", 9, AT_LEAST), Clamp("decode", "b", 8, 9)),
        (("decode", 8, AT_MOST), None),
    ],
)
def test_a_bound_that_changed_something_is_named(bound: tuple[str, int, OverrideType], clamp: Clamp | None) -> None:
    merged = merge((says("a", 0, ("decode", 8, SET)), says("b", 1, bound)), READY)
    assert merged.clamps == (() if clamp is None else (clamp,))


# --- predicting
# How predictions of several plugins become one.


def test_the_first_who_says_something_about_a_field_is_believed() -> None:
    first = filled(None, Prediction(num_req=100.0, source="theirs"), "a")
    both = filled(first, Prediction(num_req=7.0, isl=3000.0), "b")
    assert both == Prediction(num_req=100.0, isl=3000.0, source="theirs, b")


def test_zero_is_an_opinion_and_none_is_not() -> None:
    silence = filled(None, Prediction(num_req=0.0), "a")
    assert filled(silence, Prediction(num_req=50.0), "b") == Prediction(num_req=0.0, source="a")


def test_who_says_nothing_is_not_named() -> None:
    said = Prediction(num_req=1.0, source="a")
    assert filled(said, Prediction(source="b"), "b") == said
    assert filled(said, None, "b") == said
    assert filled(None, Prediction(), "b") is None


# --- answers
# Tests what plugins may answer, and what is made of the rest.


def test_none_is_no_opinion() -> None:
    assert usable(Stage.PREDICT, None) == Predicted()
    assert usable(Stage.CONSTRAIN, None) == Accept()


def test_a_prediction_may_come_bare() -> None:
    assert usable(Stage.PREDICT, Prediction(num_req=3)) == Predicted(Prediction(num_req=3))


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        (Stage.PREDICT, Accept()),
        (Stage.PREDICT, {"num_req": 3}),
        (Stage.PREDICT, Predicted({"num_req": 3})),  # type: ignore[arg-type]
        (Stage.PREDICT, Prediction(num_req=float("nan"))),
        (Stage.PREDICT, Prediction(isl=float("inf"))),
        (Stage.PREDICT, Prediction(osl=-1.0)),
        (Stage.PREDICT, Prediction(num_req="3")),  # type: ignore[arg-type]
        (Stage.PREDICT, Prediction(num_req=True)),
        (Stage.PROPOSE, Prediction(num_req=3)),
        (Stage.PROPOSE, [ComponentTarget("decode", 3)]),
        (Stage.PROPOSE, "accept"),
        (Stage.PROPOSE, Override(3)),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override(("decode",))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", -1),))),
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2**31),))),
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2.5),))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2, 9),))),  # type: ignore[arg-type]
        (Stage.PROPOSE, Override((ComponentTarget("decode", 2),) * (TARGETS_MAX + 1))),
    ],
)
def test_wrong_answers_are_unusable(stage: Stage, answer: object) -> None:
    with pytest.raises(Unusable):
        usable(stage, answer)


def test_an_endless_list_of_targets_is_not_read_to_its_end() -> None:
    def endless():
        while True:
            yield ComponentTarget("decode", 1)

    with pytest.raises(Unusable, match="more than"):
        usable(Stage.PROPOSE, Override(endless()))  # type: ignore[arg-type]


def test_texts_are_cut_and_printable() -> None:
    assert usable(Stage.PROPOSE, Reject("a\nb")) == Reject("a\\nb")
    assert len(shown("x" * 10_000_000)) == TEXT_MAX + 1
    said = usable(Stage.PROPOSE, Override((ComponentTarget("decode", 1, OverrideType.AT_MOST),), reason="\x1b[2J"))
    assert said == Override((ComponentTarget("decode", 1, OverrideType.AT_MOST),), reason="\\x1b[2J")


# --- context
# Tests what plugins are shown, and what is collected for them.

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


# --- policies and plugins
# Plugins beside the policies themselves: whatever is proposed, floors and budget are the policy's.

POLICIES = {
    "load": load_options(max_gpu_budget=8),
    "sla": sla_options(max_gpu_budget=8),
    "slo": slo_options(max_gpu_budget=8),
    "throughput-load": throughput_load_options(max_gpu_budget=8),
}


def decided(options: PlannerConfig, answer: Answer) -> Decision:
    """The first decision where a plugin proposes that, in an idle graph of two workers of each role."""

    async def ticks() -> Decision:
        plugins = Plugins()
        plugins.add(Stage.PROPOSE, answer, priority=1)
        clock = AsyncioClock()
        driver = PolicyDriver(policy_of(options), clock.now_s(), pipeline=plugins.pipeline)
        while True:
            await asyncio.sleep(driver.next_at_s - clock.now_s())
            found = await driver.tick(observation(clock.now_s(), traffic=Missing("nobody asks")))
            if found is not None:
                return found

    return run_virtual(ticks())


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_plugin_moves_workers(options: PlannerConfig) -> None:
    assert dict(decided(options, override(prefill=3, decode=4)).targets) == {PREFILL: 3, DECODE: 4}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_plugin_does_not_get_past_floors_and_budget(options: PlannerConfig) -> None:
    assert sum(decided(options, override(prefill=7, decode=11)).targets.values()) <= 8
    assert min(decided(options, override(prefill=0, decode=0)).targets.values()) >= 1


def test_the_budget_is_shared_as_dynamo_shares_it() -> None:
    found = decided(POLICIES["throughput-load"], override(prefill=7, decode=11))
    assert dict(found.targets) == {PREFILL: 3, DECODE: 5}

"""A tick through plugins: who is asked, with what, and what it comes to. On virtual time, without processes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.notes import Over, Trouble
from dynamo_local.planner.plugins.pipeline import Action
from dynamo_local.planner.plugins.registration import FAILURES_MAX, OPEN_S, CircuitState
from dynamo_local.planner.plugins.registry import PluginFailed
from dynamo_local.planner.stages import Answer, HoldPolicy, Nothing, PipelineContext, Predicted, Stage
from dynamo_local.planner.values import Accept, OverrideType, Prediction, Proposal, Reject
from tests.fakes.planner.plugins import Plugins, override

OWN = Proposal("builtin_load_propose", 10, override(decode=3))


def on_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:

    @functools.wraps(test)
    def run() -> None:
        run_virtual(test())

    return run


async def never(_: PipelineContext) -> Answer:
    """A plugin that hangs."""
    await asyncio.sleep(1e6)
    return Accept()


def fails(_: PipelineContext) -> Answer:
    """A plugin that is away."""
    raise PluginFailed("UNAVAILABLE: nobody listens")


@on_virtual_time
async def test_without_plugins_the_policys_own_proposals_are_merged() -> None:
    plugins = Plugins()
    assert await plugins.tick(OWN) == {"decode": 3}
    assert await plugins.tick() == {}
    assert plugins.pipeline.last is not None
    assert plugins.pipeline.last.action is Action.SKIP_NO_TARGETS


@on_virtual_time
async def test_each_stage_goes_on_from_the_one_before() -> None:
    plugins = Plugins()
    plugins.add(Stage.PROPOSE, override(prefill=7, decode=11), priority=1)
    reconcile = plugins.add(Stage.RECONCILE, override(prefill=5, decode=6))
    constrain = plugins.add(Stage.CONSTRAIN, override(prefill=4, decode=9, kind=OverrideType.AT_MOST))
    assert await plugins.tick(OWN) == {"prefill": 4, "decode": 6}
    context, proposals = reconcile.seen[0]
    assert context.proposal is not None
    assert {target.sub_component_type: target.replicas for target in context.proposal} == {"prefill": 7, "decode": 11}
    assert [proposal.plugin_id for proposal in proposals] == ["builtin_load_propose", "propose"]
    assert context.decision_id
    assert constrain.seen[0][0].decision_id == context.decision_id
    assert plugins.total("constrain_capped_total", "prefill", "constrain") == 1


@on_virtual_time
async def test_who_proposes_is_asked_at_once_and_who_predicts_one_after_the_other() -> None:

    async def slowly(_: PipelineContext) -> Answer:
        await asyncio.sleep(2.0)
        return Accept()

    async def slow_forecast(_: PipelineContext) -> Answer:
        await asyncio.sleep(2.0)
        return Predicted()

    loop = asyncio.get_running_loop()
    proposing, predicting = Plugins(), Plugins()
    for name in "abc":
        proposing.add(Stage.PROPOSE, slowly, name=name)
        predicting.add(Stage.PREDICT, slow_forecast, name=name)
    began = loop.time()
    await proposing.tick()
    assert loop.time() - began == pytest.approx(2.0)
    began = loop.time()
    await predicting.tick()
    assert loop.time() - began == pytest.approx(6.0)


@on_virtual_time
async def test_a_plugin_can_predict_before_the_policy_does_and_after_it() -> None:
    """In Dynamo 1.6.1 nobody can: the built-in has priority 0, and the wire has no smaller number."""
    plugins = Plugins()
    plugins.add(Stage.PREDICT, Predicted(Prediction(num_req=42.0)), name="before", priority=0)
    after = plugins.add(Stage.PREDICT, Predicted(Prediction(num_req=1.0, kv_hit_rate=0.5)), name="after", priority=200)
    await plugins.tick(predicted=Prediction(num_req=7.0, isl=3000.0, source="arima"))
    assert plugins.pipeline.last is not None
    said = Prediction(num_req=42.0, isl=3000.0, kv_hit_rate=0.5, source="before, arima, after")
    assert plugins.pipeline.last.prediction == said
    assert after.seen[0][0].predictions == Prediction(num_req=42.0, isl=3000.0, source="before, arima")


@on_virtual_time
async def test_a_final_prediction_ends_the_chain() -> None:
    plugins = Plugins()
    plugins.add(Stage.PREDICT, Predicted(Prediction(num_req=42.0), final=True), priority=1)
    plugins.add(Stage.PREDICT, fails, name="later", priority=2)
    await plugins.tick(predicted=Prediction(num_req=7.0, isl=3000.0))
    assert plugins.pipeline.last is not None
    assert plugins.pipeline.last.prediction == Prediction(num_req=42.0, source="predict")
    assert plugins.row("later").evaluations_total == 0


@on_virtual_time
async def test_a_reject_ends_the_tick() -> None:
    plugins = Plugins()
    plugins.add(Stage.PROPOSE, Reject("a freeze"), name="no", priority=99)
    later = plugins.add(Stage.CONSTRAIN, Accept())
    assert await plugins.tick(OWN) == {}
    assert plugins.pipeline.last is not None
    assert (plugins.pipeline.last.action, plugins.pipeline.last.why) == (
        Action.SKIP_SHORT_CIRCUIT,
        "no rejects: a freeze",
    )
    assert later.seen == []
    assert plugins.total("reject_short_circuited_total", "no") == 1


@on_virtual_time
async def test_who_fails_or_hangs_costs_nobody_else_his_word() -> None:
    plugins = Plugins()
    plugins.add(Stage.PROPOSE, fails, name="away")
    plugins.add(Stage.PROPOSE, never, name="hung")
    plugins.add(Stage.PROPOSE, override(prefill=4), name="well")
    began = asyncio.get_running_loop().time()
    assert await plugins.tick(OWN) == {"prefill": 4, "decode": 3}
    assert asyncio.get_running_loop().time() - began == pytest.approx(5.0)
    assert plugins.row("hung").trouble == "no answer within 5 s"
    assert plugins.row("away").trouble == "UNAVAILABLE: nobody listens"
    assert plugins.total("plugin_evaluations_total", "hung", "propose", "error") == 1


@on_virtual_time
async def test_a_plugin_that_raises_anything_is_a_plugin_that_failed() -> None:
    plugins = Plugins()
    plugins.add(Stage.PROPOSE, lambda _: 1 / 0)
    assert await plugins.tick(OWN) == {"decode": 3}
    assert plugins.row("propose").trouble == "ZeroDivisionError: division by zero"


@on_virtual_time
async def test_an_answer_without_a_result_is_an_accept_and_an_error() -> None:
    plugins = Plugins()
    plugins.add(Stage.PROPOSE, Nothing())
    for _ in range(FAILURES_MAX + 1):
        assert await plugins.tick(OWN) == {"decode": 3}
    assert plugins.total("plugin_evaluations_total", "propose", "propose", "error") == FAILURES_MAX + 1
    assert plugins.row("propose").circuit_state is CircuitState.CLOSED


@on_virtual_time
async def test_after_five_errors_it_is_left_alone_and_then_probed() -> None:
    plugins = Plugins()
    plugin = plugins.add(Stage.PROPOSE, fails, name="away")
    for _ in range(FAILURES_MAX):
        await plugins.tick()
    assert plugins.row("away").circuit_state is CircuitState.OPEN
    await plugins.tick()
    assert len(plugin.seen) == FAILURES_MAX
    assert [about for _, about in plugins.told] == [Trouble("planner plugin away")]
    await asyncio.sleep(OPEN_S)
    plugin.says = lambda _: override(decode=5)
    assert await plugins.tick() == {"decode": 5}
    assert plugins.row("away").circuit_state is CircuitState.CLOSED
    assert plugins.row("away").trouble is None
    assert [about for _, about in plugins.told] == [Trouble("planner plugin away"), Over("planner plugin away")]


@on_virtual_time
async def test_what_is_held_goes_when_the_circuit_opens() -> None:
    plugins = Plugins()
    plugin = plugins.add(
        Stage.PROPOSE, override(decode=7), name="minute", interval_s=60.0, hold_policy=HoldPolicy.HOLD_LAST
    )
    await asyncio.sleep(60.0)
    assert await plugins.tick() == {"decode": 7}
    await asyncio.sleep(5.0)
    assert await plugins.tick() == {"decode": 7}
    assert (plugins.total("plugin_held_over_total", "minute", "propose"), len(plugin.seen)) == (1, 1)
    assert plugins.row("minute").cache_age_seconds == pytest.approx(5.0)
    plugin.says = fails
    await asyncio.sleep(60.0)
    for _ in range(FAILURES_MAX):
        assert await plugins.tick() == {}, "in a tick in which it fails it says nothing"
    assert plugins.row("minute").cache_age_seconds is None


@on_virtual_time
async def test_a_plugin_without_what_it_requires_is_skipped_and_its_turn_stays() -> None:
    plugins = Plugins()
    plugin = plugins.add(
        Stage.PROPOSE, override(decode=7), name="p", requires=("predictions.predicted_num_req",), interval_s=60.0
    )
    await asyncio.sleep(60.0)
    await plugins.tick()
    assert plugin.seen == []
    assert plugins.total("tick_requires_unsatisfied_total", "p", "predictions.predicted_num_req") == 1
    await asyncio.sleep(5.0)
    assert await plugins.tick(predicted=Prediction(num_req=1.0)) == {"decode": 7}
    assert plugins.row("p").tick_lag_seconds == pytest.approx(5.0)


@on_virtual_time
async def test_a_tick_that_takes_too_long_is_given_up() -> None:
    plugins = Plugins(tick_max_s=12.0)
    for number in range(4):
        plugins.add(Stage.PREDICT, never, name=f"p{number}")
    began = asyncio.get_running_loop().time()
    assert await plugins.tick(OWN) == {}
    assert asyncio.get_running_loop().time() - began == pytest.approx(12.0)
    assert plugins.pipeline.last is not None
    assert plugins.pipeline.last.action is Action.SKIP_TICK_TIMEOUT
    assert plugins.total("tick_timeout_total") == 1
    assert plugins.row("p2").trouble == "it had not answered when the tick was given up"
    for number in range(4):
        plugins.registry.remove(f"p{number}", "test")
    assert await plugins.tick(OWN) == {"decode": 3}


@on_virtual_time
async def test_the_time_of_both_halves_counts_together() -> None:
    plugins = Plugins(tick_max_s=8.0)
    plugins.add(Stage.PREDICT, never)
    plugins.add(Stage.PROPOSE, never)
    began = asyncio.get_running_loop().time()
    assert await plugins.tick(OWN) == {}
    assert asyncio.get_running_loop().time() - began == pytest.approx(8.0)


@on_virtual_time
async def test_heartbeats_that_end_remove_a_plugin_and_none_ever_do_not() -> None:
    """Dynamo 1.6.1 never removes one; its reference example never sends one."""
    plugins = Plugins()
    silent = plugins.add(Stage.PROPOSE, Accept(), name="silent")
    beating = plugins.add(Stage.PROPOSE, Accept(), name="beating")
    plugins.registry.heartbeat("beating")
    await asyncio.sleep(29.0)
    await plugins.tick()
    assert len(plugins.registry.rows()) == 2
    await asyncio.sleep(2.0)
    await plugins.tick()
    assert [row.plugin_id for row in plugins.registry.rows()] == ["silent"]
    await plugins.registry.close()
    assert (beating.left, silent.left) == ("heartbeat_missed", "planner_stopped")

"""Plugins beside the policies themselves: whatever is proposed, floors and budget are the policy's."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.stages import Answer, Stage
from dynamo_local.planner.values import Decision, Reject
from tests.fakes.planner.observations import DECODE, PREFILL
from tests.fakes.planner.options import load_options, sla_options, slo_options, throughput_load_options
from tests.fakes.planner.plugins import Plugins, observation, override

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


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_a_reject_changes_nothing(options: PlannerConfig) -> None:
    assert dict(decided(options, Reject("a freeze")).targets) == {PREFILL: 2, DECODE: 2}

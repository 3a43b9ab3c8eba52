"""Models that begin with what a worker measured of itself: before a profile, and before what live passes taught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.planner.pass_model import Kind, PassModel
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.planner.policies.throughput_load.state import ScalingState
from tests.fakes.planner.engines_seen import LIMITS, MODELS, PREFILL_PASSES, load_loop, observation, untrained
from tests.fakes.planner.observations import DECODE, PREFILL

SLOW = tuple(replace(one, wall_time_s=one.wall_time_s * 3) for one in PREFILL_PASSES)


def seen(policy: ThroughputLoadPolicy, state: ScalingState, at_s: float, benchmark: Any) -> ScalingState:
    """The state after a pull in which the prefill workers told that of themselves."""
    shown = observation(at_s)
    can = {**shown.capabilities, PREFILL: replace(LIMITS, benchmark=benchmark)}
    return policy.predicted(state, replace(shown, capabilities=can), None)[0]


def took(state: ScalingState) -> float:
    return state.models[Kind.PREFILL].pass_s(prefill_tokens=PREFILL_PASSES[0].scheduled.sum_prefill_tokens)


@pytest.mark.parametrize("known", [untrained(), MODELS], ids=["nothing", "a profile"])
def test_it_goes_before_a_profile_and_is_named(known: Mapping[Kind, PassModel]) -> None:
    policy = ThroughputLoadPolicy(load_loop(), known)
    state = seen(policy, policy.first(0.0), 5.0, SLOW)
    assert took(state) == pytest.approx(SLOW[0].wall_time_s)
    assert policy.status(state).models[PREFILL] == "worker"
    assert state.models[Kind.DECODE] == known[Kind.DECODE]


def test_it_is_taken_once_and_again_after_another_configuration() -> None:
    policy = ThroughputLoadPolicy(load_loop(), untrained())
    state = seen(policy, policy.first(0.0), 5.0, PREFILL_PASSES)
    first = state.models[Kind.PREFILL]
    assert seen(policy, state, 10.0, PREFILL_PASSES).models[Kind.PREFILL] is first
    assert seen(policy, policy.taking_over(state), 10.0, PREFILL_PASSES).models[Kind.PREFILL] is first
    again = seen(policy, state, 10.0, SLOW)
    assert took(again) == pytest.approx(3 * took(state))


def test_one_that_makes_no_model_and_none_leave_the_next_source() -> None:
    policy = ThroughputLoadPolicy(load_loop(), MODELS)
    begun = policy.first(0.0)
    for nothing in (None, Missing("it has none"), PREFILL_PASSES[:2]):
        state = seen(policy, begun, 5.0, nothing)
        assert took(state) == took(begun)
    told = policy.status(seen(policy, begun, 5.0, Missing("it has none"))).models
    assert told[PREFILL].endswith("(it has none)")
    told = policy.status(seen(policy, begun, 5.0, PREFILL_PASSES[:2])).models
    assert told[PREFILL].endswith("(its own benchmark makes no model)")
    bare = ThroughputLoadPolicy(load_loop(), untrained())
    assert bare.status(seen(bare, bare.first(0.0), 5.0, None)).models == {PREFILL: "none yet", DECODE: "none yet"}

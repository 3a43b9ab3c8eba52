"""Tests what holds of merged proposals and of a plugin's turn, whatever plugins say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.planner.plugins import registration as circuits
from dynamo_local.planner.plugins import registration as scheduling
from dynamo_local.planner.plugins.registration import OPEN_S, CircuitState, Turn
from dynamo_local.planner.stages import HoldPolicy, PluginSpec, Stage, merge
from dynamo_local.planner.values import Accept, ComponentTarget, Override, OverrideType, Proposal, Reject
from tests.tools.examples import examples

QUICK = settings(max_examples=examples(200))
ROLES = ("prefill", "decode")

targets = st.builds(
    ComponentTarget, st.sampled_from((*ROLES, "encode")), st.integers(0, 20), st.sampled_from(list(OverrideType))
)
overrides = st.builds(Override, st.lists(targets, max_size=4).map(tuple), final=st.booleans())
results = st.one_of(st.just(Accept()), overrides, overrides)
said = st.lists(
    st.builds(Proposal, st.sampled_from("abcdef"), st.integers(0, 5), results),
    max_size=6,
    unique_by=lambda p: p.plugin_id,
)
ready = st.fixed_dictionaries({role: st.integers(0, 10) for role in ROLES})


def by_role(found: tuple[ComponentTarget, ...]) -> dict[str, int]:
    return {target.sub_component_type: target.replicas for target in found}


@QUICK
@given(said, ready)
def test_only_roles_of_the_graph_are_moved_and_only_to_numbers_somebody_named(
    proposals: list[Proposal], baseline: dict[str, int]
) -> None:
    named = {
        (target.sub_component_type, target.replicas)
        for proposal in proposals
        if isinstance(proposal.result, Override)
        for target in proposal.result.targets
    }
    for role, number in by_role(merge(proposals, baseline).targets).items():
        assert role in ROLES
        assert (role, number) in named or number == baseline[role]


@QUICK
@given(said, ready, st.randoms())
def test_the_order_of_answers_does_not_matter(proposals: list[Proposal], baseline: dict[str, int], random) -> None:
    shuffled = random.sample(proposals, len(proposals))
    assert merge(shuffled, baseline) == merge(proposals, baseline)


@QUICK
@given(said, said, ready, st.integers(0, 8))
def test_nobody_gets_past_a_ceiling_but_by_a_floor(
    proposed: list[Proposal], constrained: list[Proposal], baseline: dict[str, int], ceiling: int
) -> None:
    budget = Proposal("zz", 9, Override(tuple(ComponentTarget(role, ceiling, OverrideType.AT_MOST) for role in ROLES)))
    first = merge(proposed, baseline)
    last = merge((*constrained, budget), baseline, first.targets, bounds_only=True)
    floors = dict.fromkeys(ROLES, 0)
    for proposal in constrained:
        for target in proposal.result.targets if isinstance(proposal.result, Override) else ():
            if target.type is OverrideType.AT_LEAST and target.sub_component_type in floors:
                floors[target.sub_component_type] = max(floors[target.sub_component_type], target.replicas)
    for role, number in by_role(last.targets).items():
        assert number <= max(ceiling, floors[role])


@QUICK
@given(said, ready)
def test_a_reject_leaves_nothing(proposals: list[Proposal], baseline: dict[str, int]) -> None:
    merged = merge((*proposals, Proposal("no", 99, Reject("no"))), baseline)
    assert merged.targets == ()
    assert merged.rejected is not None


@QUICK
@given(ready, said)
def test_without_an_opinion_a_stage_changes_nothing(baseline: dict[str, int], proposals: list[Proposal]) -> None:
    before = merge(proposals, baseline).targets
    assert merge((Proposal("a", 0, Accept()),), baseline, before).targets == before


@QUICK
@given(st.floats(0, 600), st.lists(st.floats(1, 60), max_size=60), st.booleans())
def test_between_two_calls_lies_an_interval(interval_s: float, steps: list[float], holds: bool) -> None:
    hold = HoldPolicy.HOLD_LAST if holds else HoldPolicy.ACCEPT_WHEN_IDLE
    spec = PluginSpec("a", Stage.PROPOSE, interval_s=interval_s, hold_policy=hold)
    turn, now_s, last_s = Turn(0.0), 0.0, 0.0
    for step in steps:
        now_s += step
        if scheduling.is_due(turn, spec, now_s):
            assert now_s - last_s >= interval_s * (1 - scheduling.EARLY) - 1e-6
            turn, last_s = scheduling.answered(turn, spec, Override(()), now_s), now_s
        assert (turn.held is None) or holds


@QUICK
@given(st.lists(st.tuples(st.floats(0.1, 20), st.booleans()), max_size=200))
def test_an_open_circuit_is_left_alone(ticks: list[tuple[float, bool]]) -> None:
    """At most five calls fail in a row without a pause of thirty seconds, and one that answers is asked as before."""
    circuit, now_s, in_a_row, last_failure_s = circuits.CLOSED, 0.0, 0, 0.0
    for step, works in ticks:
        now_s += step
        if not circuits.admits(circuit, now_s):
            assert circuit.state is CircuitState.OPEN
            continue
        if in_a_row >= circuits.FAILURES_MAX:
            assert now_s - last_failure_s >= OPEN_S
        circuit = circuits.was_called(circuit)
        if works:
            circuit, in_a_row = circuits.CLOSED, 0
        else:
            circuit, in_a_row, last_failure_s = circuits.failed(circuit, now_s), in_a_row + 1, now_s

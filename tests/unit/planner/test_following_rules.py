"""Tests what an environment does about a decision: the keys and the fleet in, the next steps out."""

from __future__ import annotations

from dataclasses import replace

from dynamo_local.core.virtual import KeysState, PlannerDecision
from dynamo_local.planner.following import Phase, next_step
from dynamo_local.planner.values import Pool, WorkerPools

P, D = Pool("Prefill", 1, ready=1), Pool("Decode", 1, ready=1)
BOTH = WorkerPools(P, D)
AGG = WorkerPools(None, D)


def told(prefill: int, decode: int, number: int = 0, scaled: int = -1) -> KeysState:
    return KeysState(PlannerDecision(prefill, decode, number), scaled)


def test_without_a_decision_it_waits() -> None:
    step = next_step(KeysState(), BOTH)
    assert (step.phase, step.steps, step.acknowledge) == (Phase.WAITING, (), False)


def test_each_component_goes_to_its_number_and_downs_come_before_ups() -> None:
    step = next_step(told(1, 3), BOTH)
    assert (step.phase, step.steps, step.acknowledge) == (Phase.UNDER_WAY, (("Decode", 3),), False)
    assert step.reason == "Decode: 1 of 3 ready"
    fleet = WorkerPools(replace(P, ready=1), replace(D, ready=3))
    assert next_step(told(2, 1), fleet).steps == (("Decode", 1), ("Prefill", 2))
    assert next_step(told(0, 4), WorkerPools(P, D)).steps == (("Prefill", 0), ("Decode", 4))


def test_capacity_on_its_way_is_not_asked_for_again() -> None:
    step = next_step(told(1, 3), WorkerPools(P, replace(D, ready=1, coming=2)))
    assert (step.phase, step.steps, step.acknowledge) == (Phase.UNDER_WAY, (), False)
    assert step.reason == "Decode: 1 of 3 ready, 2 on their way"


def test_one_that_only_finishes_its_streams_holds_nothing_up() -> None:
    draining = replace(D, ready=1, leaving=2, gpus_held=3, gpus_leaving=2)
    assert next_step(told(1, 1), WorkerPools(P, draining)).acknowledge
    assert not next_step(told(1, 1), WorkerPools(P, replace(draining, routed=1))).acknowledge


def test_a_role_that_is_not_set_is_left_as_it_is() -> None:
    step = next_step(told(-1, 1), WorkerPools(replace(P, ready=5), D))
    assert (step.steps, step.acknowledge) == ((), True)


def test_an_aggregated_graph_takes_the_decode_number_and_no_prefill_worker() -> None:
    assert next_step(told(-1, 3), AGG).steps == (("Decode", 3),)
    assert next_step(told(0, 3), AGG).steps == (("Decode", 3),)
    step = next_step(told(1, 3), AGG)
    assert (step.phase, step.steps, step.acknowledge) == (Phase.REFUSED, (), False)
    assert step.reason == "num_prefill_workers is 1, but the graph has no prefill component"


def test_what_is_acknowledged_is_not_done_again() -> None:
    """Not even where a person has changed the fleet since."""
    step = next_step(told(1, 3, 7, scaled=7), BOTH)
    assert (step.phase, step.steps, step.acknowledge, step.reason) == (Phase.DONE, (), False, None)


def test_a_planner_that_began_to_count_anew_is_not_passed_over_in_silence() -> None:
    step = next_step(told(1, 3, 0, scaled=7), BOTH)
    assert (step.phase, step.steps) == (Phase.DONE, ())
    assert step.reason is not None
    assert "delete scaled_decision_id" in step.reason


def test_a_newer_decision_replaces_the_one_under_way() -> None:
    growing = WorkerPools(P, replace(D, ready=1, coming=2))
    first = next_step(told(1, 3, 0), growing)
    step = next_step(told(1, 1, 1), growing, first)
    assert (step.decision.decision_id, step.steps) == (1, (("Decode", 1),))


def test_a_value_that_makes_no_sense_changes_nothing() -> None:
    broken = replace(told(1, -1, 1), faults=("num_decode_workers is 'x': …",))
    for last in (None, next_step(told(1, 3, 0), BOTH)):
        step = next_step(broken, BOTH, last)
        assert (step.phase, step.steps, step.acknowledge) == (Phase.UNREADABLE, (), False)
        assert step.reason == "num_decode_workers is 'x': …"


def test_half_a_decision_waits_for_its_id() -> None:
    """Seen so at first: nobody knows which numbers were whose."""
    half = replace(told(1, 5, 3), half_written=True)
    first = next_step(half, BOTH)
    assert (first.phase, first.steps, first.acknowledge) == (Phase.WAITING, (), False)
    assert next_step(half, BOTH, first).steps == (), "and what was only waited for is not known, either"
    assert next_step(told(1, 5, 4), BOTH, first).steps == (("Decode", 5),)


def test_what_is_under_way_goes_on_while_the_next_is_half_written() -> None:
    first = next_step(told(1, 3, 0), BOTH)
    half = replace(told(1, 5, 0), half_written=True)
    step = next_step(half, BOTH, first)
    assert (step.decision, step.steps) == (PlannerDecision(1, 3, 0), (("Decode", 3),))
    assert next_step(half, WorkerPools(P, replace(D, ready=3)), step).acknowledge


def test_half_of_the_next_does_not_change_what_is_said_of_the_last() -> None:
    done = next_step(told(1, 1, 0), BOTH)
    half = replace(told(1, 5, 0, scaled=0), half_written=True)
    assert next_step(half, BOTH, done).decision == PlannerDecision(1, 1, 0)

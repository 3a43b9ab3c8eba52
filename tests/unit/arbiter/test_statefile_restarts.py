"""Tests what a successor needs of a restart or an apply that is under way."""

from __future__ import annotations

from dynamo_local.arbiter.statefile import entry_of_restart, restart_of_entry
from dynamo_local.core.fleet.fleet import RestartPlan
from dynamo_local.state.schema import RestartEntry

A, B, C = "dynamo_A", "dynamo_A_1", "dynamo_B"


def test_a_plan_comes_back_as_it_was_written() -> None:
    plan = RestartPlan(
        "apply:1",
        ((A, 3), (C, 1)),
        begun=frozenset({A}),
        bring_back=frozenset({C}),
        in_place=frozenset({C}),
        substitutes={A: B},
        awaited=(B,),
        removed=(C,),
        late=frozenset({C}),
    )
    written = entry_of_restart(plan).model_dump_json()
    assert restart_of_entry(RestartEntry.model_validate_json(written)) == plan


def test_a_forced_restart_of_an_older_arbiter_goes_on_in_place() -> None:
    entry = RestartEntry.model_validate({"stimulus_id": "restart:1", "todo": {A: 1, C: 1}, "force": True})
    assert restart_of_entry(entry).in_place == {A, C}

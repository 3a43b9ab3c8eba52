"""What a successor reads of an apply that was under way when its arbiter was killed."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.arbiter.adoption import retired
from dynamo_local.arbiter.statefile import restart_of_entry
from dynamo_local.core.types import Resources, Role, ServiceSpec
from dynamo_local.state.store import load

GOLDEN = Path(__file__).parents[2] / "golden" / "statefile"


def test_what_is_left_to_do_is_read_back() -> None:
    (entry,) = load(GOLDEN / "v1-apply.json").restarts or ()
    plan = restart_of_entry(entry)
    assert plan.todo == (("dynamo_VllmWorker", 1), ("dynamo_Processor", 1))
    assert plan.substitutes == {"dynamo_VllmWorker": "dynamo_VllmWorker_1"}


def test_a_component_that_was_removed_is_known_until_its_last_worker_has_left() -> None:
    gone = ServiceSpec("Exporter", Role.OTHER, 0, Resources(0), start_deadline_s=120.0, drain_deadline_s=30.0)
    assert retired(load(GOLDEN / "v1-apply.json")) == (gone,)
    assert retired(load(GOLDEN / "v1-disagg.json")) == ()

"""Decisions in words, and as lines of the decision log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.errors import BadInput
from dynamo_local.planner.connectors import Committed, Refused
from dynamo_local.planner.policies.explain import explain
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.records.decision_log import (
    DecisionRecord,
    Outcome,
    StepOutcome,
    from_line,
    inputs_of,
    outcome_of,
    to_line,
)
from dynamo_local.planner.values import Decision, IntervalObservation, Reason, Rule
from tests.fakes.planner.load_cases import BOUNDARIES, CASES, WORKED
from tests.fakes.planner.observations import DECODE, PREFILL, observe
from tests.fakes.planner.options import load_options
from tests.fakes.planner.planner_worlds import observations, options
from tests.tools.examples import examples


def words(name: str) -> str:
    """What is said about that worked case."""
    return "\n".join(explain(next(case for case in WORKED if case.name == name).decide()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "1",
            "PrefillWorker holds (floor): the queue 0 < 0.2, but 1 worker is the floor; with 2 workers instead of 1 ",
        ),
        (
            "3-3",
            "(grace): KV load 0.3 < 0.5, but the last one was added 60 s before the interval (grace 90 s); at 90 s ",
        ),
        ("5", "PrefillWorker +1 (scale_up): the queue 4 > 0.5 with 2 of 8 GPUs held or promised; at the queue's last "),
        ("6", "PrefillWorker holds (queue_emptying): the queue 5.67 > 0.5, but it heads for -19; "),
        ("7", "8 of 8 GPUs held or promised and one more takes 1; with max-gpu-budget 10 instead of 8 it would have"),
        ("8", "; it starts when the GPU of this decision's down is really free; at KV load 0.9 it would have held"),
        ("11", "PrefillWorker holds (missing): no sample in this interval"),
        (
            "13",
            "VllmWorker holds (within): KV load 0.9 is within 0.5 and 0.9; at KV load above 0.9 it would have gone +1",
        ),
        ("14", "VllmWorker +1 (take_back): KV load 0.95 > 0.9, and one that still drains is taken back"),
    ],
)
def test_it_says_the_rule_the_numbers_and_what_it_would_have_taken(name: str, said: str) -> None:
    assert said in words(name)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_decision_has_a_line_for_each_component(case) -> None:  # type: ignore[no-untyped-def]
    decision = case.decide()
    lines = explain(decision)
    assert [line.split()[0] for line in lines] == [reason.component for reason in decision.reasons]
    assert all(f"({reason.rule})" in line for reason, line in zip(decision.reasons, lines, strict=True))


def test_a_value_a_hair_from_its_threshold_is_not_shown_as_equal_to_it() -> None:
    """`0.9 > 0.9` would be no reason."""
    decision = LoadPolicy(load_options()).on_tick(observe(None, 1, kv=[0.9 + 1e-9]))
    assert "KV load 0.900000001 > 0.9" in explain(decision)[0]


def test_an_up_whose_gpu_came_free_and_notes_are_said() -> None:
    numbers = {"gpus_counted": 7.0, "gpus_per_worker": 1.0, "max_gpu_budget": 8.0}
    decision = Decision(1.0, {DECODE: 3}, (Reason(DECODE, 1, Rule.GPU_FREED, numbers),), 1.0, notes=("a note",))
    assert explain(decision) == (
        "VllmWorker +1 (gpu_freed): the GPU that it waited for is free, 7 of 8 GPUs held or promised",
        "a note",
    )


def test_numbers_of_another_version_are_said_to_be_so() -> None:
    """A decision log outlives the version that wrote it: `dynamo planner explain` reads it all the same."""
    decision = Decision(0.0, {DECODE: 1}, (Reason(DECODE, 1, Rule.SCALE_UP, {"kv": 0.95}),), 30.0)
    [line] = explain(decision)
    assert line.startswith(f"{DECODE} +1 (scale_up): written by another version")


def test_a_promise_taken_back_says_that_nothing_had_started() -> None:
    case = next(case for case in BOUNDARIES if case.name == "a promise is taken back without a deed")
    assert "it had not started: it waited for a GPU" in "\n".join(explain(case.decide()))


def record(seen: IntervalObservation, given_options: PlannerConfig) -> DecisionRecord:
    decision = LoadPolicy(given_options).on_tick(seen)
    outcomes = {
        PREFILL: outcome_of(Refused("no GPU", "not_enough_gpus", retryable=True)),
        DECODE: outcome_of(Committed(("dynamo_VllmWorker_1",))),
    }
    return DecisionRecord(1.7e9, "planner:7", inputs_of(seen, given_options), decision, outcomes)


@settings(max_examples=examples(60))
@given(observations(adjusting=True), options())
def test_a_record_is_one_line_and_comes_back_the_same(seen: IntervalObservation, given_options: PlannerConfig) -> None:
    before = record(seen, given_options)
    line = to_line(before)
    assert "\n" not in line
    assert from_line(line) == before


def test_a_record_sums_up_what_was_observed() -> None:
    seen = observe(1, 2, queue=[1, 2], kv=[0.5, 0.7])
    inputs = inputs_of(seen, load_options())
    assert (inputs.readings, inputs.prefill_queue_size, inputs.average_kv_load, inputs.num_queued_request) == (
        2,
        1.5,
        0.6,
        0,
    )
    nothing = inputs_of(replace(seen, readings=()), load_options())
    assert (nothing.prefill_queue_size, nothing.average_kv_load, nothing.num_queued_request) == (None, None, None)


def test_outcomes_say_what_became_of_a_step() -> None:
    assert outcome_of(Committed(("a",))) == StepOutcome(Outcome.COMMITTED, ("a",))
    refused = outcome_of(Refused("no GPU", "not_enough_gpus", retryable=True))
    assert refused == StepOutcome(Outcome.REFUSED, reason="no GPU", code="not_enough_gpus", retryable=True)


@pytest.mark.parametrize("line", ["", "{", '{"wall_s": 1}', "[1]"])
def test_a_line_that_is_no_record_is_bad_input(line: str) -> None:
    with pytest.raises(BadInput, match="not a line of the decision log"):
        from_line(line)


def test_a_worker_of_this_interval_was_not_added_before_it() -> None:
    numbers = {"since_added_s": -1.0, "grace_s": 90.0, "workers": 2.0, "gpus_counted": 2.0, "max_gpu_budget": 8.0}
    reason = Reason("VllmWorker", 0, Rule.GRACE, numbers)
    (words,) = explain(Decision(0.0, {}, (reason,), 30.0))
    assert "the last one was added 1 s into the interval (grace 90 s)" in words

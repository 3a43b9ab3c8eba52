"""The four keys of the virtual connector: where they are, what they say, and what is no decision."""

from __future__ import annotations

import pytest

from dynamo_local.core.virtual import (
    DECISION_ID,
    NUM_DECODE_WORKERS,
    NUM_PREFILL_WORKERS,
    SCALED_DECISION_ID,
    KeysState,
    Layout,
    PlannerDecision,
    Stored,
    encode,
    read,
    root,
)


def stored(**values: bytes | str) -> dict[str, Stored]:
    """Keys that were written one after the other, in this order."""
    items = enumerate(values.items(), start=2)
    return {name: Stored(value.encode() if isinstance(value, str) else value, n) for n, (name, value) in items}


def test_both_layouts_have_their_own_root() -> None:
    assert root("dynamo", Layout.V1) == "v1/dynamo/planner/"
    assert root("dynamo", Layout.V0) == "/dynamo/planner/"


def test_nothing_written_is_no_decision_and_nothing_to_do() -> None:
    assert read({}) == KeysState(PlannerDecision(-1, -1, -1), -1)
    assert read({}).acknowledged


def test_a_decision_is_unacknowledged_until_its_id_or_a_later_one_is() -> None:
    keys = stored(num_prefill_workers="1", num_decode_workers="3", decision_id="0")
    told = read(keys)
    assert told == KeysState(PlannerDecision(1, 3, 0))
    assert not told.acknowledged
    for scaled, done in (("-1", False), ("0", True), ("7", True)):
        assert read({**keys, SCALED_DECISION_ID: Stored(scaled.encode(), 9)}).acknowledged is done


def test_a_number_that_was_never_decided_is_not_set() -> None:
    """Dynamo's planner of an aggregated graph writes the decode number alone."""
    assert read(stored(num_decode_workers="2", decision_id="4")).decision == PlannerDecision(-1, 2, 4)
    assert read(stored(num_prefill_workers="-1", decision_id="4")).decision == PlannerDecision(-1, -1, 4)


def test_numbers_younger_than_the_id_are_half_a_decision() -> None:
    whole = stored(num_prefill_workers="1", num_decode_workers="3", decision_id="0")
    assert not read(whole).half_written
    assert read({**whole, NUM_DECODE_WORKERS: Stored(b"5", 9)}).half_written
    assert not read({**whole, NUM_DECODE_WORKERS: Stored(b"5", 9), DECISION_ID: Stored(b"1", 9)}).half_written, "a txn"
    assert not read(stored(num_decode_workers="5")).half_written, "no decision yet"


@pytest.mark.parametrize(
    "value", [b"", b"two", b"3.0", b"-2", b"+3", b" 3", b"3\n", b"10000", b"\xff\xfe", "\uff13".encode()]
)
def test_what_is_no_number_is_named_and_counts_as_not_set(value: bytes) -> None:
    told = read({**stored(num_prefill_workers="1", decision_id="0"), NUM_DECODE_WORKERS: Stored(value, 2)})
    assert told.decision == PlannerDecision(1, -1, 0)
    (fault,) = told.faults
    assert fault.startswith("num_decode_workers is '")
    assert "a whole number from 0 to 9999 was expected" in fault
    assert len(fault) < 250


def test_a_broken_acknowledgement_is_the_environments_own_and_no_fault_of_the_planner() -> None:
    told = read(stored(num_decode_workers="1", decision_id="0", scaled_decision_id="yes"))
    assert (told.scaled_decision_id, told.faults, told.acknowledged) == (-1, (), False)


def test_other_keys_below_the_root_are_of_no_interest() -> None:
    assert read({**stored(num_decode_workers="1", decision_id="0"), "model": Stored(b"x", 99)}).faults == ()


def test_numbers_are_written_as_ascii_decimals() -> None:
    assert [encode(number) for number in (-1, 0, 12)] == [b"-1", b"0", b"12"]


def test_a_decision_names_itself() -> None:
    assert str(PlannerDecision(1, 3, 7)) == "decision 7 (prefill=1, decode=3)"
    assert (NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS) == ("num_prefill_workers", "num_decode_workers")

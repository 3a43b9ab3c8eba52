"""The table of states: each state has its row, and the rows agree with the transitions."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.lifecycle import NEXT
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.states import TRAITS, UNKNOWN, HasProcess, states_with, traits_of
from dynamo_local.core.types import WorkerState as S


def test_every_state_has_its_row() -> None:
    """A state without one would be a KeyError in `step`, and so in the arbiter."""
    assert set(TRAITS) == set(S)


def test_every_state_can_be_come_to_and_left() -> None:
    """A new row without its transitions would be a worker that is stuck, or a state that is never seen."""
    assert set(NEXT.values()) | {S.PENDING} == set(S)
    assert {before for (before, _), after in NEXT.items() if after is not before} == set(S)


@pytest.mark.parametrize("state", S)
def test_registration_is_possible_where_the_row_says_so(state: S) -> None:
    """`observing` applies these events to whoever `registers`; where the table had none they would raise."""
    if TRAITS[state].registers:
        assert (state, K.REGISTERED) in NEXT
        assert (state, K.LEASE_REVOKED) in NEXT


@pytest.mark.parametrize("state", S)
def test_traits_that_exclude_each_other(state: S) -> None:
    traits = TRAITS[state]
    assert traits.serves + traits.comes_up + traits.leaves <= 1
    assert not (traits.serves and (traits.killed or traits.failed or not traits.runs))
    assert not (traits.waits and traits.process is not HasProcess.NO)
    assert (traits.take_back is None) == (traits.serves or state in (S.FAULTED, S.FLIPPING))


def test_every_end_of_a_drain_is_counted() -> None:
    """The outcomes of `dynamo_arbiter_drains_total` are the states that a drain can end in, each by its own word."""
    ends = {after for (before, _), after in NEXT.items() if TRAITS[before].drains and after is not before}
    assert {state for state in S if TRAITS[state].drain_outcome is not None} == ends
    outcomes = [TRAITS[state].drain_outcome for state in ends]
    assert len(set(outcomes)) == len(outcomes)


def test_who_drains_and_who_is_gone() -> None:
    assert states_with("drains") == {S.DRAINING}
    assert states_with("gone") == {S.EXITED}


def test_state_of_a_newer_arbiter_is_shown_and_concludes_nothing() -> None:
    """`dynamo status` of this version beside an arbiter that has a state more: it is shown."""
    assert traits_of("of_tomorrow") is UNKNOWN
    assert traits_of("ready") is TRAITS[S.READY]
    assert not any((UNKNOWN.serves, UNKNOWN.failed, UNKNOWN.leaves))

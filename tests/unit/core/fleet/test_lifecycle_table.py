"""The lifecycle table: its paths, what it refuses, and its diagram."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.lifecycle import NEXT, IllegalTransition, apply, legal_kinds, mermaid
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.types import WorkerState as S


def run(*names: str) -> S:
    """The state after these events, from pending."""
    state = S.PENDING
    for name in names:
        state = apply(state, K(name))
    return state


UP = ("SpawnRequested", "Spawned", "Registered")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (UP, S.READY),
        ((*UP, "Registered"), S.READY),
        ((*UP, "DrainRequested"), S.DRAINING),
        ((*UP, "LeaseRevoked"), S.DRAINING),
        ((*UP, "DrainRequested", "LeaseRevoked", "ProcessExited"), S.EXITED),
        ((*UP, "DrainRequested", "DrainCancelled"), S.READY),
        ((*UP, "DrainRequested", "DrainDeadlinePassed"), S.DRAIN_TIMED_OUT),
        ((*UP, "DrainRequested", "DrainDeadlinePassed", "ProcessExited"), S.EXITED),
        ((*UP, "ProcessExited"), S.CRASHED),
        ((*UP, "HealthFailed", "ProcessExited"), S.CRASHED),
        ((*UP, "ProcessExited", "BackoffStarted"), S.BACKING_OFF),
        ((*UP, "ProcessExited", "BackoffStarted", "BackoffElapsed"), S.STARTING),
        ((*UP, "ProcessExited", "Faulted"), S.FAULTED),
        ((*UP, "ProcessExited", "Faulted", "RestartRequested"), S.PENDING),
        ((*UP, "DrainRequested", "ProcessExited", "RestartRequested"), S.PENDING),
        (("SpawnRequested", "StartDeadlinePassed"), S.START_TIMED_OUT),
        (("SpawnRequested", "StartDeadlinePassed", "ProcessExited", "BackoffStarted"), S.BACKING_OFF),
        (("SpawnRequested", "SpawnFailed"), S.CRASHED),
        (("SpawnRequested", "DrainRequested", "Spawned", "Registered"), S.DRAINING),
        ((*UP, "SleepRequested", "Slept"), S.SLEEPING),
        ((*UP, "SleepRequested", "Slept", "WakeRequested", "Woken"), S.READY),
        ((*UP, "SleepRequested", "WakeRequested", "Woken"), S.READY),
        ((*UP, "SleepRequested", "SleepCancelled"), S.READY),
        ((*UP, "SleepRequested", "Slept", "DrainRequested", "ProcessExited"), S.EXITED),
        ((*UP, "SleepRequested", "Slept", "WakeRequested", "HealthFailed"), S.CRASHED),
        (("StartDeadlinePassed",), S.START_TIMED_OUT),
        (("Removed",), S.EXITED),
        ((*UP, "FlipRequested"), S.FLIPPING),
        ((*UP, "FlipRequested", "LeaseRevoked", "Registered", "Flipped"), S.READY),
        ((*UP, "FlipRequested", "FlipFailed"), S.READY),
        ((*UP, "FlipRequested", "DrainRequested", "ProcessExited"), S.EXITED),
        ((*UP, "FlipRequested", "ProcessExited", "BackoffStarted"), S.BACKING_OFF),
        ((*UP, "FlipRequested", "HealthFailed", "ProcessExited"), S.CRASHED),
    ],
)
def test_the_paths_of_a_worker(events: tuple[str, ...], expected: S) -> None:
    """The stories that the issue tells, event by event."""
    assert run(*events) is expected


def test_a_lease_revoked_outside_is_a_drain_and_not_a_crash() -> None:
    assert run(*UP, "LeaseRevoked") is S.DRAINING
    assert run(*UP, "LeaseRevoked", "ProcessExited") is S.EXITED


def test_every_pair_outside_the_table_is_refused() -> None:
    """An illegal event raises, names state, event and cause, and says what would be legal."""
    refused = 0
    for state in S:
        for kind in K:
            if (state, kind) in NEXT:
                assert apply(state, kind) is NEXT[state, kind]
                continue
            with pytest.raises(IllegalTransition) as caught:
                apply(state, kind, "t")
            assert f"{kind} (cause t) is not possible for a worker that is {state.value}" in str(caught.value)
            refused += 1
    assert refused == len(S) * len(K) - len(NEXT)


def test_every_event_is_in_the_table_and_every_state_can_be_left() -> None:
    assert {kind for _, kind in NEXT} == set(K)
    assert all(legal_kinds(state) for state in S)
    assert set(NEXT.values()) | {S.PENDING} == set(S)


def test_from_every_state_there_is_a_way_out() -> None:
    can_exit = {S.EXITED}
    while True:
        more = {source for (source, _), target in NEXT.items() if target in can_exit} - can_exit
        if not more:
            break
        can_exit |= more
    assert can_exit == set(S)


def test_the_diagram_shows_every_transition() -> None:
    diagram = mermaid()
    assert diagram.startswith("stateDiagram-v2\n    [*] --> pending\n")
    for (source, kind), target in NEXT.items():
        arrow = f"    {source.value} --> {target.value}: "
        (line,) = (line for line in diagram.splitlines() if line.startswith(arrow))
        assert kind in line
    assert "    ready --> draining: DrainRequested, LeaseRevoked\n" in diagram

"""Tests what a worker keeps of its passes, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.passes import ForwardPass
from dynamo_local.transport.passes import KEPT_PASSES, PassRecorder
from tests.fakes.data_plane.passes import heartbeat, passed


def recorded(*passes: ForwardPass) -> PassRecorder:
    recorder = PassRecorder()
    for one in passes:
        recorder.record(one)
    return recorder


def numbers(passes: Sequence[ForwardPass]) -> list[tuple[int, int]]:
    return [(one.engine.dp_rank, one.counter_id) for one in passes]


def test_what_came_after_a_number_is_told_by_rank() -> None:
    recorder = recorded(passed(1), passed(2), passed(1, rank=1), passed(3), passed(2, rank=1))
    assert numbers(recorder.since({0: 2, 1: 0}, 64)) == [(0, 3), (1, 1), (1, 2)]
    assert numbers(recorder.since({}, 64)) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert recorder.since({0: 3, 1: 2}, 64) == []


def test_many_are_thinned_evenly_and_the_last_one_is_there() -> None:
    recorder = recorded(*(passed(n) for n in range(1, 1001)))
    assert [one.counter_id for one in recorder.since({}, 4)] == [250, 500, 750, 1000]
    assert recorder.missed == {}


def test_the_oldest_are_forgotten_when_nobody_asks() -> None:
    recorder = recorded(*(passed(n) for n in range(3 * KEPT_PASSES)))
    assert len(recorder.since({}, 10**6)) == KEPT_PASSES


def test_a_heartbeat_is_told_only_where_it_is_the_last() -> None:
    recorder = recorded(passed(1), heartbeat(2), heartbeat(3))
    assert [one.counter_id for one in recorder.since({}, 64)] == [1, 3]
    recorder.record(passed(4))
    assert [one.counter_id for one in recorder.since({0: 3}, 64)] == [4]


def test_an_idle_engine_is_told_of_again_and_again() -> None:
    """Else its last pass would grow old, and the engine would look as if it were stopped."""
    recorder = recorded(passed(1), heartbeat(2, at_s=9.0))
    assert recorder.since({0: 2}, 64) == [heartbeat(2, at_s=9.0)]


def test_gaps_in_the_numbers_are_counted() -> None:
    assert recorded(passed(1), passed(4), passed(5), passed(9), passed(3, rank=1)).missed == {0: 5}


def test_an_engine_that_was_started_again_begins_anew() -> None:
    recorder = recorded(passed(500), passed(501), passed(1), passed(2))
    assert [one.counter_id for one in recorder.since({0: 501}, 64)] == [1, 2]
    assert recorder.missed == {}


def test_whoever_reads_gets_what_has_ended_meanwhile() -> None:
    recorder = PassRecorder()
    recorder.refresh = lambda: recorder.record(passed(1))
    assert recorder.since({}, 64) == [passed(1)]


def test_listeners_hear_of_each_pass() -> None:
    recorder, heard = PassRecorder(), list[ForwardPass]()
    recorder.listeners.append(heard.append)
    recorder.record(passed(1))
    recorder.record(heartbeat(2))
    assert heard == [passed(1), heartbeat(2)]


def test_the_last_of_all_ranks_is_the_latest() -> None:
    assert PassRecorder().last() is None
    assert recorded(passed(5, at_s=2.0), passed(1, at_s=3.0, rank=1)).last() == passed(1, at_s=3.0, rank=1)

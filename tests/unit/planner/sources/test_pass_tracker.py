"""Tests what a planner knows of the engines' passes."""

from __future__ import annotations

from dynamo_local.core.passes import EngineId
from dynamo_local.core.types import Missing
from dynamo_local.planner.sources import NEW_PASSES, STALE_AFTER_S, PassTracker, ReadyWorker
from dynamo_local.planner.values import Capabilities, EngineSeen
from tests.fakes.data_plane.passes import WORKER, heartbeat, passed

DECODE = ReadyWorker("dynamo_Decode", "Decode", WORKER)
ENGINE = EngineId(WORKER)


def seen(tracker: PassTracker, now_s: float, *ready: ReadyWorker) -> dict[EngineId, EngineSeen]:
    return dict(tracker.take(ready or (DECODE,), now_s))


def test_new_passes_are_taken_once_and_the_last_one_stays() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(1, 9.8), passed(2, 9.9)])
    assert seen(tracker, 10.0) == {ENGINE: EngineSeen("Decode", (passed(1, 9.8), passed(2, 9.9)), passed(2, 9.9))}
    assert seen(tracker, 10.1) == {ENGINE: EngineSeen("Decode", (), passed(2, 9.9))}


def test_what_is_known_is_not_asked_for_again_and_not_taken_twice() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(1, 9.0), passed(2, 9.1)])
    assert tracker.after() == {f"{WORKER}/0": 2}
    tracker.heard("dynamo_Decode", [passed(2, 9.1), passed(3, 9.2)])
    assert [one.counter_id for one in seen(tracker, 10.0)[ENGINE].passes] == [1, 2, 3]


def test_an_engine_that_tells_nothing_is_missing_not_idle() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [heartbeat(1, 10.0)])
    assert seen(tracker, 10.0 + STALE_AFTER_S)[ENGINE].last == heartbeat(1, 10.0)
    last = seen(tracker, 10.1 + STALE_AFTER_S)[ENGINE].last
    assert isinstance(last, Missing)
    assert "dynamo_Decode is 3.1 s old" in last.reason


def test_an_idle_engine_is_known_as_long_as_it_says_so() -> None:
    tracker = PassTracker()
    for n in range(1, 20):
        tracker.heard("dynamo_Decode", [heartbeat(n, float(n))])
        assert seen(tracker, float(n)) == {ENGINE: EngineSeen("Decode", (), heartbeat(n, float(n)))}


def test_a_ready_worker_of_which_nothing_was_heard_is_there_as_missing() -> None:
    last = seen(PassTracker(), 1.0)[ENGINE].last
    assert isinstance(last, Missing)
    assert "no pass yet" in last.reason


def test_each_rank_is_an_engine_also_one_that_is_silent() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(1, 1.0, rank=1)], ranks=3)
    found = seen(tracker, 1.0)
    assert sorted(found) == [EngineId(WORKER, 0), EngineId(WORKER, 1), EngineId(WORKER, 2)]
    assert isinstance(found[EngineId(WORKER, 0)].last, Missing)
    assert found[EngineId(WORKER, 1)].last == passed(1, 1.0, rank=1)


def test_a_worker_that_keeps_no_passes_says_why() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", None)
    last = seen(tracker, 1.0)[ENGINE].last
    assert isinstance(last, Missing)
    assert "forward-passes is off" in last.reason


def test_an_engine_is_forgotten_with_its_worker() -> None:
    other = ReadyWorker("dynamo_Decode_1", "Decode", "5")
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(1, 1.0)], missed={"0": 4})
    tracker.heard("dynamo_Decode_1", [passed(1, 1.0, worker="5")])
    assert tracker.missed == {ENGINE: 4, EngineId("5"): 0}
    assert sorted(seen(tracker, 1.0, other)) == [EngineId("5")]
    assert (tracker.missed, tracker.after()) == ({EngineId("5"): 0}, {"5/0": 1})


def test_a_worker_with_another_id_has_none_of_its_old_engines() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(7, 1.0)])
    tracker.heard("dynamo_Decode", [passed(8, 2.0, worker="5")])
    assert list(seen(tracker, 2.0)) == [EngineId("5")]


def test_an_engine_whose_numbers_began_anew_is_followed() -> None:
    tracker = PassTracker()
    tracker.heard("dynamo_Decode", [passed(900, 1.0)])
    tracker.heard("dynamo_Decode", [passed(1, 60.0), passed(2, 60.1)])
    assert seen(tracker, 60.2)[ENGINE].last == passed(2, 60.1)


def test_what_nobody_takes_does_not_pile_up() -> None:
    tracker = PassTracker()
    for n in range(10 * NEW_PASSES):
        tracker.heard("dynamo_Decode", [passed(n, 1.0)])
    assert len(seen(tracker, 1.0)[ENGINE].passes) == NEW_PASSES


def test_capabilities_are_those_last_heard() -> None:
    tracker = PassTracker()
    tracker.can("Decode", Capabilities(max_num_seqs=16))
    tracker.can("Decode", Capabilities(max_num_seqs=32))
    assert tracker.capabilities() == {"Decode": Capabilities(max_num_seqs=32)}

"""Sources: windows of traffic from counters, and passes of engines."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.passes import EngineId
from dynamo_local.core.types import Missing
from dynamo_local.planner.sources import (
    KEPT_S,
    NEW_PASSES,
    SCRAPE_EVERY_S,
    STALE_AFTER_S,
    Counted,
    CounterHistory,
    PassTracker,
    ReadyWorker,
)
from dynamo_local.planner.values import Capabilities, EngineSeen, Traffic
from tests.fakes.data_plane.passes import WORKER, heartbeat, passed


def frontend(epoch: str = "a", up_since_s: float = -1000.0, **counters: float) -> Counted:
    return Counted(True, False, f"Frontend-{epoch}", epoch, up_since_s, counters)


def engine(epoch: str = "e", *, prefills: bool = True, up_since_s: float = -1000.0, **counters: float) -> Counted:
    return Counted(False, prefills, f"Worker-{epoch}", epoch, up_since_s, counters)


def scraped(*scrapes: tuple[float, list[Counted]]) -> CounterHistory:
    history = CounterHistory()
    for at_s, counted in scrapes:
        history.add(at_s, counted)
    return history


def told(history: CounterHistory, window_s: float, now_s: float) -> Traffic:
    traffic = history.traffic(window_s, now_s)
    assert isinstance(traffic, Traffic), traffic
    return traffic


def test_a_window_is_the_difference_of_two_scrapes() -> None:
    before = dict(requests=10, isl_sum=1000, isl_count=10, ttft_s_sum=1.0, ttft_s_count=10, osl_sum=5, osl_count=1)
    after = dict(requests=40, isl_sum=9000, isl_count=30, ttft_s_sum=6.0, ttft_s_count=30, osl_sum=905, osl_count=10)
    traffic = told(scraped((0.0, [frontend(**before)]), (60.0, [frontend(**after)])), 60.0, 61.0)
    assert (traffic.at_s, traffic.duration_s, traffic.num_req) == (60.0, 60.0, 30.0)
    assert (traffic.isl, traffic.osl, traffic.ttft_ms) == (400.0, 100.0, 250.0)


def test_silence_is_0_requests_without_means() -> None:
    traffic = told(scraped((0.0, [frontend(requests=7)]), (60.0, [frontend(requests=7)])), 60.0, 60.0)
    assert traffic.num_req == 0.0
    assert isinstance(traffic.isl, Missing)
    assert isinstance(traffic.ttft_ms, Missing)


@pytest.mark.parametrize("window_s", [5.0, 20.0, 45.0])
def test_any_window_can_be_asked_for(window_s: float) -> None:
    history = scraped(*((at_s, [frontend(requests=at_s)]) for at_s in (n * SCRAPE_EVERY_S for n in range(13))))
    traffic = told(history, window_s, 60.0)
    assert (traffic.num_req, traffic.duration_s) == (window_s, window_s)


def test_the_window_says_how_long_it_really_was() -> None:
    traffic = told(scraped((0.0, [frontend(requests=0)]), (57.0, [frontend(requests=57)])), 55.0, 57.0)
    assert (traffic.duration_s, traffic.num_req) == (57.0, 57.0)


def test_a_frontend_that_began_in_the_window_counts_from_0() -> None:
    began = frontend("b", up_since_s=20.0, requests=4)
    traffic = told(scraped((0.0, [frontend(requests=5)]), (60.0, [frontend(requests=6), began])), 60.0, 60.0)
    assert traffic.num_req == 5.0


def test_a_frontend_that_ended_in_the_window_counts_up_to_its_end() -> None:
    """It was replaced: what it counted last is not lost, and the new one's smaller number is no negative difference."""
    history = scraped(
        (0.0, [frontend("old", requests=100)]),
        (30.0, [frontend("old", requests=130)]),
        (60.0, [frontend("new", up_since_s=40.0, requests=10)]),
    )
    assert told(history, 60.0, 60.0).num_req == 40.0
    assert told(history, 30.0, 60.0).num_req == 10.0


def test_counters_that_begin_anew_within_a_process_go_on() -> None:
    history = scraped(*((at_s, [frontend(requests=n)]) for at_s, n in ((0.0, 90), (30.0, 100), (60.0, 5))))
    assert told(history, 60.0, 60.0).num_req == 15.0


def test_an_old_process_that_was_not_there_at_the_beginning_is_no_window() -> None:
    history = scraped((0.0, [frontend(requests=1)]), (60.0, [frontend(requests=2), frontend("b", requests=1000)]))
    missing = history.traffic(60.0, 60.0)
    assert isinstance(missing, Missing)
    assert "Frontend-b" in missing.reason


def test_before_the_window_is_full_it_is_missing() -> None:
    history = CounterHistory()
    assert isinstance(history.traffic(180.0, 0.0), Missing)
    history.add(0.0, [frontend(requests=1)])
    history.add(60.0, [frontend(requests=2)])
    missing = history.traffic(180.0, 60.0)
    assert isinstance(missing, Missing)
    assert "not yet for 180 s" in missing.reason


def test_where_a_frontend_did_not_answer_the_scrape_ends_no_window() -> None:
    """A part of the sum is no sum: the window ends before, and is missing when that is too long ago."""
    history = scraped((0.0, [frontend(requests=0)]), (60.0, [frontend(requests=60)]))
    history.add(65.0, [], absent=["Frontend"])
    assert told(history, 60.0, 66.0).at_s == 60.0
    missing = history.traffic(60.0, 60.0 + 4 * SCRAPE_EVERY_S)
    assert isinstance(missing, Missing)
    assert "Frontend did not tell" in missing.reason


def test_without_a_frontend_nothing_is_known() -> None:
    assert isinstance(scraped((0.0, [engine()]), (60.0, [engine()])).traffic(60.0, 60.0), Missing)


def test_a_long_run_does_not_keep_everything() -> None:
    history = CounterHistory()
    for n in range(2000):
        history.add(n * SCRAPE_EVERY_S, [frontend(f"epoch-{n // 10}", up_since_s=n // 10 * 50.0, requests=n % 10)])
    end_s = 1999 * SCRAPE_EVERY_S
    assert isinstance(told(history, 30.0, end_s), Traffic)
    assert isinstance(history.traffic(2 * KEPT_S, end_s), Missing)


# --- hit rate, speculation -------------------------------------------------------------------------

QUIET: tuple[float, list[Counted]] = (0.0, [frontend(), engine("p"), engine("d", prefills=False)])


@pytest.mark.parametrize(
    ("of_frontend", "of_engine", "expected"),
    [
        ({"cached_sum": 100, "cached_count": 2, "isl_sum": 400, "isl_count": 2}, {}, 0.25),
        ({"hit_rate_sum": 1.5, "hit_rate_count": 3, "cached_sum": 9, "cached_count": 1}, {}, 0.5),
        ({"hit_rate_sum": 1.5, "hit_rate_count": 3}, {"prefix_queries": 1000, "prefix_hits": 900}, 0.9),
    ],
    ids=["answers", "router", "engines"],
)
def test_the_hit_rate_is_the_engines_own_where_they_tell(
    of_frontend: dict[str, Any], of_engine: dict[str, Any], expected: float
) -> None:
    decode = engine("d", prefills=False, prefix_queries=100, prefix_hits=100)
    history = scraped(QUIET, (60.0, [frontend(**of_frontend), engine("p", **of_engine), decode]))
    assert told(history, 60.0, 60.0).kv_hit_rate == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        ({}, 1.0),
        ({"drafts": 100, "accepted": 150}, 2.5),
        ({"accept_length_sum": 5.5, "accept_length_count": 2}, 2.75),  # SGLang's and TRT-LLM's
    ],
)
def test_the_accept_length_is_that_of_all_engines(counted: dict[str, float], expected: float) -> None:
    history = scraped(QUIET, (60.0, [frontend(), engine("p"), engine("d", prefills=False, **counted)]))
    assert told(history, 60.0, 60.0).accept_length == expected


def test_without_engines_that_tell_it_is_unknown() -> None:
    traffic = told(scraped((0.0, [frontend()]), (60.0, [frontend()])), 60.0, 60.0)
    assert isinstance(traffic.accept_length, Missing)


# --- pass tracker
# Tests what a planner knows of the engines' passes.

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

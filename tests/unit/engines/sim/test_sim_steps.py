"""The scheduler's rules, one by one, with times that can be worked out in the head."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.engines.sim.blocks import BlockPool
from dynamo_local.engines.sim.requests import (
    Finished,
    HandoffExpired,
    Preempted,
    PullReady,
    SchedulerConfig,
    SimRequest,
    Started,
    Tokens,
)
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.profile.interpolation import FixedModel

# A prompt token takes 1 s, a decode pass 10 s.
PERF = FixedModel(prefill_ms_per_token=1000, decode_ms=10_000)


def scheduler(**options: Any) -> SimScheduler:
    """Blocks of 4 tokens."""
    config: dict[str, Any] = {"num_gpu_blocks": 100, "block_size": 4, "max_num_batched_tokens": 64, **options}
    return SimScheduler(SchedulerConfig(**config), PERF)


def request(name: str, prompt: int, output: int = 1, **options: Any) -> SimRequest:
    family = options.pop("family", name)
    keys = [(family, block) for block in range(prompt // 4)]
    return SimRequest(name, prompt, output, max_output_tokens=output, block_keys=keys, **options)


def play(engine: SimScheduler, until_s: float = 1e9) -> list[Any]:
    """All events up to then, event by event."""
    events: list[Any] = []
    while (at_s := engine.next_event_at()) is not None and at_s <= until_s:
        events += engine.advance(at_s)
    return events


def token_times(events: list[Any], name: str) -> list[float]:
    return [at_s for e in events if isinstance(e, Tokens) and e.request_id == name for at_s in e.times_s]


def test_one_request_is_prefilled_then_decoded() -> None:
    engine = scheduler()
    engine.submit(request("a", 7, 3), 0)
    events = play(engine)
    assert events[0] == Started("a", 0, 0)
    assert token_times(events, "a") == [7, 17, 27]
    assert events[-1] == Finished("a", 27, "length", None)
    assert engine.next_event_at() is None
    assert engine.pool.used == 0
    assert engine.itl_s == 10


def test_requests_of_one_instant_share_a_pass_and_later_ones_join_the_next() -> None:
    engine = scheduler()
    engine.submit(request("a", 2, 3), 0)
    engine.submit(request("b", 3, 1), 0)
    events = play(engine, 0)
    assert engine.next_event_at() == 5
    engine.submit(request("c", 4, 1), 1)
    events += play(engine)
    assert token_times(events, "a") == [5, 19, 29]
    assert token_times(events, "b") == [5]
    assert token_times(events, "c") == [19]


def test_a_long_prompt_is_chunked_and_decodes_go_on_beside_it() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    engine.submit(request("a", 4, 4), 0)
    events = play(engine, 0)
    engine.submit(request("b", 9, 1), 1)
    events += play(engine)
    assert token_times(events, "a") == [4, 17, 30, 43]
    assert token_times(events, "b") == [43]


def test_no_more_than_max_num_seqs_run_and_the_queue_is_first_in_first_out() -> None:
    engine = scheduler(max_num_seqs=2)
    for name, prompt in (("a", 1), ("b", 1), ("c", 50), ("d", 1)):
        engine.submit(request(name, prompt, 2), 0)
    events = play(engine, 0)
    assert [e.request_id for e in events if isinstance(e, Started)] == ["a", "b"]
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    assert engine.remaining_tokens == 4
    events += play(engine)
    assert [e.request_id for e in events if isinstance(e, Started)] == ["a", "b", "c", "d"]


def test_a_shared_prefix_is_computed_once() -> None:
    engine = scheduler()
    engine.submit(request("a", 9, 1, family="x"), 0)
    play(engine)
    engine.submit(request("b", 11, 1, family="x"), 100)
    engine.submit(request("c", 8, 1, family="x"), 200)
    events = play(engine)
    assert [e.num_cached_tokens for e in events if isinstance(e, Started)] == [8, 4]
    assert token_times(events, "b") == [103]
    assert token_times(events, "c") == [204]
    assert engine.prefix_hit_rate == pytest.approx(12 / 28)
    assert engine.matched_tokens([("x", 0), ("x", 1), ("y", 2)]) == 8


def test_output_is_reusable_too_once_its_request_has_ended() -> None:
    engine = scheduler()
    keys = [("talk", n) for n in range(4)]
    first = SimRequest("a", 5, 8, block_keys=keys[:1], output_keys=lambda computed: keys[1 : computed // 4])
    engine.submit(first, 0)
    play(engine)
    engine.submit(SimRequest("b", 16, 1, block_keys=keys), 500)
    started = play(engine)[0]
    assert started.num_cached_tokens == 12


def test_when_the_cache_is_full_the_latest_is_preempted_and_computed_again() -> None:
    """4 blocks; both need a third block: b gives way, starts again when a has gone, and repeats no token."""
    engine = scheduler(num_gpu_blocks=4)
    engine.submit(request("a", 7, 4), 0)
    engine.submit(request("b", 7, 4), 0)
    events = play(engine)
    assert [e.request_id for e in events if isinstance(e, Preempted)] == ["b"]
    assert engine.preemptions == 1
    assert [e.first for e in events if isinstance(e, Tokens) and e.request_id == "b"] == [0, 1, 2, 3]
    assert token_times(events, "a")[-1] < token_times(events, "b")[2]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine = scheduler(num_gpu_blocks=2)
    with pytest.raises(ValueError, match="does not fit the KV cache of 8 tokens"):
        engine.submit(request("a", 7, 3), 0)
    engine.submit(request("a", 7, 2), 0)
    with pytest.raises(ValueError, match="in use"):
        engine.submit(request("a", 1), 0)
    with pytest.raises(ValueError, match="1 token or more"):
        engine.submit(request("b", 0), 0)


def test_an_aborted_request_leaves_nothing_behind() -> None:
    engine = scheduler(max_num_seqs=1)
    engine.submit(request("a", 6, 50), 0)
    engine.submit(request("b", 6, 50), 0)
    play(engine, 17)
    engine.abort("a", 20)
    engine.abort("nobody", 20)
    assert engine.pool.used == 0
    assert engine.next_event_at() == 26
    engine.abort("b", 21)
    events = play(engine)
    assert [e for e in events if isinstance(e, Tokens | Finished)] == []
    assert (engine.num_running, engine.num_waiting, engine.pool.used) == (0, 0, 0)


def test_held_kv_waits_for_its_pull_and_is_freed_by_it() -> None:
    engine = scheduler(kv_lease_duration_s=5)
    engine.submit(request("p", 7, 1, hold_kv=True), 0)
    finished = play(engine, 7)[-1]
    assert len(finished.handoff.blocks) == engine.pool.used == 2
    assert finished.handoff.num_tokens == 7
    assert finished.handoff.expires_at_s == 12
    engine.pin("p", 8)
    assert engine.next_event_at() is None
    engine.release("p", 100)
    assert (engine.pool.used, engine.num_held) == (0, 0)
    with pytest.raises(KeyError):
        engine.pin("p", 101)


def test_held_kv_expires_with_its_lease_and_lets_others_in() -> None:
    engine = scheduler(num_gpu_blocks=2, kv_lease_duration_s=5)
    engine.submit(request("p", 7, 1, hold_kv=True), 0)
    engine.submit(request("q", 6, 1), 1)
    events = play(engine)
    assert HandoffExpired("p", 12) in events
    assert token_times(events, "q") == [18]


def test_a_pull_that_failed_leaves_the_lease_as_it_was() -> None:
    engine = scheduler(kv_lease_duration_s=5)
    engine.submit(request("p", 7, 1, hold_kv=True), 0)
    play(engine, 7)
    engine.pin("p", 8)
    engine.unpin("p", 9)
    assert engine.next_event_at() == 12
    engine.pin("p", 10)
    engine.unpin("p", 40)
    assert HandoffExpired("p", 40) in engine.advance(41)


def test_a_pulled_prompt_counts_as_computed_but_for_its_last_token() -> None:
    engine = scheduler()
    engine.submit(request("d", 7, 2, pull_kv=True), 0)
    assert engine.next_event_at() == 0
    started, ready = engine.advance(0)
    assert (started, ready) == (Started("d", 0, 0), PullReady("d", 0, 7))
    assert (engine.pool.used, engine.num_waiting, engine.num_running) == (2, 1, 0)
    engine.submit(request("a", 3, 1), 1)
    events = play(engine)
    assert token_times(events, "a") == [4]
    engine.pulled("d", 50)
    assert token_times(play(engine), "d") == [60, 70]


def test_a_pull_asks_only_for_what_is_not_cached() -> None:
    engine = scheduler()
    engine.submit(request("a", 8, 1, family="x"), 0)
    play(engine)
    engine.submit(request("d", 11, 1, family="x", pull_kv=True), 100)
    engine.submit(request("e", 8, 1, family="x", pull_kv=True), 100)
    pulls = {e.request_id: e.num_tokens for e in play(engine, 100) if isinstance(e, PullReady)}
    assert pulls == {"d": 3, "e": 0}


def test_a_running_request_does_not_strand_one_that_waits_with_its_kv() -> None:
    """Both hold blocks and the cache is full: the runner gives way, the other one runs, then it again."""
    engine = scheduler(num_gpu_blocks=6, max_num_seqs=1)
    engine.submit(request("d", 12, 2, pull_kv=True), 0)
    engine.submit(request("a", 11, 10), 0)
    play(engine, 0)
    engine.pulled("d", 1)
    events = play(engine)
    assert {e.request_id for e in events if isinstance(e, Finished)} == {"a", "d"}
    assert engine.preemptions > 0


def test_speed_divides_every_pass() -> None:
    engine = scheduler(speed=10)
    engine.submit(request("a", 7, 2), 0)
    assert token_times(play(engine), "a") == pytest.approx([0.7, 1.7])


def test_a_quiet_run_is_one_event() -> None:
    engine = scheduler()
    engine.submit(request("a", 5, 31), 0)
    engine.advance(engine.next_event_at(quiet=True) or 0)
    engine.advance(5)
    assert engine.next_event_at(quiet=True) == 305
    (tokens, finished) = engine.advance(305)
    assert tokens == Tokens("a", 1, tuple(range(15, 306, 10)))
    assert isinstance(finished, Finished)
    assert engine.passes == 31


def test_blocks_are_evicted_least_recently_used_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    old, new = pool.take(1), pool.take(2)
    pool.store(old, ["old"])
    pool.store(new, ["head", "tail"])
    pool.release(old)
    pool.release(new)
    assert pool.take(2) == [3, old[0]]
    assert pool.match(["old"], 1) == []
    assert pool.take(1) == [new[1]]
    assert pool.match(["head", "tail"], 2) == [new[0]]
    assert (pool.used, pool.free) == (3, 1)


def test_a_matched_block_that_is_free_is_not_counted_twice() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.store(block, ["x"])
    pool.release(block)
    matched = pool.match(["x"], 1)
    assert pool.can_take(matched, 1)
    assert not pool.can_take(matched, 2)
    assert pool.can_take([], 2)


def test_accepted_drafts_come_with_their_pass_and_are_counted() -> None:
    """Two and a half tokens a pass; the last pass has room for one draft only, and a first token is not drafted."""
    engine = scheduler(accept_length=2.5)
    engine.submit(request("a", 4, 10), 0)
    events = play(engine)
    assert [len(e.times_s) for e in events if isinstance(e, Tokens)] == [1, 2, 3, 2, 2]
    assert token_times(events, "a")[-1] == 44
    assert (engine.drafts, engine.accepted, engine.passes) == (4, 5, 5)
    assert engine.itl_s == 5
    assert engine.pool.used == 0


def test_without_speculation_nothing_is_drafted() -> None:
    engine = scheduler()
    engine.submit(request("a", 4, 10), 0)
    play(engine)
    assert (engine.drafts, engine.accepted) == (0, 0)

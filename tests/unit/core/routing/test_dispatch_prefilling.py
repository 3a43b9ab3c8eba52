"""Here, or in a prefill worker: by what each costs."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.routing.disagg import QueueView
from dynamo_local.core.routing.estimates import CORRECTION_MAX, Targets, Timing
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import Ask, Choice
from dynamo_local.core.types import Missing
from dynamo_local.profile.interpolation import FixedModel

PERF = FixedModel(prefill_ms_per_token=0.1, decode_ms=10.0, max_kv_tokens=100_000)
EMPTY = QueueView(0, 0)


def make(**options: Any) -> DecodeSide:
    """Prefills at 0.1 ms per token, passes of 10 ms; targets of 2 s and 50 ms."""
    return DecodeSide(Timing(PERF), Targets(2.0, 0.05), **options)


def with_streams(side: DecodeSide, count: int, tokens: int = 2, now_s: float = 10.0) -> DecodeSide:
    """So many answers run, all begun just now, and answers have ten tokens."""
    for number in range(40):
        name = f"old {number}"
        side.began(name, 10, 0.0)
        side.tokens(name, 10, 0.5)
        side.ended(name)
    for number in range(count):
        name = f"stream {number}"
        side.began(name, 100, now_s - 0.1)
        side.went_local(name, 100, now_s - 0.1)
        side.tokens(name, tokens, now_s - 0.01 * (tokens - 1))
    return side


def decide(side: DecodeSide, prompt: int = 10_000, queue: QueueView | Missing = EMPTY, workers: int = 1) -> Choice:
    return side.decide(Ask(prompt), 10.0, queue=queue, prefill_workers=workers)


def test_a_prompt_that_would_stop_running_streams_goes_away() -> None:
    choice = decide(with_streams(make(), 5))
    assert choice.remote
    assert choice.harmed > 4


def test_with_nobody_to_harm_and_a_long_queue_it_stays() -> None:
    """The seed's threshold would agree, always remote would not."""
    choice = decide(make(), queue=QueueView(20, 21))
    assert not choice.remote
    assert choice.local_s is not None
    assert choice.remote_s is not None
    assert choice.local_s < 2.0 < choice.remote_s


def test_harm_is_weighed_against_the_own_target() -> None:
    full = QueueView(20, 21)
    assert not decide(with_streams(make(), 0), queue=full).remote
    assert decide(with_streams(make(), 5), queue=full).remote


def test_prompts_that_wait_here_count_as_much_as_those_there() -> None:
    side = make(max_kv_tokens=10_000_000)
    for number in range(10):
        side.began(f"r{number}", 10_000, 10.0)
        side.went_local(f"r{number}", 10_000, 10.0)
    choice = decide(side, queue=QueueView(2, 6), workers=4)
    assert choice.remote
    assert choice.local_s == pytest.approx(11.0)


def test_an_unknown_queue_is_not_an_empty_one() -> None:
    choice = decide(with_streams(make(), 5), queue=Missing("nats timeout"))
    assert not choice.remote
    assert choice.fallback
    assert choice.remote_s is None
    assert "nats timeout" in choice.reason


def test_without_prefill_workers_everything_is_local() -> None:
    """It would only wait for its deadline."""
    choice = decide(with_streams(make(), 5), workers=0)
    assert not choice.remote
    assert not choice.fallback


def test_a_prompt_for_which_there_is_no_kv_goes_away() -> None:
    """Here it would wait for streams to end."""
    side = make(max_kv_tokens=12_000)
    side.began("r", 8_000, 0.0)
    side.went_local("r", 8_000, 0.0)
    side.tokens("r", 1, 1.0)
    assert decide(side, queue=QueueView(0, 1)).remote


def test_cached_tokens_are_not_computed_here() -> None:
    side = make()
    cached = side.decide(Ask(10_000, 9_900), 10.0, queue=EMPTY, prefill_workers=1)
    assert cached.local_s == pytest.approx(0.01)
    assert not cached.remote


def test_the_latest_start_leaves_time_for_the_prefill() -> None:
    side = make()
    start_by_s = side.start_by_s(Ask(10_000, waited_s=0.5), 10.0)
    assert start_by_s == pytest.approx(10.0 + 2.0 - 0.5 - 1.0, abs=0.05)
    assert DecodeSide(Timing(PERF), Targets(None, 0.05)).start_by_s(Ask(10_000), 10.0) is None


def test_what_is_seen_corrects_the_estimates_within_a_bound() -> None:
    """Prefill workers that are half as fast as their profile are found out; an outage is not taken for slowness."""
    side = make()
    for number in range(200):
        name, now_s = f"r{number}", 10.0 * number
        side.began(name, 1_000, now_s)
        side.went_remote(name, 0.1, now_s, 0.1)
        side.handed_over(name, now_s + 0.15)
        side.ended(name, completed=False)
    assert side.remote_correction.factor == pytest.approx(1.5, rel=0.01)
    for _ in range(200):
        side.began("s", 1_000, 0.0)
        side.went_remote("s", 0.1, 0.0, 0.1)
        side.handed_over("s", 60.0)
        side.ended("s", completed=False)
    assert side.remote_correction.factor <= CORRECTION_MAX * (1 + 1e-9)


def test_nothing_is_left_when_all_have_ended() -> None:
    side = make()
    for number, way in enumerate(("away", "here", "handed", "runs", "failed")):
        name = str(number)
        side.began(name, 100, 0.0)
        if way in ("away", "handed", "failed"):
            side.went_remote(name, 0.1, 0.0)
        if way in ("handed", "failed"):
            side.handed_over(name, 1.0)
        if way in ("here", "runs", "failed"):
            side.went_local(name, 100, 1.0)
        if way == "runs":
            side.tokens(name, 3, 2.0)
    assert side.backlog_s(2.0) > 0
    for number in range(5):
        side.ended(str(number), completed=False)
    assert side.running == 0
    assert side.backlog_s(2.0) == 0
    fresh = make()
    assert decide(side).local_s == decide(fresh).local_s
    assert decide(side, prompt=100_000).remote == decide(fresh, prompt=100_000).remote


def test_a_remote_prefill_waits_behind_the_prompts_that_are_computed_here() -> None:
    """Its KV is taken over between passes: ten prompts of a second each are before it, whoever prefills it."""
    side = make(max_kv_tokens=10_000_000)
    free = decide(side, queue=QueueView(0, 0))
    for number in range(10):
        side.began(f"r{number}", 10_000, 10.0)
        side.went_local(f"r{number}", 10_000, 10.0)
    behind = decide(side, queue=QueueView(0, 0))
    assert free.remote_s is not None
    assert behind.remote_s is not None
    assert free.behind_s == 0.0
    assert behind.behind_s == pytest.approx(9.0)  # one of the ten seconds goes by while it is prefilled
    assert behind.remote_s == pytest.approx(free.remote_s + 9.0)


def test_a_pass_that_computed_a_prompt_says_nothing_of_a_tokens_time() -> None:
    """Else streams would seem to be lost already, and each further prompt here to harm nobody."""
    side = with_streams(make(), 1)
    side.began("prompt", 10_000, 10.0)
    side.went_local("prompt", 10_000, 10.0)
    for number in range(50):
        side.itl_seen(1.0, 10.0 + number / 100)
    assert side.itl_correction.factor == 1.0
    side.tokens("prompt", 1, 11.0)
    side.itl_seen(1.0, 11.5)  # that pass began before the prompt's first token
    assert side.itl_correction.factor == 1.0
    side.itl_seen(0.02, 12.0)
    assert side.itl_correction.factor > 1.0


def test_streams_that_are_paused_often_cannot_make_up_for_one_more() -> None:
    """Answers of ten tokens at 10 ms save 0.36 s against 50 ms: one pause of 0.3 s is borne, not many."""
    calm, busy = with_streams(make(), 3), with_streams(make(), 3)
    for number in range(13):
        name, at_s = f"prompt {number}", 6.0 + 0.3 * number
        busy.began(name, 3_000, at_s)
        busy.went_local(name, 3_000, at_s)
        busy.tokens(name, 1, at_s + 0.3)
        busy.ended(name, completed=False)
    queue = QueueView(9, 10)
    assert decide(calm, prompt=3_000, queue=queue).harmed == 0.0
    assert decide(busy, prompt=3_000, queue=queue).harmed > 1.0


def test_what_came_of_an_estimate_is_counted_by_way() -> None:
    side = make()
    for name, comes_back in (("a", False), ("b", True)):
        ask = Ask(10_000)
        side.began(name, 10_000, 10.0)
        choice = side.decide(ask, 10.0, queue=QueueView(20, 21), prefill_workers=1)
        assert not choice.remote
        side.follow(name, ask, choice, 10.0)
        if comes_back:
            side.went_local(name, 10_000, 10.5)
        side.tokens(name, 1, 11.5)
        side.ended(name)
    local = side.first_tokens["local"]
    assert (local.count, side.first_tokens["remote"].count) == (1, 0)
    assert (local.estimated_s, local.seen_s) == (pytest.approx(1.0), pytest.approx(1.5))
    assert local.error_s == pytest.approx(0.5)

"""Dispatch under targets, whatever comes: nothing starves, estimates are durations, more work never looks like less."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.routing.choice import Sample
from dynamo_local.core.routing.decode_choice import Busy, SloPicker
from dynamo_local.core.routing.disagg import QueueView
from dynamo_local.core.routing.estimates import (
    CORRECTION_MAX,
    AnswerLengths,
    Correction,
    Risk,
    Stream,
    Targets,
    Timing,
    likely_above,
    misses_gap,
)
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import LATE_EVERY, Ask, PrefillLine, Turns
from dynamo_local.core.types import Load, Missing
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.tools.examples import examples

TIMING = Timing(ProfileModel.load(DEFAULT_PROFILE))
TARGETS = st.builds(
    Targets,
    st.none() | st.floats(0.01, 10.0),
    st.none() | st.floats(0.001, 0.5),
)
SECONDS = st.floats(0.0, 100.0)
LENGTHS = st.lists(st.integers(1, 5000), max_size=60)


def lengths_of(seen: list[int]) -> AnswerLengths:
    lengths = AnswerLengths()
    for tokens in seen:
        lengths.ended(tokens)
    return lengths


@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(0.0, 10.0)), max_size=120), st.integers(1, 4))
def test_every_entry_is_pulled_once_and_none_starves(steps: list[tuple[bool, float | None]], pullers: int) -> None:
    """Whoever pulls, and however late it is: an entry that waits in the second line moves up at every eighth turn."""
    line, turns = PrefillLine[int](), [Turns() for _ in range(pullers)]
    put, got, since_late = 0, [], 0
    for number, (pulls, start_by_s) in enumerate(steps):
        line.append(put, start_by_s)
        put += 1
        if pulls:
            waiting = line.late
            got.append(line.popleft(turns[number % pullers], number / 10))
            since_late = since_late + 1 if waiting and line.late >= waiting else 0
            assert since_late <= LATE_EVERY * pullers
    while line:
        got.append(line.popleft(turns[0], 1e6))
    assert sorted(got) == list(range(put))


@given(LENGTHS, st.integers(0, 6000), st.floats(-10, 6000), st.floats(0, 6000))
def test_an_answer_ends_within_more_the_more_probably(
    seen: list[int], generated: int, more: float, further: float
) -> None:
    lengths = lengths_of(seen)
    now, later = lengths.ends_within(generated, more), lengths.ends_within(generated, more + further)
    assert 0.0 <= now <= later <= 1.0


@given(
    LENGTHS,
    st.builds(Stream, st.integers(1, 3000), st.floats(0, 50)),
    st.floats(50, 100),
    SECONDS,
    SECONDS,
    st.floats(0.0001, 1),
    st.floats(0.0001, 1),
)
def test_a_longer_pause_never_makes_a_miss_less_probable(
    seen: list[int], stream: Stream, now_s: float, pause_s: float, more_s: float, itl_s: float, target_s: float
) -> None:
    lengths = lengths_of(seen)
    short = misses_gap(stream, now_s, pause_s, itl_s, target_s, lengths)
    long = misses_gap(stream, now_s, pause_s + more_s, itl_s, target_s, lengths)
    assert 0.0 <= short <= long + 1e-9 <= 1.0 + 2e-9


@given(SECONDS, SECONDS, st.floats(0.001, 100))
def test_a_later_first_token_is_never_a_smaller_risk(estimated_s: float, more_s: float, left_s: float) -> None:
    assert 0.0 <= likely_above(estimated_s, left_s) <= likely_above(estimated_s + more_s, left_s) <= 1.0


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=100))
def test_corrections_stay_within_their_bound(seen: list[tuple[float, float]]) -> None:
    """Whatever was seen."""
    correction = Correction()
    for observed_s, estimated_s in seen:
        correction.seen(observed_s, estimated_s)
        assert 1 / CORRECTION_MAX - 1e-9 <= correction.factor <= CORRECTION_MAX + 1e-9


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60),
    st.floats(0, 3),
    st.floats(0, 3),
)
def test_whatever_was_seen_a_nearer_estimate_is_never_a_smaller_risk(
    seen: list[tuple[float, bool]], share: float, more: float
) -> None:
    risk = Risk(lambda each: likely_above(each, 1.0))
    for each, missed in seen:
        risk.seen(each, missed=missed)
    assert 0.0 <= risk.of(share) <= risk.of(share + more) + 1e-12 <= 1.0 + 2e-12


Request = st.tuples(
    st.sampled_from(["local", "remote", "handed", "failed"]),
    st.integers(1, 100_000),
    st.integers(0, 500),
    st.booleans(),
)


@settings(max_examples=examples(60))
@given(
    st.lists(Request, max_size=20),
    TARGETS,
    st.integers(1, 120_000),
    st.floats(0, 1),
    SECONDS,
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(1, 8),
)
def test_estimates_are_durations_and_a_longer_queue_is_a_longer_wait(
    requests: list[tuple[str, int, int, bool]],
    targets: Targets,
    prompt: int,
    hit: float,
    waited_s: float,
    pending: int,
    more: int,
    workers: int,
) -> None:
    """No wait is negative, also after any history; with more before it a request waits no less, and with more before it
    elsewhere nothing goes there that would not have gone."""
    side = DecodeSide(TIMING, targets)
    for number, (way, tokens, generated, ends) in enumerate(requests):
        name, now_s = str(number), float(number)
        side.began(name, tokens, now_s)
        if way != "local":
            side.went_remote(name, 0.1, now_s, 0.2)
        if way in ("handed", "failed"):
            side.handed_over(name, now_s + 0.1)
        if way in ("local", "failed"):
            side.went_local(name, tokens, now_s + 0.2, 0.3)
        side.tokens(name, generated, now_s + 0.5)
        if ends:
            side.ended(name)
    ask, now_s = Ask(prompt, int(hit * prompt), waited_s), 30.0

    def choose(waiting: int):
        view = QueueView(waiting, waiting + workers, pending // 3)  # those that are more wait before it
        return side.decide(ask, now_s, queue=view, prefill_workers=workers)

    few, many = choose(pending), choose(pending + more)
    for choice in (few, many):
        assert choice.local_s is not None
        assert choice.remote_s is not None
        assert choice.local_s > 0
        assert choice.remote_s > 0
        assert choice.harmed >= 0
        assert choice.work_s > 0
    assert many.remote_s >= few.remote_s - 1e-9
    assert few.remote or not many.remote
    assert side.backlog_s(now_s) >= 0
    unknown = side.decide(ask, now_s, queue=Missing("away"), prefill_workers=workers)
    assert not unknown.remote
    assert unknown.remote_s is None


@given(
    st.integers(0, 300),
    st.integers(0, 900_000),
    st.integers(0, 50),
    st.integers(0, 90_000),
    st.integers(1, 50_000),
    TARGETS,
)
def test_a_busier_worker_never_costs_less(
    requests: int, kv_tokens: int, more: int, more_tokens: int, prompt: int, targets: Targets
) -> None:
    """More requests, more KV, fewer slots: each makes a worker dearer, or changes nothing. Only streams that have lost
    their target already cannot lose it again: where there is a target, that holds of a worker without streams."""
    picker = SloPicker(TIMING, targets)
    if targets.itl_s is not None:
        requests = more = 0
    cost = picker.cost(Busy(requests, kv_tokens), prompt, 0.1)
    assert 0.0 <= cost <= picker.cost(Busy(requests + more, kv_tokens + more_tokens), prompt, 0.1)
    assert cost < picker.cost(Busy(requests, kv_tokens, 1), prompt, 0.1)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=8), TARGETS)
def test_a_pick_is_a_candidate_and_never_one_of_unknown_load_before_an_idle_one(
    workers: list[tuple[bool, int, float]], targets: Targets
) -> None:
    loads = {
        number: Sample(Load(active, 512, 0, 1000, 0, usage) if known else Missing("none"), 1.0)
        for number, (known, active, usage) in enumerate(workers, start=1)
    }
    picked = SloPicker(TIMING, targets).pick(list(loads), loads, prompt_tokens=100)
    assert picked in loads
    loads[99] = Sample(Load(0, 512, 0, 1000, 0, 0.0), 1.0)
    loads[100] = Sample(Load(300, 512, 0, 1000, 0, 0.9), 1.0)
    chosen = SloPicker(TIMING, targets).pick(list(loads), loads, prompt_tokens=100)
    assert not isinstance(loads[chosen].load, Missing)

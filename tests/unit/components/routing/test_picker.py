"""Which worker gets the next request."""

from __future__ import annotations

from collections import Counter

import pytest

from dynamo_local.components.dispatcher import Random, make_picker
from dynamo_local.core.routing.choice import LeastLoaded, Picker, RoundRobin, Sample
from dynamo_local.core.types import Load, Missing


def sample(active: int = 0, waiting: int = 0, remaining: int = 0, at_s: float = 0.0) -> Sample:
    return Sample(
        Load(request_active_slots=active, num_requests_waiting=waiting, remaining_tokens=remaining), at_s=at_s
    )


def test_round_robin_takes_turns_as_workers_come_and_go() -> None:
    picker = RoundRobin()
    assert [picker.pick([3, 1, 2], {}) for _ in range(4)] == [1, 2, 3, 1]
    assert [picker.pick([1, 3, 4], {}) for _ in range(3)] == [3, 4, 1]


def test_random_is_repeatable_by_seed_and_uses_all() -> None:
    one, two = make_picker("random", seed=7), make_picker("random", seed=7)
    choices = [one.pick([1, 2, 3], {}) for _ in range(60)]
    assert choices == [two.pick([3, 2, 1], {}) for _ in range(60)]
    assert set(choices) == {1, 2, 3}


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ({1: sample(active=2), 2: sample(active=1)}, 2),
        ({1: sample(active=1, waiting=3), 2: sample(active=3)}, 2),
        ({1: sample(active=2, remaining=50), 2: sample(active=2, remaining=900)}, 1),
    ],
)
def test_least_loaded_prefers_fewer_requests_then_fewer_tokens(loads: dict[int, Sample], expected: int) -> None:
    assert LeastLoaded().pick([1, 2], loads) == expected


def test_a_burst_is_spread_before_the_next_sample() -> None:
    """What was sent since the sample counts, so ten requests at once do not all go to one worker."""
    picker, loads = LeastLoaded(), {1: sample(active=4), 2: sample()}
    chosen: Counter[int] = Counter()
    for n in range(10):
        worker = picker.pick([1, 2], loads)
        picker.routed(worker, f"r{n}", tokens=10, now_s=1.0)
        chosen[worker] += 1
    assert chosen == {2: 7, 1: 3}


def test_requests_older_than_the_sample_are_not_counted_twice() -> None:
    picker = LeastLoaded()
    for n in range(3):
        picker.routed(1, f"r{n}", tokens=10, now_s=1.0)
    assert picker.pick([1, 2], {1: sample(active=3, at_s=2.0), 2: sample(active=4, at_s=2.0)}) == 1
    assert picker.pick([1, 2], {1: sample(active=4, at_s=2.0), 2: sample(active=3, at_s=2.0)}) == 2


def test_a_burst_is_halved_whatever_the_samples_say_meanwhile() -> None:
    """Samples come late, and do not know what is on its way: 500 requests over two workers went 301 to 199."""
    picker = LeastLoaded()
    chosen: Counter[int] = Counter()
    for n in range(500):
        at_s = n / 1000
        # The first worker's sample arrives with nothing of what was sent lately; the second's is up to date.
        loads = {1: sample(active=max(0, chosen[1] - 40), at_s=at_s), 2: sample(active=chosen[2], at_s=at_s)}
        worker = picker.pick([1, 2], loads)
        picker.routed(worker, f"r{n}", tokens=10, now_s=at_s)
        chosen[worker] += 1
    assert chosen == {1: 250, 2: 250}


def test_who_hears_of_no_ends_adds_what_may_not_have_arrived() -> None:
    picker = LeastLoaded(hears_ends=False)
    picker.routed(1, "on its way", tokens=10, now_s=1.95)
    loads = {1: sample(at_s=2.0), 2: sample(at_s=2.0)}
    assert picker.pick([1, 2], loads) == 2
    picker.routed(2, "arrived", tokens=10, now_s=1.0)
    assert picker.pick([1, 2], loads) == 2


def test_what_others_have_sent_counts() -> None:
    """Of a sample, what is not from here; also where some of ours have ended since."""
    picker = LeastLoaded()
    for n in range(4):
        picker.routed(1, f"r{n}", tokens=10, now_s=1.0)
    for n in range(3):
        picker.finished(1, f"r{n}", 3.0)
    loads = {1: sample(active=6, at_s=2.0), 2: sample(active=4, at_s=2.0)}  # two of another's, and one of ours is left
    assert picker.pick([1, 2], loads) == 1
    picker.routed(1, "r4", tokens=10, now_s=4.0)
    picker.routed(1, "r5", tokens=10, now_s=4.0)
    assert picker.pick([1, 2], loads) == 2


def test_nobody_waits_while_a_sibling_has_a_free_slot() -> None:
    small = Sample(Load(request_active_slots=4, request_total_slots=4), 0.0)
    large = Sample(Load(request_active_slots=9, request_total_slots=16), 0.0)
    assert LeastLoaded().pick([1, 2], {1: small, 2: large}) == 2
    full = Sample(Load(request_active_slots=16, num_requests_waiting=3, request_total_slots=16), 0.0)
    assert LeastLoaded().pick([1, 2], {1: small, 2: full}) == 1


def test_finished_requests_are_forgotten() -> None:
    picker = LeastLoaded()
    picker.routed(1, "r", tokens=10, now_s=1.0)
    picker.finished(1, "r", 1.5)
    picker.finished(1, "never routed", 1.5)
    assert picker.pick([1, 2], {1: sample(), 2: sample(active=1)}) == 1


@pytest.mark.parametrize("missing", [None, Sample(Missing("nats timeout"), 0.0)])
def test_missing_load_is_not_idle(missing: Sample | None) -> None:
    loads = {1: sample(active=3), 2: sample(active=1)} | ({3: missing} if missing else {})
    assert LeastLoaded().pick([1, 2, 3], loads) == 2
    assert LeastLoaded().pick([1, 3], loads) in (1, 3)


def test_without_any_load_the_own_requests_decide() -> None:
    picker = LeastLoaded()
    chosen: Counter[int] = Counter()
    for n in range(6):
        worker = picker.pick([1, 2, 3], {})
        picker.routed(worker, f"r{n}", tokens=1, now_s=float(n))
        chosen[worker] += 1
    assert chosen == {1: 2, 2: 2, 3: 2}


def test_an_idle_known_worker_beats_a_missing_one_with_requests() -> None:
    picker = LeastLoaded()
    picker.routed(2, "r", tokens=5, now_s=0.0)
    assert picker.pick([1, 2], {1: sample()}) == 1


@pytest.mark.parametrize("name", ["round-robin", "random", "least-loaded"])
def test_every_picker_chooses_among_the_candidates(name: str) -> None:
    picker: Picker = make_picker(name, seed=1)  # type: ignore[arg-type]
    assert isinstance(picker, RoundRobin | Random | LeastLoaded)
    assert picker.pick([9], {1: sample(), 9: sample(active=50)}) == 9

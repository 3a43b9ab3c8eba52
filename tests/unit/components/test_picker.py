"""Which worker gets the next request."""

from __future__ import annotations

from collections import Counter

import pytest

from dynamo_local.components.picker import Random, make_picker
from dynamo_local.core.routing import LeastLoaded, Picker, RoundRobin, Sample
from dynamo_local.core.types import Load, Missing


def sample(active: int = 0, waiting: int = 0, remaining: int = 0, at_s: float = 0.0) -> Sample:
    return Sample(
        Load(request_active_slots=active, num_requests_waiting=waiting, remaining_tokens=remaining), at_s=at_s
    )


def test_round_robin_takes_turns_as_workers_come_and_go() -> None:
    """Turns go by id; a newcomer is reached within one round, a leaver is skipped."""
    picker = RoundRobin()
    assert [picker.pick([3, 1, 2], {}) for _ in range(4)] == [1, 2, 3, 1]
    assert [picker.pick([1, 3, 4], {}) for _ in range(3)] == [3, 4, 1]


def test_random_is_repeatable_by_seed_and_uses_all() -> None:
    """The same seed gives the same choices; every worker is chosen."""
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
    """Active plus waiting first, tokens still to come second."""
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
    """A newer sample already holds them."""
    picker = LeastLoaded()
    for n in range(3):
        picker.routed(1, f"r{n}", tokens=10, now_s=1.0)
    assert picker.pick([1, 2], {1: sample(active=1, at_s=2.0), 2: sample(active=2, at_s=2.0)}) == 1


def test_finished_requests_are_forgotten() -> None:
    """A request that ended between two samples weighs nothing."""
    picker = LeastLoaded()
    picker.routed(1, "r", tokens=10, now_s=1.0)
    picker.finished(1, "r")
    picker.finished(1, "never routed")
    assert picker.pick([1, 2], {1: sample(), 2: sample(active=1)}) == 1


@pytest.mark.parametrize("missing", [None, Sample(Missing("nats timeout"), 0.0)])
def test_missing_load_is_not_idle(missing: Sample | None) -> None:
    """A worker that says nothing ranks with the busiest known one, not first."""
    loads = {1: sample(active=3), 2: sample(active=1)} | ({3: missing} if missing else {})
    assert LeastLoaded().pick([1, 2, 3], loads) == 2
    assert LeastLoaded().pick([1, 3], loads) in (1, 3)


def test_without_any_load_the_own_requests_decide() -> None:
    """Before the first sample a picker balances what it has in flight."""
    picker = LeastLoaded()
    chosen: Counter[int] = Counter()
    for n in range(6):
        worker = picker.pick([1, 2, 3], {})
        picker.routed(worker, f"r{n}", tokens=1, now_s=float(n))
        chosen[worker] += 1
    assert chosen == {1: 2, 2: 2, 3: 2}


def test_an_idle_known_worker_beats_a_missing_one_with_requests() -> None:
    """A known zero is a zero: it is not replaced by the worst score."""
    picker = LeastLoaded()
    picker.routed(2, "r", tokens=5, now_s=0.0)
    assert picker.pick([1, 2], {1: sample()}) == 1


@pytest.mark.parametrize("name", ["round-robin", "random", "least-loaded"])
def test_every_picker_chooses_among_the_candidates(name: str) -> None:
    """Whatever the loads, the choice is one of the candidates."""
    picker: Picker = make_picker(name, seed=1)  # type: ignore[arg-type]
    assert isinstance(picker, RoundRobin | Random | LeastLoaded)
    assert picker.pick([9], {1: sample(), 9: sample(active=50)}) == 9

"""Tests who goes: each policy, its ties, and what a missing load means."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.events import VictimPolicy, parse_policy
from dynamo_local.core.fleet.scaling import arrivals, cache_at_stake, victims
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import BadTarget
from tests.fakes.arbiter.fleet_views import NO_LOAD, load, worker


def order(policy: VictimPolicy, *loads: Load | Missing) -> list[int]:
    """The suffixes of ready workers with these loads, the first to go first."""
    return [w.n for w in victims([worker(n, "ready", load=each) for n, each in enumerate(loads)], policy)]


def test_the_highest_suffix_goes_whatever_the_load() -> None:
    assert order(VictimPolicy.HIGHEST_SUFFIX, load(1), load(0), NO_LOAD) == [2, 1, 0]


def test_the_least_loaded_has_the_fewest_tokens_left() -> None:
    assert order(VictimPolicy.LEAST_LOADED, load(30), load(10), load(20)) == [1, 2, 0]
    assert order(VictimPolicy.LEAST_LOADED, load(10, active=1), load(10, active=1, waiting=3)) == [0, 1]
    assert order(VictimPolicy.LEAST_LOADED, load(10), load(10), load(10)) == [2, 1, 0]


def test_the_coldest_has_the_least_useful_cache() -> None:
    assert order(VictimPolicy.COLDEST, load(hits=0.9), load(hits=0.1), load(hits=0.5)) == [1, 2, 0]
    assert order(VictimPolicy.COLDEST, load(hits=0.5, active=1), load(hits=0.5, active=2)) == [0, 1]
    assert order(VictimPolicy.COLDEST, load(hits=0.5), load(hits=0.5)) == [1, 0]


def test_an_idle_worker_with_a_warm_cache_is_not_cold() -> None:
    assert cache_at_stake(load(hits=0.9)) == pytest.approx(900.0)
    assert order(VictimPolicy.COLDEST, load(hits=0.9, active=0), load(hits=0.2, active=8)) == [1, 0]


@pytest.mark.parametrize("policy", [VictimPolicy.LEAST_LOADED, VictimPolicy.COLDEST])
def test_a_missing_load_is_not_an_idle_worker(policy: VictimPolicy) -> None:
    """It goes last; if all are missing, the suffix decides."""
    assert order(policy, NO_LOAD, load(10_000, active=8, hits=0.9), NO_LOAD) == [1, 2, 0]
    assert order(policy, NO_LOAD, NO_LOAD) == [1, 0]


def test_what_is_furthest_from_serving_is_taken_back_first() -> None:
    states = ["draining/returning", "starting", "exited/restarting", "pending", "crashed", "backing_off", "starting"]
    found = arrivals(worker(n, state) for n, state in enumerate(states))
    assert [w.n for w in found] == [5, 4, 3, 6, 1, 2, 0]


def test_a_policy_is_read_by_its_name() -> None:
    """Anything else is refused with those there are."""
    assert parse_policy("coldest") is VictimPolicy.COLDEST
    with pytest.raises(BadTarget, match="'oldest' is not known; there are: highest-suffix, least-loaded, coldest"):
        parse_policy("oldest")

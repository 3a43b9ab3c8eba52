"""One model's load, measured by looks at its workers."""

from __future__ import annotations

import pytest

from dynamo_local.core.gpu_shares import LONG_S, LOST_AFTER_S, Usage


def looked(*looks: tuple[int, int, float | None], every_s: float = 1.0) -> Usage:
    """A model at which was looked so often: running, here, ended."""
    usage = Usage(seen_s=0.0, used_s=0.0)
    for n, (running, here, ended) in enumerate(looks, start=1):
        usage.look(n * every_s, running=running, here=here, ended=ended)
    return usage


def arrivals(usage: Usage) -> float:
    """How many came, after looks that are short beside `LONG_S`."""
    return usage.rate_long * LONG_S


@pytest.mark.parametrize("waiting", [0, 50])
def test_a_steady_load_is_measured_however_many_wait(waiting: int) -> None:
    """Two requests a second, three seconds each."""
    usage = looked(*((6, 6 + waiting, 2.0 * n) for n in range(1, 1200)))
    assert (usage.rate, usage.rate_long) == (pytest.approx(2.0, rel=0.01), pytest.approx(2.0, rel=0.01))
    assert usage.busy_s == pytest.approx(3.0, rel=0.03)


def test_requests_without_a_counter_of_those_that_ended_are_measured_as_well() -> None:
    """One every four seconds, which is there for two looks."""
    usage = looked(*((n % 4 < 2, n % 4 < 2, None) for n in range(1200)))
    assert usage.rate_long == pytest.approx(0.25, rel=0.03)
    assert usage.busy_s == pytest.approx(2.0, rel=0.03)


def test_a_held_request_that_a_worker_takes_came_once() -> None:
    usage = looked((0, 1, 0.0), (0, 0, 0.0), (1, 1, 0.0), (0, 0, 1.0))
    assert arrivals(usage) == pytest.approx(1.0, rel=0.05)


def test_requests_that_were_lost_do_not_hide_others() -> None:
    lost = [(3, 3, 0.0), *[(0, 0, 0.0)] * round(LOST_AFTER_S + 1), (2, 2, 0.0)]
    assert arrivals(looked(*lost)) == pytest.approx(5.0, rel=0.1)


def test_a_counter_that_begins_anew_counts_on() -> None:
    assert arrivals(looked((0, 0, 4.0), (0, 0, 1.0), (0, 0, 3.0))) == pytest.approx(7.0, rel=0.05)

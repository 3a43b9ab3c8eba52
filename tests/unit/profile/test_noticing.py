"""Tests what is wrong with a host is noticed, named, and not mistaken for something else."""

from __future__ import annotations

from random import Random

import pytest

from dynamo_local.profile.points import Kind, Limits, sweep
from dynamo_local.profile.repetitions import Progress, Rules, busy_processors, measured, noticed, strangers
from tests.fakes.known_engine import KnownEngine, measure

POINTS = tuple(sweep(Limits(400_000, 16_384, 256), (Kind.PREFILL, Kind.DECODE)))


def seen(engine: KnownEngine) -> list[tuple[str, str | None, float]]:
    progress = measure(Progress(POINTS, Rules(budget_s=2_000.0)), engine)
    return [(each.kind, each.worker, each.size) for each in noticed(measured(progress))]


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02, 0.03])
def test_a_quiet_host_gives_no_alarm(noise):
    for seed in range(2):
        assert seen(KnownEngine(("a", "b", "c"), noise=noise, random=Random(seed))) == []


def test_a_slow_gpu_is_named_with_how_slow_it_is():
    [(kind, worker, size)] = seen(KnownEngine(("a", "b", "c", "d"), slower={"c": 1.2}))
    assert (kind, worker) == ("slow_worker", "c")
    assert size == pytest.approx(0.2, abs=0.02)


def test_of_two_workers_the_slower_one_is_named():
    [(kind, worker, _)] = seen(KnownEngine(("a", "b"), slower={"a": 1.3}))
    assert (kind, worker) == ("slow_worker", "a")


def test_a_noisy_neighbour_is_noticed():
    [(kind, worker, size)] = seen(KnownEngine(noise=0.01, held_up=0.17))
    assert (kind, worker) == ("noisy_neighbour", "w")
    assert size == pytest.approx(0.5, abs=0.1)


def test_a_drifting_engine_is_noticed_with_its_direction():
    span_s = 3.0 * len(POINTS)
    [(kind, _, size)] = seen(KnownEngine(at=lambda at_s: 1 + 0.2 * min(1.0, at_s / span_s)))
    assert kind == "drift"
    assert 0.08 < size < 0.25
    [(kind, _, size)] = seen(KnownEngine(at=lambda at_s: 1 - 0.15 * min(1.0, at_s / span_s)))
    assert kind == "drift"
    assert size < -0.08


def test_a_host_whose_processors_others_use_is_told_of_from_a_quarter_on():
    assert list(busy_processors(0.2)) == []
    [found] = busy_processors(0.87)
    assert (found.kind, found.size) == ("busy_host", 0.87)
    assert "other processes used 87% of this host's processors" in found.text


def test_a_stranger_on_a_measured_gpu_is_named():
    """With its pid, so that a person can end it."""
    [found] = strangers({(4711, "python"): 3})
    assert "GPU 3 was also used by python (pid 4711)" in found.text

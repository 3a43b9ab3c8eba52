"""Which point is measured next, how often, and when it is done: on an engine whose truth is known."""

from __future__ import annotations

import math

import pytest

from dynamo_local.profile.points import KV_MAX, Kind, Limits, Point, sweep
from dynamo_local.profile.repetitions import (
    FAILURES_MAX,
    Progress,
    Rules,
    Sample,
    interval,
    measured,
    robust_mean,
    share_done,
)
from tests.fakes.known_engine import KnownEngine, measure

LIMITS = Limits(max_kv_tokens=400_000, context_length=16_384, max_num_seqs=256)
ALL = tuple(Kind)


def begun(budget_s: float = 10_000.0, **rules: float) -> Progress:
    """All points of `LIMITS`."""
    return Progress(tuple(sweep(LIMITS, ALL)), Rules(budget_s=budget_s, **rules))  # type: ignore[arg-type]


def test_the_sweep_has_dynamos_sixteen_prompts_and_six_contexts_of_six_loads():
    """Whoever compares with a profile of Dynamo's finds the same lengths; nothing is asked for that does not fit."""
    points = sweep(LIMITS, ALL)
    prompts = [p.tokens for p in points if p.kind is Kind.PREFILL]
    assert {round(100 + (16_384 - 512 - 100) * n / 15) for n in range(16)} <= set(prompts)
    decodes = [p for p in points if p.kind is Kind.DECODE]
    assert len({p.tokens for p in decodes}) == 6
    for context in {p.tokens for p in decodes}:
        loads = [p.requests for p in decodes if p.tokens == context]
        assert loads[0] == 1
        assert len(loads) <= 6
        assert max(loads) <= LIMITS.max_num_seqs
        assert max(loads) * context <= KV_MAX * LIMITS.max_kv_tokens


@pytest.mark.parametrize("limits", [Limits(600, 600, 1), Limits(4096, 2048, 4), Limits(10**7, 10**6, 1024)])
def test_a_sweep_fits_any_engine(limits):
    for point in sweep(limits, ALL):
        assert 0 < point.tokens < limits.context_length
        assert point.requests <= limits.max_num_seqs
        assert point.cached < point.tokens


def test_the_mean_of_repetitions_is_the_truth_and_the_interval_says_how_sure_it_is():
    """With noise of a few per cent every point is repeated until it is within ±3 %, and the truth lies within."""
    engine = KnownEngine(noise=0.04)
    known = measured(measure(begun(repeats_max=60), engine))
    assert len(known) == len(begun().points)
    assert all(each.interval.relative <= 0.03 for each in known.values())
    inside = [abs(each.interval.mean - engine.truth_ms(p)) <= each.interval.half_width for p, each in known.items()]
    assert sum(inside) / len(inside) >= 0.8  # 95 % but for stopping as soon as it looks narrow


def test_a_quiet_engine_is_measured_three_times_a_point():
    known = measured(measure(begun(), KnownEngine(noise=0.0)))
    assert {len(each.samples) for each in known.values()} == {3}


def test_the_budget_is_kept_and_every_point_has_its_share():
    """With so much noise that no point is ever narrow, each is repeated, and none eats the time of the others."""
    engine = KnownEngine(noise=0.5)
    budget_s = 5.0 * len(begun().points)
    progress = measure(begun(budget_s, repeats_max=1000), engine)
    assert progress.elapsed_s <= budget_s + 1
    counts = [len(each.samples) for each in measured(progress).values()]
    assert len(counts) == len(progress.points)
    assert min(counts) >= 3


def test_a_budget_that_is_too_small_measures_what_it_can_once():
    progress = measure(begun(budget_s=20.0), KnownEngine())
    assert sorted({len(each.samples) for each in measured(progress).values()}) == [1]
    assert len(measured(progress)) == 20


def test_the_order_is_random_differs_by_round_and_is_the_same_for_a_seed():

    def order(seed: int) -> list[Point]:
        progress, found, engine = begun(seed=seed), [], KnownEngine()
        for _ in range(2 * len(progress.points)):
            point = progress.next_point()
            found.append(point)
            progress = progress.noted(point, [engine.sample(point, "w", 0.0)], 1.0)
        return found

    first, again, other = order(1), order(1), order(2)
    half = len(first) // 2
    assert first == again != other
    assert sorted(first[:half]) == sorted(first[half:]) == sorted(begun().points)
    assert first[:half] != first[half:]
    assert first[:half] != sorted(first[:half])


def test_a_point_that_fails_again_and_again_is_given_up():
    bad, good = Point(Kind.PREFILL, 500), Point(Kind.PREFILL, 100)
    progress, engine = Progress((bad, good), Rules()), KnownEngine(noise=0.0)
    while (point := progress.next_point()) is not None:
        if point == bad:
            progress = progress.noted(point, (), 1.0, "refused")
        else:
            progress = progress.noted(point, [engine.sample(point, "w", 0.0)], 1.0)
    assert len(progress.of(bad).failures) == FAILURES_MAX
    assert list(measured(progress)) == [good]
    assert share_done(progress) == (2, 2)


def test_what_is_left_shrinks_to_nothing_and_is_right_for_a_quiet_engine():
    progress, engine = begun(), KnownEngine(noise=0.0)
    total = 3 * len(progress.points)
    for done in range(1, total + 1):
        point = progress.next_point()
        progress = progress.noted(point, [engine.sample(point, "w", 0.0)], 1.0)
        if done > total / 2:
            assert progress.left_s == pytest.approx(total - done, rel=0.35, abs=1)
    assert progress.left_s == 0.0
    assert progress.next_point() is None


def test_intervals_are_students():
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert interval([5.0]).half_width == math.inf


def test_one_pass_that_was_held_up_does_not_count():
    assert robust_mean([10.0, 10.1, 9.9, 10.05] * 15 + [95.0]) == pytest.approx(10.0, rel=0.01)
    assert robust_mean([10.0] * 5) == 10.0
    assert Sample("w", 0.0, 1.0).requests == 1.0

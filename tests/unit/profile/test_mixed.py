"""Passes that prefill and decode at once, beside the sum of both that planners take."""

from __future__ import annotations

import pytest

from dynamo_local.profile.document import keep, resumed
from dynamo_local.profile.fit import decode_points, model_of, prefill_points, sum_error
from dynamo_local.profile.points import Kind, Limits, sweep
from dynamo_local.profile.repetitions import Progress, Rules, measured
from tests.fakes.known_engine import KnownEngine, measure

LIMITS = Limits(400_000, 16_384, 256, 2048)


def progress_of(engine: KnownEngine) -> Progress:
    """All of an aggregated engine's points."""
    return measure(Progress(tuple(sweep(LIMITS, tuple(Kind))), Rules(budget_s=4000.0)), engine)


@pytest.mark.parametrize("factor", [1.0, 0.8, 1.25])
def test_the_error_of_the_sum_is_what_the_engine_saves_or_loses(factor):
    known = measured(progress_of(KnownEngine(noise=0.001, mixed=factor)))
    model = model_of(prefill_points(known, 1), decode_points(known, LIMITS.max_kv_tokens, 1))
    found = sum_error(known, model)
    assert found.bias == pytest.approx(1 / factor - 1, abs=0.03)
    assert found.error == pytest.approx(abs(1 / factor - 1), abs=0.03)
    assert found.points == len([point for point in known if point.kind is Kind.MIXED])


def test_without_such_passes_nothing_is_said_of_the_sum():
    known = {point: each for point, each in measured(progress_of(KnownEngine())).items() if point.kind != Kind.MIXED}
    assert sum_error(known, model_of(prefill_points(known, 1), decode_points(known, 400_000, 1))) is None


def test_a_prompt_beside_a_load_fits_into_one_pass():
    points = [point for point in sweep(LIMITS, (Kind.MIXED,)) if point.kind is Kind.MIXED]
    assert len(points) == 4
    for point in points:
        assert point.chunk + point.requests <= LIMITS.max_num_batched_tokens
        assert "with a prompt of" in str(point)
    assert sweep(Limits(400_000, 16_384, 256, 64), (Kind.MIXED,)) == []


def test_what_was_kept_of_them_is_taken_up_again(tmp_path):
    progress = progress_of(KnownEngine())
    keep(tmp_path, progress, "hash")
    assert measured(resumed(tmp_path, progress.rules, "hash")) == measured(progress)

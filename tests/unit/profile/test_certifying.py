"""Fit, held-out points and the comparison with the simulator."""

from __future__ import annotations

import pytest

from dynamo_local.profile.document import write_npz
from dynamo_local.profile.fit import decode_fit, decode_points, prefill_fit, prefill_points, usable
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.judgement import Compared, HeldOut, certificate, compared, held_out
from dynamo_local.profile.points import Kind, Limits, Point, sweep
from dynamo_local.profile.reading import read_profile
from dynamo_local.profile.repetitions import Measured, Progress, Rules, measured
from tests.fakes.known_engine import KnownEngine, measure

LIMITS = Limits(400_000, 16_384, 256)


def known(engine: KnownEngine) -> dict[Point, Measured]:
    """That engine, measured."""
    return measured(measure(Progress(tuple(sweep(LIMITS, tuple(Kind))), Rules(budget_s=5_000.0)), engine))


def test_the_fit_finds_what_the_engine_is_made_of():
    """8 ms and 20 µs per token; 5 ms, 20 ns per KV token and 5 µs per request: exactly without noise."""
    found = known(KnownEngine(noise=0.0))
    prompts = [(p.tokens, each.interval.mean) for p, each in found.items() if p.kind is Kind.PREFILL]
    fit = prefill_fit(prompts)
    assert (fit.overhead_ms, fit.per_token_ms) == pytest.approx((8.0, 0.02), rel=1e-6)
    assert fit.per_token_squared_ms == pytest.approx(0.0, abs=1e-12)
    assert fit.error < 1e-9
    loads = [(p.tokens * p.requests, p.requests, e.interval.mean) for p, e in found.items() if p.kind is Kind.DECODE]
    decode = decode_fit(loads)
    assert (decode.overhead_ms, decode.per_kv_token_ms, decode.per_request_ms) == pytest.approx((5.0, 2e-5, 5e-3))


def test_a_fit_has_no_negative_coefficient():
    fit = prefill_fit([(100.0, 10.0), (1000.0, 20.0), (10_000.0, 25.0)])
    assert min(fit.overhead_ms, fit.per_token_ms, fit.per_token_squared_ms) >= 0.0
    assert prefill_fit([(100.0, 1.0), (100.0, 1.1), (200.0, 2.0)]) is None


def test_what_was_measured_is_read_back_as_a_profile(tmp_path):
    """The files are Dynamo's; every point of them within the noise of the engine's truth."""
    engine, found = KnownEngine(noise=0.002), known(KnownEngine(noise=0.002))
    write_npz(tmp_path, prefill_points(found, 1), decode_points(found, LIMITS.max_kv_tokens, 1))
    read, model = read_profile(str(tmp_path)), ProfileModel.load(str(tmp_path))
    assert read.decode.max_kv_tokens == LIMITS.max_kv_tokens
    for point in found:
        if point.kind is Kind.PREFILL:
            assert model.ttft_s(point.tokens) * 1000 == pytest.approx(engine.truth_ms(point), rel=0.01)
        elif point.kind is Kind.DECODE:
            itl_s = model.itl_s(point.tokens * point.requests, point.tokens)
            assert itl_s * 1000 == pytest.approx(engine.truth_ms(point), rel=0.01)


def test_held_out_points_of_a_smooth_engine_are_predicted():
    found = known(KnownEngine(noise=0.01))
    held = held_out(found, LIMITS.max_kv_tokens)
    inner = len([p for p in found if p.kind is not Kind.CACHED])
    assert 0.08 * inner <= len(held.errors) <= 0.25 * inner
    assert held.median <= 0.05
    assert held.p90 <= 0.10
    assert certificate(held, [Compared("TTFT p50", 100.0, 105.0)]).state == "certified"


def test_an_engine_that_jumps_between_its_points_is_not_certified():
    found = known(KnownEngine(noise=0.0))
    jumping = {
        p: Measured(tuple(type(s)(s.worker, s.at_s, s.value_ms * (3 if hash((p.tokens, p.requests)) % 2 else 1),
                                  s.requests, s.kv_tokens) for s in each.samples))
        for p, each in found.items()
    }  # fmt: skip
    told = certificate(held_out(jumping, LIMITS.max_kv_tokens), [])
    assert told.state == "uncertified"
    assert "held-out points are off by" in told.where[0]


def test_a_twin_that_is_off_is_told_where():
    real = [(float(n), 10.0) for n in range(1, 101)]
    twin = [(float(n) if n <= 70 else 70.0, 10.5) for n in range(1, 101)]
    found = compared(real, twin)
    assert [each.what for each in found] == ["TTFT p50", "TTFT p90", "ITL p50", "ITL p90"]
    told = certificate(HeldOut({"x": 0.01}), found)
    assert told.state == "uncertified"
    assert len(told.where) == 1
    assert "TTFT p90 is 90 ms" in told.where[0]


def test_what_could_not_be_tried_is_no_certificate():
    told = certificate(HeldOut({}, "no measured point stands between others"), "the budget was spent")
    assert told.state == "uncertified"
    assert told.where == ("held-out points: no measured point stands between others", "trace: the budget was spent")


def test_too_few_points_make_no_curves():
    few = {Point(Kind.PREFILL, 100): known(KnownEngine())[Point(Kind.PREFILL, 100)]}
    assert "1 prompt lengths were measured" in (usable(prefill_points(few, 1), decode_points(few, 1000, 1)) or "")

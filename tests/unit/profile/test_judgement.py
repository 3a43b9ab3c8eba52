"""Fit, held-out points, the comparison with the simulator, and drift while serving."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.profile.document import write_npz
from dynamo_local.profile.fit import decode_fit, decode_points, prefill_fit, prefill_points, usable
from dynamo_local.profile.interpolation import FixedModel, ProfileModel
from dynamo_local.profile.judgement import (
    PASSES_MIN,
    WINDOW_S,
    Compared,
    Drift,
    HeldOut,
    certificate,
    compared,
    expected_s,
    held_out,
    words,
)
from dynamo_local.profile.points import Kind, Limits, Point, sweep
from dynamo_local.profile.reading import read_profile
from dynamo_local.profile.repetitions import Measured, Progress, Rules, measured
from dynamo_local.transport.passes import PassRecorder
from tests.fakes.known_engine import KnownEngine, measure

LIMITS = Limits(400_000, 16_384, 256)


def known(engine: KnownEngine) -> dict[Point, Measured]:
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


# --- drift
# Engines that serve, compared with their profile pass by pass.

MODEL = FixedModel(prefill_ms_per_token=0.1, decode_ms=4.0, decode_ms_per_kv_token=0.001, launch_ms=2.0)
DECODES = Requests(num_decode_requests=2, sum_decode_kv_tokens=1000)
PROMPT = Requests(num_prefill_requests=1, sum_prefill_tokens=100)


def passes(scheduled: Requests, factor: float, count: int = PASSES_MIN, at_s: float = 10.0) -> list[ForwardPass]:
    """As many passes that take `factor` times what the model says."""
    took_s = expected_s(MODEL, scheduled) * factor
    return [ForwardPass(EngineId("1"), n, took_s, scheduled, at_s=at_s) for n in range(count)]


@pytest.mark.parametrize(
    ("scheduled", "ms"),
    [
        (PROMPT, 2 + 10),
        (DECODES, 4 + 1),
        (Requests(num_prefill_requests=3, sum_prefill_tokens=300), 2 + 30),
        (
            Requests(num_prefill_requests=1, sum_prefill_tokens=100, num_decode_requests=2, sum_decode_kv_tokens=1000),
            2 + 10 + 4 + 1,
        ),
    ],
)
def test_a_pass_is_expected_to_take_what_the_profile_says_of_its_tokens(scheduled, ms):
    assert expected_s(MODEL, scheduled) * 1000 == pytest.approx(ms)


def test_figures_are_by_component_and_kind_of_the_last_minutes_and_of_enough_passes():
    drift = Drift(MODEL)
    drift.seen("VllmWorker", [*passes(DECODES, 1.2), *passes(DECODES, 0.0)])
    drift.seen("PrefillWorker", passes(PROMPT, 0.9))
    drift.seen("VllmWorker", passes(PROMPT, 3.0, count=PASSES_MIN - 1))
    found = {(each.component, each.kind): each for each in drift.figures(11.0)}
    assert set(found) == {("VllmWorker", "decode"), ("PrefillWorker", "prefill")}
    decode = found["VllmWorker", "decode"]
    assert (decode.p50, decode.p90, decode.passes) == (pytest.approx(0.2), pytest.approx(0.2), PASSES_MIN)
    assert words(decode) == f"VllmWorker decode +20% (p90 +20%, of {PASSES_MIN} passes)"
    assert found["PrefillWorker", "prefill"].p50 == pytest.approx(-0.1)
    assert drift.figures(11.0 + WINDOW_S) == ()


def test_a_drift_is_news_once_past_fifteen_per_cent_and_again_when_it_is_over():
    drift = Drift(MODEL)

    def news(factor: float, at_s: float) -> tuple[int, int]:
        drift.seen("VllmWorker", passes(DECODES, factor, count=600, at_s=at_s))
        began, over = drift.news(drift.figures(at_s))
        return len(began), len(over)

    assert [news(factor, 10.0 + n) for n, factor in enumerate((1.14, 1.16, 1.3, 1.12, 1.05, 1.12))] == [
        (0, 0),
        (1, 0),
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 0),
    ]
    assert news(0.8, 20.0) == (1, 0)
    assert drift.news(drift.figures(20.0 + 2 * WINDOW_S)) == ([], [])


def test_a_simulated_engine_does_not_drift_from_the_profile_that_it_plays():
    recorder = PassRecorder()
    drift = Drift(ProfileModel.load(SimOptions().profile))
    recorder.listeners.append(lambda passed: drift.seen("VllmWorker", [passed]))

    async def ask(engine: SimEngine, number: int) -> None:
        await asyncio.sleep(0.05 * number)
        request = EngineRequest(f"r{number}", [number % 900] * (200 + 40 * (number % 9)), SamplingParams(40))
        async for _ in engine.generate(request):
            pass

    async def serve() -> float:
        engine = SimEngine(SimOptions(max_num_seqs=32, max_num_batched_tokens=2048), passes=recorder)
        await engine.start()
        await asyncio.gather(*(ask(engine, number) for number in range(100)))
        await engine.close()
        return asyncio.get_running_loop().time()

    found = {each.kind: each for each in drift.figures(run_virtual(serve()))}
    assert {"decode", "mixed"} <= set(found)
    for each in found.values():
        assert abs(each.p50) < 0.01, each

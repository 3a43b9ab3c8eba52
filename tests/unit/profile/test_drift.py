"""Engines that serve, compared with their profile pass by pass."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel, ProfileModel
from dynamo_local.profile.judgement import PASSES_MIN, WINDOW_S, Drift, expected_s, words
from dynamo_local.transport.passes import PassRecorder

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

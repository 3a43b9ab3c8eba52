"""TTFT, ITL and capacity, on the engine of the worked examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.planner.pass_model import (
    MAX_BATCHES,
    Engine,
    Kind,
    Limits,
    PassModel,
    agg_capacity,
    decode_capacity,
    itl_s,
    limits_of,
    prefill_capacity,
    ttft_s,
)
from dynamo_local.planner.values import Capabilities
from tests.fakes.planner.engines_seen import LIMITS, MODELS

PREFILL, DECODE, AGG = (Engine(MODELS[kind], limits_of(LIMITS)) for kind in (Kind.PREFILL, Kind.DECODE, Kind.AGG))


def test_ttft_is_the_time_of_the_queue_in_whole_batches_and_a_rest() -> None:
    assert ttft_s(PREFILL, 30_000) == pytest.approx(4 * (0.010 + 0.16384) + 0.010 + 0.01498)
    assert ttft_s(PREFILL, 0) == pytest.approx(0.010 + 20e-6 * 3517)


def test_a_hit_rate_discounts_up_to_95_percent() -> None:
    assert ttft_s(replace(PREFILL, hit_rate=0.5), 3517) == pytest.approx(ttft_s(PREFILL, 0))
    assert ttft_s(replace(PREFILL, hit_rate=1.0), 0) == pytest.approx(0.010 + 20e-6 * 176)


def test_itl_is_a_pass_with_one_request_more() -> None:
    assert itl_s(DECODE, 37, 80_000) == pytest.approx(0.005 + 0.1e-6 * 82_167 + 38 * 10e-6)
    assert itl_s(replace(DECODE, accept_length=2.0), 37, 80_000) == pytest.approx(itl_s(DECODE, 37, 80_000) / 2)


def test_decode_rides_along_in_an_aggregated_engine() -> None:
    assert ttft_s(AGG, 0, decode_kv=100_000) - ttft_s(AGG, 0) == pytest.approx(0.1e-6 * 100_000)


def test_capacity_is_the_best_batch_that_keeps_the_target() -> None:
    assert prefill_capacity(PREFILL, isl=2000, ttft_target_s=0.5) == (pytest.approx(23.529, abs=1e-3), 4, True)
    assert prefill_capacity(PREFILL, isl=2000, ttft_target_s=0.06) == (pytest.approx(20.0), 1, True)
    assert decode_capacity(DECODE, isl=2000, osl=200, itl_target_s=0.02) == (pytest.approx(17.034, abs=1e-3), 68, True)


def test_a_prompt_longer_than_a_batch_is_one_at_a_time() -> None:
    one = prefill_capacity(PREFILL, isl=20_000, ttft_target_s=1.0)
    assert (one.batch, one.rps) == (1, pytest.approx(1 / (3 * 0.010 + 0.4)))


@pytest.mark.parametrize("osl", [1, 100, 4000])
def test_a_stricter_target_never_gives_more(osl: float) -> None:
    targets = [0.001 * 1.3**n for n in range(30)]
    by_ttft = [prefill_capacity(PREFILL, isl=1234, ttft_target_s=target).rps for target in targets]
    by_itl = [decode_capacity(DECODE, isl=1234, osl=osl, itl_target_s=target).rps for target in targets]
    by_both = [
        agg_capacity(AGG, isl=1234, osl=osl, ttft_target_s=10 * target, itl_target_s=target).rps for target in targets
    ]
    for found in (by_ttft, by_itl, by_both):
        assert found == sorted(found)
        assert found[0] < found[-1]


def test_an_aggregated_engine_prefills_for_as_many_as_it_ends() -> None:
    short = agg_capacity(AGG, isl=200, osl=200, ttft_target_s=1.0, itl_target_s=0.05)
    long = agg_capacity(AGG, isl=4000, osl=200, ttft_target_s=1.0, itl_target_s=0.05)
    assert short.within
    assert short.rps > long.rps


def test_a_batch_always_leaves_room_for_its_prompts() -> None:
    tight = replace(AGG, limits=Limits(max_num_batched_tokens=512))
    one = agg_capacity(tight, isl=4000, osl=100, ttft_target_s=60.0, itl_target_s=10.0)
    assert one.batch + one.batch * 40 <= 512


def test_so_many_batches_are_tried_and_no_more() -> None:
    tried = []
    many = replace(DECODE, limits=Limits(max_num_seqs=100_000, max_kv_tokens=10**9))
    model = many.model

    class Watched(PassModel):
        def pass_s(self, **load: float) -> float:
            tried.append(load["decode_requests"])
            return super().pass_s(**load)

    watched = Watched(model.kind, samples=model.samples, line=model.line)
    decode_capacity(replace(many, model=watched), isl=10, osl=10, itl_target_s=1e9)
    assert len(tried) <= MAX_BATCHES + 1
    assert (tried[0], tried[-1]) == (1, 100_000)


def test_limits_that_no_engine_tells_are_dynamos() -> None:
    assert limits_of(None) == limits_of(Capabilities()) == (8192, 512, 2_000_000)
    assert limits_of(LIMITS) == (8192, 256, 200_000)

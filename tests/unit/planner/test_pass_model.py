"""The model of passes: regression, what it learns and when it answers, and the estimates made from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynamo_local.core.passes import ForwardPass, Requests
from dynamo_local.errors import BadInput
from dynamo_local.planner.pass_model import (
    MAX_BATCHES,
    MIN_PREDICTION_S,
    Engine,
    Kind,
    Learning,
    Limits,
    Linear,
    PassModel,
    Sample,
    agg_capacity,
    bootstrapped,
    decode_capacity,
    decode_passes,
    fitted,
    itl_s,
    kept,
    limits_of,
    prefill_capacity,
    prefill_passes,
    ttft_s,
)
from dynamo_local.planner.values import Capabilities
from tests.fakes.planner.engines_seen import (
    AGG_PASSES,
    DECODE_PASSES,
    LIMITS,
    MODELS,
    PREFILL_PASSES,
    TRAINER,
    agg_pass,
    decode_pass,
    heartbeat,
    prefill_pass,
)


@pytest.mark.parametrize(
    ("kind", "passes"), [(Kind.PREFILL, PREFILL_PASSES), (Kind.DECODE, DECODE_PASSES), (Kind.AGG, AGG_PASSES)]
)
def test_five_passes_make_a_model(kind: Kind, passes: tuple[ForwardPass, ...]) -> None:
    assert not PassModel(kind).observed(passes[:4]).ready
    model = PassModel(kind).observed(passes)
    assert (model.ready, model.source) == (True, "live")
    one = passes[1].scheduled
    took_s = model.pass_s(
        prefill_tokens=one.sum_prefill_tokens,
        decode_requests=one.num_decode_requests,
        decode_kv=one.sum_decode_kv_tokens,
    )
    assert took_s == pytest.approx(passes[1].wall_time_s)


def test_a_load_that_never_varied_says_nothing_of_others() -> None:
    assert not PassModel(Kind.DECODE).observed([decode_pass(n, 8000) for n in range(1, 20)]).ready
    assert not PassModel(Kind.AGG).observed([agg_pass(0, n, 900 * n) for n in range(1, 20)]).ready


def test_prompts_of_one_length_tell_the_most_that_others_take() -> None:
    """A benchmark's: else its prefill role would never be planned."""
    model = PassModel(Kind.PREFILL).observed([prefill_pass(2000 + n % 3) for n in range(20)])
    assert model.pass_s(prefill_tokens=2000) == pytest.approx(0.050, rel=0.001)
    assert model.pass_s(prefill_tokens=8000) == pytest.approx(0.200, rel=0.001)


def test_a_longer_pass_for_less_work_is_not_believed() -> None:
    falling = [replace(prefill_pass(1000 * n), wall_time_s=1.0 / n) for n in range(1, 9)]
    assert not PassModel(Kind.PREFILL).observed(falling).ready


def test_more_requests_with_the_same_kv_do_not_make_a_pass_shorter() -> None:
    passes = [
        replace(decode_pass(r, kv), wall_time_s=0.010 + 1e-7 * kv - 1e-6 * r)
        for r, kv in ((10, 10_000), (60, 20_000), (20, 40_000), (50, 80_000), (5, 90_000))
    ]
    model = PassModel(Kind.DECODE).observed(passes)
    assert model.ready
    assert model.pass_s(decode_requests=1, decode_kv=50_000) == model.pass_s(decode_requests=99, decode_kv=50_000)


def test_what_took_no_time_or_no_number_is_not_learned() -> None:
    odd = [
        heartbeat(),
        replace(prefill_pass(10), wall_time_s=math.nan),
        replace(prefill_pass(10), wall_time_s=math.inf),
    ]
    assert PassModel(Kind.PREFILL).observed(odd).samples == ()


def test_a_decode_worker_s_own_prefills_are_no_decode_passes() -> None:
    mixed = ForwardPass(TRAINER, 0, 0.2, Requests(1, 500, num_decode_requests=3, sum_decode_kv_tokens=900))
    assert PassModel(Kind.DECODE).observed([mixed]).samples == ()
    assert len(PassModel(Kind.AGG).observed([mixed]).samples) == 1


def test_the_features_of_the_seed() -> None:
    seed = Learning(features="seed")
    decode = PassModel(Kind.DECODE, seed).observed(DECODE_PASSES)
    assert {len(sample.x) for sample in decode.samples} == {1}
    agg = PassModel(Kind.AGG, seed).observed(AGG_PASSES)
    (mean,) = agg.samples
    assert mean.x[0] == sum(one.scheduled.sum_prefill_tokens for one in AGG_PASSES) / len(AGG_PASSES)


def test_means_are_of_the_last_64_live_passes() -> None:
    model = PassModel(Kind.PREFILL).observed([prefill_pass(100)] * 100).observed([prefill_pass(900, requests=3)] * 32)
    assert model.isl.mean == 200.0
    assert PassModel(Kind.PREFILL).isl.mean is None


PROFILE = prefill_passes((100, 1000, 4000, 8000), (12, 30, 90, 170)) + prefill_passes((2000,), (50,))


def test_a_profile_is_passes_of_one_prompt_and_of_batches() -> None:
    assert PROFILE[1].scheduled == Requests(num_prefill_requests=1, sum_prefill_tokens=1000)
    assert PROFILE[1].wall_time_s == 0.030
    (one, tiny) = decode_passes((0.5, 0.001), (1000, 4000), (12.5, 5.0), 200_000)
    assert one.scheduled == Requests(num_decode_requests=100, sum_decode_kv_tokens=100_000)
    assert (one.wall_time_s, tiny.scheduled.num_decode_requests) == (0.0125, 1)


def test_rows_that_are_no_measurement_are_left_out_and_crooked_columns_refused() -> None:
    assert prefill_passes((100, math.nan, 0, 300), (1.0, 1.0, 1.0, -1.0)) == prefill_passes((100,), (1.0,))
    with pytest.raises(BadInput, match="different lengths"):
        prefill_passes((100, 200), (1.0,))


def test_the_first_source_that_makes_a_model_is_taken() -> None:
    """A profile, else live passes."""
    empty = PassModel(Kind.PREFILL)
    assert bootstrapped(empty, PROFILE).source == "profile"
    assert bootstrapped(empty, PROFILE[:2]) == empty
    assert bootstrapped(empty, PROFILE[:2]).observed(PREFILL_PASSES).source == "live"


def test_a_trained_model_knows_times_and_not_the_traffic() -> None:
    model = bootstrapped(PassModel(Kind.PREFILL), PROFILE)
    assert model.ready
    assert model.isl.mean is None
    live = model.observed([prefill_pass(3000)])
    assert (live.source, len(live.samples), live.isl.mean) == ("profile", len(PROFILE) + 1, 3000)


def test_a_fit_that_cannot_be_leaves_the_last_that_could() -> None:
    """On an engine whose passes hardly depend on the KV, chance decides whether more of it seems to help. A role whose
    model was good would otherwise never shrink again."""

    def passes(count: int, per_kv_token_s: float) -> list[ForwardPass]:
        loads = [(1 + n % 20, (1 + n % 20) * (200 + 37 * (n % 7))) for n in range(count)]
        return [
            replace(decode_pass(requests, kv), wall_time_s=0.04 + 0.002 * requests + per_kv_token_s * kv)
            for requests, kv in loads
        ]

    assert not PassModel(Kind.DECODE).observed(passes(64, -1e-7)).ready
    model = PassModel(Kind.DECODE).observed(passes(20, 1e-7))
    assert model.ready
    assert model.observed(passes(640, -1e-7)).line == model.line


# --- regression
# The least squares under all models.


def test_a_plane_is_found_again() -> None:
    plane = Linear((0.00001, 0.0000001), 0.005)
    samples = [Sample((r, kv), plane.at((r, kv))) for r, kv in ((1, 900), (7, 4000), (30, 11_000), (64, 200_000))]
    found = fitted(samples)
    assert found is not None
    assert found.at((20, 50_000)) == pytest.approx(plane.at((20, 50_000)))
    assert found.coefficients == pytest.approx(plane.coefficients)


def test_two_features_that_rise_together_share_the_effect() -> None:
    found = fitted([Sample((n, 2000.0 * n), 0.005 + 0.001 * n) for n in range(1, 9)])
    assert found is not None
    assert min(found.coefficients) > 0
    assert found.at((10, 20_000)) == pytest.approx(0.015)


def test_a_feature_that_never_varied_has_no_effect() -> None:
    found = fitted([Sample((4, kv), 0.001 * kv) for kv in (1, 2, 3)])
    assert found is not None
    assert found.coefficients == pytest.approx((0.0, 0.001))
    assert fitted([Sample((4, 8), 0.1)] * 9) is None
    assert fitted([]) is None


def test_no_pass_takes_less_than_a_microsecond() -> None:
    assert Linear((1.0,), -5.0).at((1.0,)) == MIN_PREDICTION_S


def test_the_fullest_bucket_loses_its_oldest() -> None:
    rare = [Sample((x,), 1.0) for x in (0.0, 5000.0, 10_000.0)]
    same = [Sample((2000.0 + n / 1000,), 1.0) for n in range(500)]
    samples: tuple[Sample, ...] = tuple(rare)
    for one in same:
        samples = kept((*samples, one), most=64, buckets=16)
    assert len(samples) == 64
    assert samples[:3] == tuple(rare)
    assert samples[3:] == tuple(same[-61:])


def test_buckets_of_two_features_are_a_square() -> None:
    corners = [Sample((x, y), 1.0) for x in (0.0, 100.0) for y in (0.0, 100.0)]
    many = [Sample((10.0 + n / 100, 10.0), 1.0) for n in range(200)]
    left = kept([*corners, *many], most=16, buckets=16)
    assert set(corners[1:]) <= set(left)
    assert left[-1] == many[-1]


# --- estimates
# TTFT, ITL and capacity, on the engine of the worked examples.

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

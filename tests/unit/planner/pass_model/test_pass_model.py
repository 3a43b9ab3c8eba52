"""Tests what a model learns from passes, and when it answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynamo_local.core.passes import ForwardPass, Requests
from dynamo_local.errors import BadInput
from dynamo_local.planner.pass_model import (
    Kind,
    Learning,
    PassModel,
    bootstrapped,
    decode_passes,
    prefill_passes,
)
from tests.fakes.planner.engines_seen import (
    AGG_PASSES,
    DECODE_PASSES,
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

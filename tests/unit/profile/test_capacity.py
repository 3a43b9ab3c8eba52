"""Tests what planners ask of a profile: Dynamo's worked values, monotone where physics is, marked where it guesses."""

from __future__ import annotations

import pytest

from dynamo_local.profile.interpolation import DecodeInterpolator, PrefillInterpolator, interpolators
from dynamo_local.profile.reading import DEFAULT_PROFILE, shipped_profiles
from tests.fakes.profile_folders import GPUS, decode_itl_ms, write_npz

Both = tuple[PrefillInterpolator, DecodeInterpolator]


@pytest.fixture(scope="module")
def h200() -> Both:
    return interpolators(DEFAULT_PROFILE)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A profile whose true surfaces are known."""
    return interpolators(write_npz(tmp_path_factory.mktemp("linear")))


def test_dynamos_values_are_met_within_two_per_cent(h200: Both) -> None:
    prefill, decode = h200
    assert prefill.interpolate_thpt_per_gpu(3000).value == pytest.approx(49_481, rel=0.02)
    assert decode.find_best_throughput_per_gpu(10, 3150).value == pytest.approx(4_556, rel=0.02)


def test_between_one_request_and_many_throughput_follows_from_latency(h200: Both) -> None:
    """Within 8 ms Dynamo's cubic through throughputs says 3,195, an eighth less than its own ITL allows there."""
    best = h200[1].find_best_throughput_per_gpu(8, 3150)
    assert best.value == pytest.approx(3_195, rel=0.20)
    assert best.value <= best.concurrency / best.itl_ms * 1000


def test_measured_points_come_back(h200: Both) -> None:
    prefill, decode = h200
    assert prefill.interpolate_ttft(6202).value == pytest.approx(123.23749)
    assert decode.interpolate_itl(0.30762 * 945_029 / 2997, 2997).value == pytest.approx(15.479, rel=1e-3)
    assert decode.interpolate_thpt_per_gpu(0.30762 * 945_029 / 2997, 2997).value == pytest.approx(6101.5, rel=1e-3)


def test_a_known_engine_comes_back_between_its_points(linear: Both) -> None:
    prefill, decode = linear
    assert prefill.interpolate_ttft(2500).value == pytest.approx(60)
    assert prefill.interpolate_thpt_per_gpu(2500).value == pytest.approx(2500 / 60 * 1000 / GPUS)
    for concurrency, context in ((5, 1000), (20, 3000), (8, 6000)):
        itl_ms = decode_itl_ms(concurrency * context, concurrency)
        assert decode.interpolate_itl(concurrency, context).value == pytest.approx(itl_ms, rel=0.01)
        found = decode.interpolate_thpt_per_gpu(concurrency, context).value
        assert found == pytest.approx(concurrency / itl_ms * 1000 / GPUS, rel=0.02)


def test_the_best_load_is_where_the_target_is_just_met(linear: Both) -> None:
    """More would be too slow, less would be less."""
    best = linear[1].find_best_throughput_per_gpu(9, 2000)
    assert best.attainable
    assert best.itl_ms == pytest.approx(9)
    assert decode_itl_ms(best.concurrency * 2000, best.concurrency) == pytest.approx(9, rel=0.01)


@pytest.mark.parametrize("profile", shipped_profiles())
def test_a_stricter_target_never_gives_more(profile: str) -> None:
    decode = interpolators(profile)[1]
    for context in (50, 350, 1500, 3150, 9000, 40_000):
        found = [decode.find_best_throughput_per_gpu(0.25 * n, context) for n in range(1, 250)]
        values = [best.value for best in found]
        assert values == sorted(values)
        assert values[0] > 0
        assert not found[0].attainable
        assert found[-1].attainable
        assert all(best.itl_ms <= 0.25 * n for n, best in enumerate(found, 1) if best.attainable)


def test_what_was_not_measured_is_marked(h200: Both) -> None:
    prefill, decode = h200
    assert not prefill.interpolate_ttft(100).extrapolated
    assert not prefill.interpolate_ttft(16_372).extrapolated
    assert prefill.interpolate_ttft(99).extrapolated
    assert prefill.interpolate_thpt_per_gpu(16_373).extrapolated
    assert not decode.interpolate_itl(40, 3150).extrapolated
    assert decode.interpolate_itl(40, 349).extrapolated
    assert decode.interpolate_itl(1, 13_586).extrapolated
    assert decode.interpolate_itl(0.7 * 945_029 / 350, 350).extrapolated
    assert not decode.find_best_throughput_per_gpu(10, 3150).extrapolated


def test_no_capacity_is_promised_that_was_never_measured(h200: Both) -> None:
    """The H200 was measured to 58 % of its cache at context 350; there it had its most running requests already."""
    best = h200[1].find_best_throughput_per_gpu(1000, 350)
    assert best.value <= 19_288
    assert best.concurrency * 350 <= 0.583 * 945_029


def test_beyond_the_longest_prompt_the_curve_goes_on(h200: Both) -> None:
    """Dynamo's stops there: a prompt of 100,000 tokens in 375 ms."""
    prefill = h200[0]
    assert prefill.interpolate_ttft(100_000).value > 5 * prefill.interpolate_ttft(16_372).value
    assert prefill.interpolate_thpt_per_gpu(100_000).value < 50_000


def test_more_requests_than_the_cache_holds_are_as_slow_as_a_full_one(h200: Both) -> None:
    decode = h200[1]
    full = decode.max_kv_tokens / 3000
    assert decode.interpolate_itl(10 * full, 3000).value == pytest.approx(decode.interpolate_itl(full, 3000).value)

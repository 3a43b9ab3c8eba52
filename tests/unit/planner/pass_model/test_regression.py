"""The least squares under all models."""

from __future__ import annotations

import pytest

from dynamo_local.planner.pass_model import MIN_PREDICTION_S, Linear, Sample, fitted, kept


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

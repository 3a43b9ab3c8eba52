"""The mixed trace that a fresh profile is checked by."""

from __future__ import annotations

import pytest

from dynamo_local.measuring.certification import mixed_trace, slower_over
from dynamo_local.profile.document import PathFacts
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.points import Limits
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.options import FleetShape


def path(*rows: tuple[float | None, float | None]) -> list[PathFacts]:
    """Of (gap over HTTP, gap at the engine)."""
    return [
        PathFacts(tokens=100, ttft_ms=20.0, engine_ttft_ms=10.0, itl_ms=itl_ms, engine_itl_ms=engine_ms)
        for itl_ms, engine_ms in rows
    ]


def test_a_host_that_feeds_its_engines_late_gets_fewer_requests():
    """vLLM's CPU build on two busy cores: passes of 9 ms, a token each 25 ms over HTTP; at half of what the passes
    could do requests were lost, and the trace said nothing."""
    slower = slower_over(path((22.4, 8.8), (24.5, 9.0), (27.7, 10.3)))
    assert slower == pytest.approx(2.69, abs=0.01)
    of = (ProfileModel.load(DEFAULT_PROFILE), Limits(9600, 4096, 2), FleetShape(0, 1), 600.0, 0)
    assert len(mixed_trace(*of, slower)) == pytest.approx(len(mixed_trace(*of)) / slower, rel=0.1)


def test_a_quiet_host_is_half_busy_as_the_profile_says():
    """HTTP adds to the first token, hardly to the gaps; and what was not measured says nothing."""
    assert slower_over(path((9.9, 10.0), (10.1, 10.0), (9.8, 10.0))) == 1.0
    assert slower_over(path((None, 10.0))) == 1.0
    assert slower_over([]) == 1.0

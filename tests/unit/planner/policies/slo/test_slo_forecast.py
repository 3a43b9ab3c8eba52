"""The demand that the forecast draws from recent requests."""

from __future__ import annotations

import pytest

from dynamo_local.planner.policies.slo.forecast import demands
from dynamo_local.planner.values import Ended

DAY_S = 86_400.0


def test_a_night_of_silence_makes_no_burst_of_the_requests_around_it() -> None:
    evening, morning = [n / 2 for n in range(200)], [DAY_S / 3 + n / 2 for n in range(201)]
    ended = [Ended(at_s, 1000, 10, 0.1, 0.01) for at_s in (*evening, *morning)]
    (demand, *_) = demands([*evening, *morning], ended, morning[-1])
    most, usual = max(demand.gaps), sorted(demand.gaps)[len(demand.gaps) // 2]
    assert most < 40
    assert usual == pytest.approx(1.0, rel=0.1)

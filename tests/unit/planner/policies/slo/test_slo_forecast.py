"""The demand that the forecast draws from recent requests."""

from __future__ import annotations

import pytest

from dynamo_local.planner.policies.slo.forecast import demands
from dynamo_local.planner.policies.slo.state import SloState, with_requests
from dynamo_local.planner.values import Ended, Requests

DAY_S = 86_400.0


def test_a_night_of_silence_makes_no_burst_of_the_requests_around_it() -> None:
    evening, morning = [n / 2 for n in range(200)], [DAY_S / 3 + n / 2 for n in range(201)]
    ended = [Ended(at_s, 1000, 10, 0.1, 0.01) for at_s in (*evening, *morning)]
    (demand, *_) = demands([*evening, *morning], ended, morning[-1])
    most, usual = max(demand.gaps), sorted(demand.gaps)[len(demand.gaps) // 2]
    assert most < 40
    assert usual == pytest.approx(1.0, rel=0.1)


def test_the_requests_of_a_late_answer_count_once() -> None:
    """Meanwhile as many, evenly spread, stood for them."""

    def seen(since_s: float, at_s: float) -> Requests:
        began = tuple(since_s + n / 4 for n in range(1, int(4 * (at_s - since_s)) + 1))
        return Requests(since_s, at_s, began, tuple(Ended(each, 1000, 10, 0.1, 0.01) for each in began))

    state = SloState(0.0, 5.0)
    for interval in (seen(0, 5), seen(5, 10), seen(5, 15)):
        state = with_requests(state, interval, 1)
    assert state.began == seen(0, 15).began
    assert state.ended == seen(0, 15).ended

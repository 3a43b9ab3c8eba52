"""The demand that the forecast draws from recent requests."""

from __future__ import annotations

from random import Random

import pytest

from dynamo_local.planner.policies.slo.forecast import Outlook, demands
from dynamo_local.planner.policies.slo.state import SloState, with_requests
from dynamo_local.planner.values import Ended, Requests

DAY_S = 86_400.0


def test_a_night_of_silence_makes_no_burst_of_the_requests_around_it() -> None:
    evening, morning = [n / 2 for n in range(200)], [DAY_S / 3 + n / 2 for n in range(201)]
    ended = [Ended(at_s, 1000, 10, 0.1, 0.01) for at_s in (*evening, *morning)]
    (demand, *_) = demands([*evening, *morning], ended, morning[-1], morning[-1])
    most, usual = max(demand.gaps), sorted(demand.gaps)[len(demand.gaps) // 2]
    assert most < 40
    assert usual == pytest.approx(1.0, rel=0.1)


def lasting(began_s: float, tokens: int) -> Ended:
    return Ended(began_s + 0.01 * tokens, 1000, tokens, 0.01, 0.01)


@pytest.mark.parametrize("known_s", [3600.0, 100.0], ids=["for an hour", "just begun"])
def test_long_answers_count_as_often_as_they_come(known_s: float) -> None:
    """Half of the answers take 70 s, half 10 s: one of the former that began in the last minute has not ended yet."""
    began = [now_s / 4 for now_s in range(int(4 * (3600 - known_s)), 4 * 3600)]
    ended = [lasting(at_s, 7000 if number % 2 else 1000) for number, at_s in enumerate(began)]
    seen = sorted((each for each in ended if each.at_s <= 3600.0), key=lambda each: each.at_s)
    for demand in demands(began, seen, 3600.0, known_s):
        assert sum(demand.osl) / len(demand.osl) == pytest.approx(4000, rel=0.03)


def test_chance_in_the_arrivals_is_averaged_where_answers_take_long() -> None:
    rng, outlook, rates = Random(7), Outlook(7), list[float]()
    for _ in range(300):
        rates.insert(0, sum(rng.random() < 0.02 for _ in range(1000)) / 5)  # 4 a second, in the mean
        outlook = outlook.after(rates)
    short, long = outlook.scenarios(answer_s=5.0), outlook.scenarios(answer_s=120.0)
    assert [each.lasting for each in short] == pytest.approx([each.rate for each in short])
    assert [each.rate for each in long] == [each.rate for each in short]
    assert long[-1].lasting - long[0].lasting < 0.85 * (long[-1].rate - long[0].rate)


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

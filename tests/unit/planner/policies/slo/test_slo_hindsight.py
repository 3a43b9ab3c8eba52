"""The recorded past says how long each worker is held, what it may cost, and what a fixed fleet would cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.slo.hindsight import (
    BEYOND,
    FACTORS,
    FIRST_HOLD,
    HOLDS_S,
    REQUESTS_MAX,
    SETTLES_S,
    STALE_S,
    STRETCH_MAX_S,
    TURN_STRETCHES,
    TURNED_EVERY_S,
    Bin,
    Hindsight,
    Ranks,
    Record,
    Stretch,
    fixed_fleet,
    last_rate,
    peak_rate,
    settled,
    turn,
)
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.policies.slo.reasons import notes
from dynamo_local.planner.policies.slo.state import SloState
from dynamo_local.planner.queueing import Misses
from dynamo_local.planner.values import Ended, FixedFleet, Requests
from tests.fakes.planner.observations import worker_pools
from tests.fakes.planner.options import slo_options

BIN_S = 5.0
LEAD_BINS = 7
NEVER, ALWAYS = 0, len(HOLDS_S) - 1
PRICE = 0.5
"""Requests that a GPU must save per interval."""


def bursts(ranks: Ranks, lull_bins: int, saved: float, times: int = 12) -> Ranks:
    """The second worker saves `saved` requests in each interval of a burst of two minutes, and none in the lull. The
    first always does."""
    for _ in range(times):
        for _ in range(24):
            ranks = ranks.after(Bin(2, np.array([9.0, saved]), 0.0), LEAD_BINS, BIN_S)
        for _ in range(lull_bins):
            ranks = ranks.after(Bin(1, np.array([9.0, 0.0]), 0.0), LEAD_BINS, BIN_S)
    return ranks


def hold_s(ranks: Ranks, rank: int, price: float = PRICE) -> float:
    return HOLDS_S[ranks.leaders(price)[rank - 1]]


def test_a_worker_is_held_over_short_lulls_and_let_go_in_long_ones() -> None:
    short, long = bursts(Ranks.of(2), 18, 6.0), bursts(Ranks.of(2), 600, 6.0, times=4)
    assert hold_s(short, 2) >= 18 * BIN_S
    assert 0.0 <= hold_s(long, 2) <= 60.0


def test_a_worker_that_always_saves_requests_always_stays() -> None:
    ranks = bursts(Ranks.of(2), 18, 6.0)
    assert ranks.held_now(ranks.leaders(PRICE), 1e9) >= 1, "however long ago the rule wanted it"
    assert hold_s(bursts(Ranks.of(2), 18, 60.0), 2) == pytest.approx(math.inf) or hold_s(ranks, 2) >= 90.0


def test_a_worker_that_saves_nothing_is_never_worth_it() -> None:
    assert bursts(Ranks.of(2), 18, 0.0).leaders(PRICE)[1] == NEVER


def test_without_a_past_nobody_is_held_for_longer_than_at_first() -> None:
    assert set(Ranks.of(4).leaders(PRICE)) == {FIRST_HOLD}
    ranks = Ranks.of(4).wants(3, 100.0)
    assert ranks.held_now(ranks.leaders(PRICE), 100.0 + HOLDS_S[FIRST_HOLD]) == 3
    assert ranks.held_now(ranks.leaders(PRICE), 101.0 + HOLDS_S[FIRST_HOLD]) == 0


def test_a_load_that_was_never_judged_gets_the_workers_that_the_rule_wants() -> None:
    idle = bursts(Ranks.of(2), 18, 0.0)
    past = Hindsight(Record(0.0), (idle, idle), 10_000.0, stretches=(stretch(600, 0, 1.0, [0], [0]),))
    past = past.decided((2, 2), (1, 1), 2, 100.0)
    assert past.held((2, 2), PRICE, (1, 1), 1.0, 100.0) == (1, 1)
    assert past.held((2, 2), PRICE, (1, 1), 1.2, 100.0) == (2, 2)


def test_one_busy_interval_is_no_new_load() -> None:
    """Else a worker starts in one interval, and leaves in the next one before it served (seen: 128 scale actions in an
    hour of Azure's trace)."""
    judged = peak_rate([5] * 40, BIN_S)
    assert last_rate((1.2, *[1.0] * 9)) < BEYOND * judged < last_rate((1.2,) * 6)
    assert BEYOND * judged < last_rate((1.2,))


def test_a_past_that_is_stale_gets_the_workers_that_the_rule_wants() -> None:
    """Requests are only counted now, so that no stretch is judged."""
    idle = bursts(Ranks.of(2), 18, 0.0)
    past = Hindsight(Record(0.0), (idle, idle), 10_000.0).decided((2, 2), (1, 1), 2, 100.0)
    assert past.held((2, 2), PRICE, (1, 1), 0.0, 100.0) == (1, 1)
    assert past.held((2, 2), PRICE, (1, 1), 0.0, STALE_S + 1) == (2, 2)


def test_a_past_that_is_stale_is_not_told_and_sets_no_price() -> None:
    idle = bursts(Ranks.of(2), 18, 0.0)
    fixed = (FixedFleet(1.0, 0.99, 2.0, (1, 1), 0.99, 2.0),)
    state = SloState(100.0, 105.0, past=Hindsight(Record(0.0), (idle, idle), 10_000.0), fixed=fixed, price_factor=0.25)
    stale = replace(state, began_s=STALE_S + 1)
    policy, pools = policy_of(slo_options(ttft_ms=200, itl_ms=10)), worker_pools(1, 1)
    assert isinstance(policy, SloPolicy)
    assert [policy.status(each).fixed_fleet for each in (state, stale)] == [fixed[0], None]
    assert policy.price(stale, pools) == pytest.approx(4 * policy.price(state, pools))
    bounds = policy.bounds(pools)
    assert (len(notes(state, bounds, 1.0)), notes(stale, bounds, 1.0)) == (3, ())


def test_a_gap_in_what_was_observed_is_not_judged_as_silence() -> None:
    ended = tuple(Ended(at_s, 1000, 10, 0.1, 0.01) for at_s in np.arange(1210.0, 1320.0, 0.25))
    record = Record(0.0).known(Requests(595.0, 600.0), BIN_S)
    record = record.known(Requests(1200.0, 1320.0), BIN_S).after(ended, 1.0, 1.0).asking(1320.0, 10.0, BIN_S)
    assert record.asked is not None
    assert record.asked_from_s == 1200.0
    assert record.known(Requests(1310.0, 1325.0), BIN_S).judged_until_s == record.judged_until_s, (
        "a late answer is none"
    )


def test_a_dearer_gpu_is_held_for_no_longer() -> None:
    ranks = bursts(Ranks.of(2), 36, 6.0)
    holds = [hold_s(ranks, 2, price) for price in (0.1, 0.5, 2.0, 8.0, 50.0)]
    assert holds == sorted(holds, reverse=True)
    assert holds[-1] == -math.inf


def test_a_worker_that_was_away_saves_nothing_during_its_lead() -> None:
    ranks = Ranks.of(1)
    for _ in range(LEAD_BINS):
        ranks = ranks.after(Bin(1, np.array([5.0]), 0.0), LEAD_BINS, BIN_S)
    assert ranks.saved[0, FIRST_HOLD] == 0.0
    assert ranks.saved[0, ALWAYS] == pytest.approx(5.0 * LEAD_BINS, rel=0.01)
    assert ranks.held[0, FIRST_HOLD] == pytest.approx(LEAD_BINS, rel=0.01), "it is paid from its order on"


# --- the price


def past_of(ranks: Ranks, requests: float = 20_000.0) -> Hindsight:
    none = Ranks.of(2)
    return Hindsight(Record(0.0), (ranks, none), requests)


def test_the_price_is_the_dearest_at_which_the_past_keeps_the_target() -> None:
    past = past_of(bursts(Ranks.of(2), 36, 6.0))
    strict, lax = (past.factor((1, 1), target, 8.0) for target in (0.9995, 0.9))
    assert FACTORS[-1] <= strict < lax <= FACTORS[0]
    for found, target in ((strict, 0.9995), (lax, 0.9)):
        missed = past.roles[0].avoidable(past.roles[0].leaders(8.0 * found))
        assert missed <= (1 - target) * past.requests or found == FACTORS[-1]


def test_before_much_is_judged_the_price_is_that_of_a_mean_gpu() -> None:
    assert past_of(Ranks.of(2), 10.0).factor((1, 1), 0.99, PRICE) == 1.0


def test_the_price_goes_to_the_wanted_one_step_by_step_and_not_beyond() -> None:
    price, steps = 1.0, [1.0]
    for _ in range(30):
        price = settled(price, 0.1, SETTLES_S / 10)
        steps.append(price)
    assert steps == sorted(steps, reverse=True)
    assert steps[1] > 0.75
    assert steps[10] == pytest.approx(0.1 * 10 ** math.exp(-1))
    assert 0.1 < steps[-1] < 0.12
    assert settled(0.1, 1.0, SETTLES_S) > 0.1
    assert settled(0.1, 1.0, 0.0) == pytest.approx(0.1)


def test_misses_of_easy_intervals_are_hopeless() -> None:
    past = Hindsight(Record(0.0), (Ranks.of(1), Ranks.of(1)), 10_000.0, easy=9_800.0, easy_missed=490.0)
    assert past.hopeless == pytest.approx(0.049, abs=0.001)


# --- the record


def ended(began_s: float, lasted_s: float = 2.0) -> Ended:
    return Ended(began_s + lasted_s, 1000, 11, ttft_s=lasted_s - 1.0, itl_s=0.1)


def filled(until_s: float, every_s: float = 0.5) -> Record:
    return Record(0.0).after([ended(n * every_s) for n in range(int(until_s / every_s))], 5.0, 1.0)


def test_a_stretch_is_asked_for_when_its_answers_have_ended() -> None:
    assert filled(60.0).asking(61.0, 10.0, BIN_S).asked is None, "answers of ten seconds may still come"
    record = filled(80.0).asking(80.0, 10.0, BIN_S)
    assert record.asked is not None
    assert (record.asked.bins, record.judged_until_s) == (14, 70.0)
    assert record.asking(85.0, 10.0, BIN_S).asked is None, "it is asked once"


def test_silence_is_judged_as_well() -> None:
    record = Record(0.0).asking(100.0, 10.0, BIN_S)
    assert record.asked is not None
    assert (record.asked.times, record.asked.bins) == ((), 18)


def test_requests_before_a_stretch_fill_its_workers_first() -> None:
    record = filled(400.0).asking(400.0, 30.0, BIN_S)
    past = record.asked
    assert past is not None
    assert past.bins * BIN_S <= STRETCH_MAX_S
    assert past.judged_from_s >= 29.0
    assert past.bin(past.times[0]) < 0


def test_long_answers_fill_the_workers_for_as_long_as_they_take() -> None:
    past = filled(1000.0).asking(1000.0, 400.0, BIN_S).asked
    assert past is not None
    assert past.judged_from_s >= 399.0


def test_a_high_rate_is_judged_in_part() -> None:
    record = filled(100.0, every_s=0.005).asking(100.0, 10.0, BIN_S)
    assert record.asked is not None
    assert len(record.asked.times) <= REQUESTS_MAX
    assert record.asked.bins >= 2
    assert record.asked.judged_from_s >= 10.0, "half of them fill the workers"
    assert record.due_s > 150.0


def test_an_answer_without_latencies_is_left_out() -> None:
    assert not len(Record(0.0).after([Ended(9.0, 100, 10)], 1.0, 1.0).requests)


# --- the best fixed fleet


def stretch(requests: int, missed: int, gpu_s: float, of_prefill: list[int], of_decode: list[int]) -> Stretch:
    fixed = np.array(of_prefill, dtype=float), np.array(of_decode, dtype=float)
    return Stretch(100.0, 3600.0, requests, missed, gpu_s, 1.0, fixed)


def test_the_cheapest_fixed_fleet_keeps_as_large_a_share() -> None:
    one = stretch(1000, 20, 5 * 3600.0, [1000, 100, 10, 0], [1000, 5, 0, 0])
    found = fixed_fleet([one], (1, 2), 12)
    assert found is not None
    assert (found.fleet, found.fixed_gpu_hours, found.gpu_hours) == ((2, 1), 4.0, 5.0)
    assert found.fixed_share >= found.share == pytest.approx(0.98)


def test_within_the_budget_the_best_is_taken_where_none_keeps_as_much() -> None:
    found = fixed_fleet([stretch(1000, 0, 1.0, [1000, 100, 10, 0], [1000, 0, 0, 0])], (1, 1), 3)
    assert found is not None
    assert (found.fleet, found.fixed_share) == ((2, 1), pytest.approx(0.99))
    assert fixed_fleet([stretch(299, 0, 1.0, [299, 0], [299, 0])], (1, 1), 3) is None, "too few were judged"


def test_a_fixed_fleet_has_a_worker_of_each_role() -> None:
    found = fixed_fleet([stretch(1000, 1000, 1.0, [1000, 1000], [1000, 1000])], (1, 1), 3)
    assert found is not None
    assert found.fleet == (1, 1)


def turned(aggregated: list[int]) -> Stretch:
    """Apart, 2P1D keeps 99 % of the requests. Aggregated workers miss so many."""
    one = stretch(1000, 0, 0.0, [1000, 100, 10, 0], [1000, 0, 0, 0])
    return replace(one, turned=(np.zeros(len(aggregated)), np.array(aggregated, dtype=float)))


def test_the_shape_that_keeps_the_target_with_fewer_gpus_would_pay() -> None:
    cheaper = turn([turned([1000, 200, 5, 0])] * TURN_STRETCHES, (1, 1), 8, 0.99)
    assert cheaper is not None
    assert (cheaper.fleet, cheaper.gpus, cheaper.turned_fleet, cheaper.turned_gpus) == ((2, 1), 3, (0, 2), 2)
    assert cheaper.pays
    dearer = turn([turned([1000, 900, 500, 10])] * TURN_STRETCHES, (1, 1), 8, 0.99)
    assert dearer is not None
    assert not dearer.pays, "three GPUs either way"
    assert turn([turned([1000, 200, 5, 0])], (1, 1), 8, 0.99) is None, "a single stretch may be chance"


def test_the_other_shape_is_judged_now_and_then() -> None:
    first = filled(80.0).asking(80.0, 10.0, BIN_S)
    assert first.asked is not None
    assert first.asked.turned
    soon = first.asking(200.0, 10.0, BIN_S)
    late = first.asking(80.0 + TURNED_EVERY_S, 10.0, BIN_S)
    assert [each.asked and each.asked.turned for each in (soon, late)] == [False, True]


def test_a_judged_stretch_counts_what_really_served() -> None:
    past = Hindsight.of(0.0, 2)
    record = filled(80.0).decided(0.0, (2, 1), (1, 1), 3).asking(80.0, 10.0, BIN_S)
    assert record.asked is not None
    bins = record.asked.bins
    misses = Misses((10,) * bins, ((10,) * bins, (1,) * bins, (0,) * bins), ((10,) * bins, (0,) * bins, (0,) * bins))
    judged = Hindsight(record, past.roles).judged(misses, (LEAD_BINS, LEAD_BINS), BIN_S)
    (only,) = judged.stretches
    assert (only.requests, only.gpu_s) == (10 * bins, 3 * bins * BIN_S), "GPUs of leaving workers count"
    assert judged.requests == pytest.approx(10 * bins, rel=0.05)
    assert judged.easy == 0.0, "a second prefill worker would have saved requests"

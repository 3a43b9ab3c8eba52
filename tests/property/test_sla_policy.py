"""Tests what holds of every decision of the SLA planner, whatever is expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.policies.sla_sizing import Facts, Need, Side, SlaRule, judge, nearest
from tests.fakes.planner.observations import DECODE, PREFILL
from tests.fakes.planner.sla_worlds import decided, observation, policy, targets_of, traffic

requests = st.floats(0, 200_000, allow_nan=False)
lengths = st.floats(1, 100_000, allow_nan=False)
unknown = st.one_of(st.just(Missing("not had")), st.floats(), st.floats(0, 5000))
pools = st.tuples(st.integers(0, 20), st.integers(0, 20))
gpus = st.integers(1, 4)


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, Any]:
    """Options whose floors fit the budget, with the GPUs of both engines."""
    of_prefill, of_decode, floor = draw(gpus), draw(gpus), draw(st.integers(1, 3))
    return {
        "min_endpoint": floor,
        "max_gpu_budget": floor * (of_prefill + of_decode) + draw(st.integers(0, 60)),
        "max_throughput_scaling_replicas": draw(st.integers(1, 30)),
        "itl_ms": draw(st.floats(1, 100)),
        "ttft_ms": draw(st.floats(1, 1000)),
        "gpus": (of_prefill, of_decode),
    }


def given_to(options: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """The policy, and the GPUs of its pools."""
    of_prefill, of_decode = options["gpus"]
    rest = {name: value for name, value in options.items() if name != "gpus"}
    return policy(**rest), {"prefill_gpus": of_prefill, "decode_gpus": of_decode}


@given(requests, lengths, lengths, unknown, unknown, unknown, pools, bounds())
def test_never_above_the_budget_and_never_below_the_floors(
    num_req: float, isl: float, osl: float, ttft_ms: Any, itl_ms: Any, lasted_s: Any, there: Any, options: Any
) -> None:
    """Whatever was measured, or was not."""
    one, sizes = given_to(options)
    seen = traffic(num_req, isl=isl, osl=osl, ttft_ms=ttft_ms, itl_ms=itl_ms, request_duration_s=lasted_s)
    decision = decided(one, observation(seen, there, **sizes))
    prefill, decode = targets_of(decision)
    assert decision.steps == {PREFILL: prefill - there[0], DECODE: decode - there[1]}
    if {reason.rule for reason in decision.reasons} == {SlaRule.NO_TRAFFIC_DATA}:
        assert decision.acts == ()
        return
    assert prefill * sizes["prefill_gpus"] + decode * sizes["decode_gpus"] <= options["max_gpu_budget"]
    assert min(prefill, decode) >= options["min_endpoint"]


@given(pools, st.sampled_from([Missing("not had"), None, traffic(Missing("not had")), traffic(math.nan)]))
def test_what_is_not_known_changes_nothing(there: tuple[int, int], seen: Any) -> None:
    decision = decided(policy(), observation(seen, there))
    assert targets_of(decision) == there
    assert decision.acts == ()


@given(requests, requests, lengths, lengths, st.floats(1, 100))
def test_more_requests_never_need_fewer_workers(one: float, two: float, isl: float, osl: float, itl_ms: float) -> None:
    free = policy(itl_ms=itl_ms, max_gpu_budget=10**9, max_throughput_scaling_replicas=10**9)
    found = [targets_of(decided(free, observation(traffic(n, isl=isl, osl=osl)))) for n in sorted((one, two))]
    assert found[0][0] <= found[1][0]
    assert found[0][1] <= found[1][1]


@given(requests, lengths, lengths, st.floats(1, 100), st.floats(1, 100))
def test_a_stricter_itl_never_needs_fewer_workers(num_req: float, isl: float, osl: float, a: float, b: float) -> None:
    seen = observation(traffic(num_req, isl=isl, osl=osl))
    found = [
        targets_of(decided(policy(itl_ms=itl_ms, max_gpu_budget=10**9, max_throughput_scaling_replicas=10**9), seen))
        for itl_ms in sorted((a, b), reverse=True)
    ]
    assert found[0][1] <= found[1][1]
    assert found[0][0] == found[1][0]


@given(requests, lengths, lengths, bounds())
def test_a_constant_load_settles(num_req: float, isl: float, osl: float, options: dict[str, Any]) -> None:
    one, sizes = given_to(options)
    there, seen = (1, 1), traffic(num_req, isl=isl, osl=osl)
    for _ in range(100):
        before, there = there, targets_of(decided(one, observation(seen, there, **sizes)))
        if there == before:
            return
    pytest.fail(f"{before}, then {there}")


numbers = st.integers(0, 40)


@given(st.tuples(numbers, numbers), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(gpus, gpus), numbers)
def test_what_fits_is_within_what_was_wanted(
    wanted: tuple[int, int], floors: tuple[int, int], sizes: tuple[int, int], budget: int
) -> None:
    wanted = max(wanted[0], floors[0]), max(wanted[1], floors[1])
    found = fitting(wanted, floors, sizes, budget)
    at_least = sum(floor * size for floor, size in zip(floors, sizes, strict=True))
    if found is None:
        assert at_least > budget
        return
    room = budget - sum(number * size for number, size in zip(found, sizes, strict=True))
    assert room >= 0
    for number, want, floor, size in zip(found, wanted, floors, sizes, strict=True):
        assert floor <= number <= want
        assert number == want or room < size


@st.composite
def facts(draw: st.DrawFn) -> Facts:

    def side(name: str) -> Side:
        need = Need(draw(st.floats(1, 10_000)), draw(st.floats(10, 50_000)), 1.0, 1.0, True, False)
        return Side(name, draw(st.integers(0, 12)), draw(gpus), need, draw(st.one_of(st.none(), st.integers(0, 12))))

    return Facts(
        (side(PREFILL), side(DECODE)),
        draw(st.floats(0, 20_000)),
        180.0,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 10)),
    )


@given(facts(), st.sampled_from([0, 1]))
def test_each_counterfactual_is_true_and_just_so(seen: Facts, index: int) -> None:
    """Put in, the step is the one that was said; one short of it, it is what was decided."""
    other = nearest(seen, index)
    if other is None:
        return

    def step(value: float) -> int:
        return judge(seen._replace(**{other.name: value}))[index].target - seen.sides[index].capacity

    now = judge(seen)[index].target - seen.sides[index].capacity
    assert step(other.needed) == other.step != now
    if other.name == "next_num_req":
        short = math.nextafter(other.needed, other.value)
    else:
        short = other.needed + (1 if other.needed < other.value else -1)
    assert step(short) == now


def test_where_one_number_decides_it_is_said() -> None:
    assert all(reason.otherwise is not None for reason in decided(policy(), observation(traffic())).reasons)

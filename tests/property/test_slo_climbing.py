"""Whatever is expected: `slo` keeps budget and floors, and takes no more of a scaling option than there is."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.planner.policies.slo.scaling_options import (
    COLD_START,
    FLIP,
    WAKE,
    Ahead,
    Bounds,
    Moment,
    Quick,
    ScalingOption,
    climbed,
)
from dynamo_local.planner.queueing import Shares

BUDGET = 8


@st.composite
def shares(draw: st.DrawFn) -> tuple[float, ...]:
    """More workers never serve fewer."""
    steps = draw(st.lists(st.floats(0, 1), min_size=BUDGET, max_size=BUDGET))
    most = max(1.0, sum(steps))
    return (0.0, *(each / most for each in accumulate(steps)))


moments = st.lists(st.tuples(st.floats(0, 50), st.builds(Shares, shares(), shares())), min_size=1, max_size=3).map(
    lambda found: Moment(tuple(found))
)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Ahead, ...]:
    """Cold starts, and what else there may be."""
    names = [COLD_START, *draw(st.sampled_from([(), (WAKE,), (FLIP,), (WAKE, FLIP)]))]
    return tuple(
        Ahead(ScalingOption(name, 1.0), draw(moments), tuple(draw(st.lists(moments, min_size=1, max_size=3))))
        for name in names
    )


small = st.integers(0, 3)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ladders(),
    st.tuples(small, small),
    st.tuples(small, small),
    st.floats(0, 5),
)
def test_budget_floors_and_scaling_options_hold(
    now: tuple[int, int], ladder: tuple[Ahead, ...], asleep: tuple[int, int], able: tuple[int, int], price: float
) -> None:
    bounds = Bounds((1, 1), (1, 1), BUDGET)
    able = (min(able[0], now[0] - 1), min(able[1], now[1] - 1))
    fleet, flips = climbed(now, ladder, Quick(now, asleep, able), price, bounds)
    assert sum(fleet) <= BUDGET
    assert min(fleet) >= 1
    assert -able[1] <= flips <= able[0]
    if all(each.scaling_option.name != FLIP for each in ladder):
        assert flips == 0

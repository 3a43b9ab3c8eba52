"""How proposals of several plugins become one target for each role."""

from __future__ import annotations

import pytest

from dynamo_local.planner.stages import Clamp, merge
from dynamo_local.planner.values import Accept, ComponentTarget, Override, OverrideType, Proposal, Reject

SET, AT_LEAST, AT_MOST = OverrideType
READY = {"prefill": 2, "decode": 2}


def says(name: str, priority: int, *targets: tuple[str, int, OverrideType], final: bool = False) -> Proposal:
    """`says("a", 5, ("decode", 3, SET))`."""
    return Proposal(name, priority, Override(tuple(ComponentTarget(*target) for target in targets), final=final))


def numbers(*proposals: Proposal, bounds_only: bool = False, so_far: dict[str, int] | None = None) -> dict[str, int]:
    """The targets, by role."""
    before = tuple(ComponentTarget(role, count) for role, count in (so_far or {}).items())
    merged = merge(proposals, READY, before, bounds_only=bounds_only)
    assert all(target.type is SET for target in merged.targets)
    return {target.sub_component_type: target.replicas for target in merged.targets}


def test_the_smallest_number_sets() -> None:
    assert numbers(says("b", 10, ("decode", 8, SET)), says("a", 5, ("decode", 3, SET))) == {"decode": 3}


def test_floors_win_over_ceilings_and_ceilings_over_sets() -> None:
    ceiling = says("ceiling", 9, ("decode", 4, AT_MOST), ("decode", 5, AT_MOST))
    assert numbers(says("a", 1, ("decode", 8, SET)), ceiling) == {"decode": 4}
    assert numbers(says("a", 1, ("decode", 8, SET)), ceiling, says("floor", 99, ("decode", 6, AT_LEAST))) == {
        "decode": 6
    }


def test_a_bound_alone_moves_what_is_there_only_where_it_must() -> None:
    """Else "at most 8" would become "2 and no more", and take back a worker that is on its way."""
    assert numbers(says("a", 1, ("decode", 8, AT_MOST), ("prefill", 2, AT_LEAST))) == {}
    assert numbers(says("a", 1, ("decode", 1, AT_MOST), ("prefill", 3, AT_LEAST))) == {"decode": 1, "prefill": 3}


def test_a_final_one_is_heard_alone() -> None:
    loud = says("loud", 7, ("prefill", 5, SET), final=True)
    louder = says("louder", 6, ("prefill", 6, SET), final=True)
    others = says("a", 1, ("prefill", 9, SET), ("decode", 9, SET), ("prefill", 9, AT_LEAST))
    assert numbers(others, loud, louder) == {"prefill": 6}
    merged = merge((others, loud, louder), READY)
    assert merged.final is louder


def test_a_final_ceiling_is_a_ceiling() -> None:
    """Dynamo 1.6.1 takes a final AT_MOST 10 for a SET 10: two workers became ten."""
    assert numbers(says("a", 1, ("decode", 10, AT_MOST), final=True)) == {}
    assert numbers(says("a", 1, ("decode", 1, AT_MOST), final=True)) == {"decode": 1}


def test_a_reject_ends_it_whatever_the_others_say() -> None:
    reject = Proposal("no", 99, Reject("a freeze"))
    merged = merge((says("a", 0, ("decode", 9, SET), final=True), reject), READY, (ComponentTarget("decode", 5),))
    assert merged.rejected is reject
    assert merged.targets == ()


def test_an_accept_says_nothing() -> None:
    assert numbers(Proposal("a", 0, Accept())) == {}
    assert numbers(Proposal("a", 0, Accept()), so_far={"decode": 5}) == {"decode": 5}


def test_a_later_stage_goes_on_from_the_one_before() -> None:
    assert numbers(says("a", 0, ("prefill", 5, SET)), so_far={"decode": 7, "prefill": 7}) == {"prefill": 5, "decode": 7}
    assert numbers(says("a", 0, ("decode", 6, AT_MOST)), so_far={"decode": 7}) == {"decode": 6}


def test_constrain_takes_bounds_only() -> None:
    """A SET is dropped and named, `final` makes nobody else silent: there is no way around a budget."""
    loud = says("loud", 0, ("decode", 99, SET), ("decode", 3, AT_LEAST), final=True)
    budget = says("budget", 9, ("decode", 4, AT_MOST))
    assert numbers(loud, budget, bounds_only=True, so_far={"decode": 7}) == {"decode": 4}
    assert merge((loud, budget), READY, bounds_only=True).dropped == (("loud", "decode"),)


def test_a_role_that_the_graph_does_not_have_is_dropped() -> None:
    merged = merge((says("a", 0, ("encode", 3, SET), ("decode", 3, SET)),), {"decode": 1})
    assert merged.targets == (ComponentTarget("decode", 3),)
    assert merged.dropped == (("a", "encode"),)


@pytest.mark.parametrize(
    ("bound", "clamp"),
    [
        (("decode", 4, AT_MOST), Clamp("decode", "b", 8, 4)),
        (("decode", 9, AT_LEAST), Clamp("decode", "b", 8, 9)),
        (("decode", 8, AT_MOST), None),
    ],
)
def test_a_bound_that_changed_something_is_named(bound: tuple[str, int, OverrideType], clamp: Clamp | None) -> None:
    merged = merge((says("a", 0, ("decode", 8, SET)), says("b", 1, bound)), READY)
    assert merged.clamps == (() if clamp is None else (clamp,))

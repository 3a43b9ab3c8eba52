"""From the engines that are needed to the workers that there will be: floors, budget, the longest step, and which of
them decided."""

from __future__ import annotations

import enum
from typing import NamedTuple

from dynamo_local.core.floors import floor_workers
from dynamo_local.planner.policies.sla.sizing import Need
from dynamo_local.planner.policies.throughput_load.budget import fitting


class SlaRule(enum.StrEnum):
    """What decided about a role. Where Dynamo has a name for it, it is Dynamo's."""

    SCALE = "scale"
    """As many workers as the expected demand needs."""
    NO_CHANGE = "no_change"
    """There are as many as it needs."""
    MIN_ENDPOINT = "min_endpoint"
    """It needs fewer than there always are."""
    MAX_STEP = "max_throughput_scaling_replicas"
    """It needs a longer step than is taken at once."""
    MAX_GPU_BUDGET = "max_gpu_budget"
    """It needs more GPUs than there may be."""
    OVERRIDDEN = "overridden"
    """A plugin wanted another number, or rejected this one."""
    NO_TRAFFIC_DATA = "no_traffic_data"
    """What the clients did is not known, or nobody has come yet."""
    PREDICT_FAILED = "predict_failed"
    """There is no forecast."""
    SCALING_IN_PROGRESS = "scaling_in_progress"
    """Another environment has yet to acknowledge the last decision."""
    DISAGGREGATED_ONLY = "disaggregated_only"
    """The graph has no prefill workers of its own."""


class Side(NamedTuple):
    """One role. `wanted` are the workers that a plugin asks for in place of those that the `need` says (None: nobody).
    Without either it stays as it is."""

    component: str
    capacity: int
    gpus_per_worker: int
    need: Need | None
    wanted: int | None = None


class Facts(NamedTuple):
    """All numbers of one decision; `sides` are prefill and decode."""

    sides: tuple[Side, Side]
    next_num_req: float
    interval_s: float
    min_endpoint: int
    min_gpu_budget: int
    max_gpu_budget: int
    max_step: int

    def floor(self, side: Side) -> int:
        """The fewest workers of that role."""
        return max(self.min_endpoint, floor_workers(self.min_gpu_budget, side.gpus_per_worker))


class Verdict(NamedTuple):
    """`engines` were wanted, `target` are to be, by that rule."""

    rule: SlaRule
    engines: int
    target: int


def judge(facts: Facts) -> tuple[Verdict, Verdict]:
    """One verdict for each side, in their order."""
    prefill, decode = facts.sides
    wanted = (_wanted(prefill, facts), _wanted(decode, facts))
    of_prefill, of_decode = _stepped(prefill, wanted[0], facts), _stepped(decode, wanted[1], facts)
    fits = fitting(
        (of_prefill[0], of_decode[0]),
        (facts.floor(prefill), facts.floor(decode)),
        (prefill.gpus_per_worker, decode.gpus_per_worker),
        facts.max_gpu_budget,
    )
    if fits is None:  # not even the floors fit: nothing can be right, so nothing is changed
        return (
            Verdict(SlaRule.MAX_GPU_BUDGET, wanted[0], prefill.capacity),
            Verdict(SlaRule.MAX_GPU_BUDGET, wanted[1], decode.capacity),
        )
    return _verdict(prefill, wanted[0], of_prefill, fits[0]), _verdict(decode, wanted[1], of_decode, fits[1])


def _wanted(side: Side, facts: Facts) -> int:
    if side.wanted is not None:
        return side.wanted
    return side.capacity if side.need is None else side.need.engines(facts.next_num_req, facts.interval_s)


def _stepped(side: Side, wanted: int, facts: Facts) -> tuple[int, SlaRule | None]:
    """At most so many more, or fewer, and not below the floor; with what kept it from being `wanted`."""
    near = min(max(wanted, side.capacity - facts.max_step), side.capacity + facts.max_step)
    floor = facts.floor(side)
    if near < floor:
        return floor, SlaRule.MIN_ENDPOINT
    return near, None if near == wanted else SlaRule.MAX_STEP


def _verdict(side: Side, wanted: int, stepped: tuple[int, SlaRule | None], target: int) -> Verdict:
    number, bound = stepped
    if target < number:
        return Verdict(SlaRule.MAX_GPU_BUDGET, wanted, target)
    if bound is not None:
        return Verdict(bound, wanted, target)
    if side.wanted is not None:
        return Verdict(SlaRule.OVERRIDDEN, wanted, target)
    return Verdict(SlaRule.NO_CHANGE if target == side.capacity else SlaRule.SCALE, wanted, target)

"""Why there are so many workers of a role: the rule, its numbers, and what one GPU less, or more, would do. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import numpy as np

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.policies.slo.hindsight import EARLIER, HOLDS_S, HOUR_S, JUDGED_MIN, Ranks, Turn
from dynamo_local.planner.policies.slo.scaling_options import (
    FLIP,
    INTERVAL_S,
    PART_LEAST,
    WAKE,
    Bounds,
    Fleet,
    Moment,
    pays,
)
from dynamo_local.planner.policies.slo.state import SloState
from dynamo_local.planner.values import Reason, WorkerPools

# --- words
# A decision of the policy `slo` in words. Pure.

NOT_ACKNOWLEDGED = "the environment has not acknowledged the last decision yet"
NOBODY_YET = "no request has been answered yet, so that lengths are not known"

ROLES = ("prefill", "decode")
QUICKER = (WAKE, FLIP)
FACTOR_SAID = 0.3
"""From so much on a person is told that the profile is another engine's."""


def why(rule: str, numbers: Mapping[str, float], role: int) -> str:
    """`5.2 requests/s expected in 35 s (3.9 to 6.8), 4.7 now; 3 workers: 99.1 % within the targets, …`"""
    if "expected_requests_per_second" not in numbers:
        return "what is to come is not known; somebody else asked for another number" if rule == "overridden" else rule
    reported = (
        f"{numbers['expected_requests_per_second']:.3g} requests/s expected in {numbers['lead_s']:.0f} s "
        f"({numbers['low_requests_per_second']:.3g} to {numbers['high_requests_per_second']:.3g}), "
        f"{numbers['requests_per_second']:.3g} now{_sooner(numbers)}{_clearing(numbers)}{_part(numbers)}; "
        f"with {_count(numbers['workers_wanted'])}{_flips(numbers)} "
        f"{100 * numbers['attainment']:.1f} % keep the targets, {_binds(numbers)}; "
        f"one less would miss {_requests(numbers['less_misses_per_hour'])} an hour, one more would save "
        f"{_requests(numbers['more_saves_per_hour'])}, and a GPU must be worth "
        f"{_requests(numbers['price_requests_per_hour'])}"
    )
    if rule == "min_endpoint":
        return f"{reported}; there are never fewer"
    if rule == "max_gpu_budget":
        return f"{reported}; both roles share {numbers['max_gpu_budget']:g} GPUs"
    if rule == "overridden":
        return f"{reported}; but a plugin asked for another number"
    return reported


def notes(state: SloState, bounds: Bounds, gpu_price: float) -> tuple[str, ...]:
    """Notes on the numbers, for people."""
    found = _of_the_past(state, bounds, gpu_price)
    for role, raw in zip(ROLES, (state.factors.prefill_raw, state.factors.decode_raw), strict=True):
        if abs(raw - 1) >= FACTOR_SAID:
            found.append(
                f"{role} takes {raw:.2g} times what the profile says: that is reckoned with; "
                "a profile of these engines would be better"
            )
    return tuple(found)


def _of_the_past(state: SloState, bounds: Bounds, gpu_price: float) -> list[str]:
    """Which candidates lead, and what the cheapest fixed fleet would have cost."""
    past = state.ruling_past
    if past is None or past.requests < JUDGED_MIN:
        return []
    found = []
    for name, ranks, gpus in zip(ROLES, past.roles, bounds.gpus, strict=True):
        if gpus:
            found.append(f"by the recorded past, {name} workers: {_leaders(ranks, gpu_price * INTERVAL_S * gpus)}")
    for fixed in state.fixed:
        found.append(
            f"in the last {fixed.hours:.1f} h {100 * fixed.share:.1f} % kept the targets with "
            f"{fixed.gpu_hours:.2f} GPU-hours; the cheapest fixed fleet for as many, "
            f"{_fleet(fixed.fleet)}, would have held {fixed.fixed_gpu_hours:.2f}"
        )
    if state.turn is not None:
        found.append(_turn(state.turn))
    return found


def _fleet(fleet: Fleet) -> str:
    return f"{fleet[0]}P{fleet[1]}D" if fleet[0] else f"{_count(fleet[1])} (aggregated)"


def _turn(turn: Turn) -> str:
    """Which shape of the graph serves the recorded past with fewer GPUs."""
    return (
        f"on {turn.hours:.1f} h of the recorded past, {_fleet(turn.fleet)} keeps {100 * turn.share:.1f} % with "
        f"{turn.gpus} GPUs, and {_fleet(turn.turned_fleet)} {100 * turn.turned_share:.1f} % with {turn.turned_gpus}: "
        f"turning the graph to the other shape would {'pay' if turn.pays else 'not pay'}"
    )


def _leaders(ranks: Ranks, bin_price: float) -> str:
    """`1–5 always stay, 6 stays 60 s, none above`: the leading candidate of each rank, neighbours together."""
    leaders = ranks.leaders(bin_price)
    seen = int(np.max(np.flatnonzero(ranks.held[:, 1]), initial=-1)) + 1
    parts, first = [], 0
    for rank in range(1, seen + 1):
        if rank == seen or leaders[rank] != leaders[first]:
            named = f"{first + 1}" if rank == first + 1 else f"{first + 1}–{rank}"
            parts.append(f"{named} {_stays(int(leaders[first]), rank > first + 1)}")
            first = rank
    return ", ".join(parts) or "none was wanted yet"


def _stays(candidate: int, several: bool) -> str:
    hold_s = HOLDS_S[candidate]
    if EARLIER[candidate]:
        return f"{'are' if several else 'is'} there one worker early, and {hold_s:g} s longer"
    if hold_s == math.inf:
        return "always stay" if several else "always stays"
    if hold_s == -math.inf:
        return "are not worth it" if several else "is not worth it"
    return f"{'stay' if several else 'stays'} {hold_s:g} s longer than needed"


def _sooner(numbers: Mapping[str, float]) -> str:
    """The demand at the lead times of the quicker scaling options."""
    return "".join(
        f", {numbers[f'{way}_requests_per_second']:.3g} in {numbers[f'{way}_lead_s']:.2g} s (a {way})"
        for way in QUICKER
        if f"{way}_lead_s" in numbers
    )


def _flips(numbers: Mapping[str, float]) -> str:
    count = numbers.get("flips", 0.0)
    if not count:
        return ""
    return f" ({abs(count):g} {'more' if count > 0 else 'fewer'} by flips)"


def _clearing(numbers: Mapping[str, float]) -> str:
    more = numbers.get("clearing_requests_per_second", 0.0)
    return f", {more:.3g} of them to clear what waits" if more > 0 else ""


def _part(numbers: Mapping[str, float]) -> str:
    """An overload: the rule plans for a part of it."""
    part, gpus = numbers["planned_part"], numbers["max_gpu_budget"]
    if part >= 1:
        return ""
    cause = f"more comes than {gpus:g} GPUs can serve in time" if part > PART_LEAST else "these targets cannot be kept"
    return f", {100 * part:.0f} % of all: {cause}"


def _binds(numbers: Mapping[str, float]) -> str:
    role = int(numbers["binds"])
    return "neither role binds" if role < 0 else f"{ROLES[role]} binds"


def _count(number: float) -> str:
    return f"{number:g} worker{'' if number == 1 else 's'}"


def _requests(number: float) -> str:
    return f"{number:,.0f} request{'' if round(number) == 1 else 's'}"


class SloRule(enum.StrEnum):
    """The rule that decided about a role, under Dynamo's name if it has one."""

    SCALE = "scale"
    """So many are worth their price."""
    NO_CHANGE = "no_change"
    """There are as many as are worth it."""
    MIN_ENDPOINT = "min_endpoint"
    """Fewer would do; there always are so many."""
    MAX_GPU_BUDGET = "max_gpu_budget"
    """More would be worth it; there may not be more GPUs."""
    OVERRIDDEN = "overridden"
    """A plugin wanted another number, or rejected this one."""
    NO_TRAFFIC_DATA = "no_traffic_data"
    """The traffic is not known, or no request has come yet."""
    PREDICT_FAILED = "predict_failed"
    """There is no forecast, or the queueing model gave no answer."""
    SCALING_IN_PROGRESS = "scaling_in_progress"
    """Another environment has yet to acknowledge the last decision."""


def reasons(
    state: SloState,
    pools: WorkerPools,
    requested: Fleet,
    fleet: Fleet,
    gpu_price: float,
    bounds: Bounds,
    options: PlannerConfig,
) -> tuple[Reason, ...]:
    """One for prefill and one for decode. `asked` is what the pipeline has merged, `fleet` what it comes to."""
    expected = state.expected[0] if state.expected else None
    found = []
    for role, pool in enumerate(pools.all, start=2 - len(pools.all)):
        rule = _rule(state, role, pool.capacity, requested, fleet, expected, bounds, gpu_price)
        numbers = {"workers": float(pool.capacity), "max_gpu_budget": float(bounds.max_gpus)}
        if expected is not None:
            numbers |= _numbers(state, expected, fleet, role, gpu_price, bounds, options)
        step = fleet[role] - pool.capacity
        found.append(Reason(pool.component, step, rule, numbers, why=why(rule, numbers, role)))
    return tuple(found)


def _rule(
    state: SloState,
    role: int,
    capacity: int,
    requested: Fleet,
    fleet: Fleet,
    expected: Moment | None,
    bounds: Bounds,
    gpu_price: float,
) -> SloRule:
    if state.chosen is None or requested[role] != state.chosen[role]:
        return SloRule.OVERRIDDEN
    if fleet[role] < requested[role] or (expected is not None and _kept_from(fleet, role, expected, bounds, gpu_price)):
        return SloRule.MAX_GPU_BUDGET
    if fleet[role] > requested[role]:
        return SloRule.MIN_ENDPOINT
    if fleet[role] == bounds.floors[role] and capacity == fleet[role]:
        fewer = _changed(fleet, role, -1)
        if not state.moments or not pays(fleet, fewer, state.moments[0], gpu_price, bounds):
            return SloRule.MIN_ENDPOINT
    return SloRule.NO_CHANGE if fleet[role] == capacity else SloRule.SCALE


def _kept_from(fleet: Fleet, role: int, expected: Moment, bounds: Bounds, gpu_price: float) -> bool:
    """Whether one more would be worth twice its price, and does not fit."""
    more = _changed(fleet, role, 1)
    gain = expected.served(more) - expected.served(fleet)
    return not bounds.fits(more) and gain > 2 * gpu_price * bounds.gpus[role]


def _changed(fleet: Fleet, role: int, step: int) -> Fleet:
    return (fleet[0] + step, fleet[1]) if role == 0 else (fleet[0], fleet[1] + step)


def _numbers(
    state: SloState,
    expected: Moment,
    fleet: Fleet,
    role: int,
    gpu_price: float,
    bounds: Bounds,
    options: PlannerConfig,
) -> dict[str, float]:
    """The inputs of the choice. Missed requests are per hour, if it stayed as is expected of the lead."""
    scenarios = state.scenarios[0]
    served = expected.served(fleet)
    numbers = {
        "lead_s": state.scaling_options[0].lead_s,
        "requests_per_second": state.rates[0],
        "expected_requests_per_second": expected.rate,
        "low_requests_per_second": scenarios[0].rate,
        "high_requests_per_second": scenarios[-1].rate,
        "workers_wanted": float(fleet[role]),
        "attainment": served / expected.rate if expected.rate > 0 else 1.0,
        "price_requests_per_hour": gpu_price * HOUR_S,
        "price_factor": state.price_factor,
        "clearing_requests_per_second": state.clearing * state.part,
        "planned_part": state.part,
        "less_misses_per_hour": _gain(expected, _changed(fleet, role, -1), fleet),
        "more_saves_per_hour": _gain(expected, fleet, _changed(fleet, role, 1)),
        "target": options.target,
        "binds": float(_binds_reasons(expected, fleet)),
        "gpus_per_worker": float(bounds.gpus[role]),
        "ttft_ms" if role == 0 else "itl_ms": options.ttft_ms if role == 0 else options.itl_ms,
    }
    for scaling_option, moment in zip(state.scaling_options[1:], state.expected[1:], strict=True):
        numbers |= {
            f"{scaling_option.name}_lead_s": scaling_option.lead_s,
            f"{scaling_option.name}_requests_per_second": moment.rate,
        }
    if state.flips:
        numbers["flips"] = float(state.flips if role else -state.flips)
    factor = state.factors.prefill if role == 0 else state.factors.decode
    return numbers | {"profile_factor": factor}


def _gain(expected: Moment, fewer: Fleet, more: Fleet) -> float:
    if min(fewer) < 1:
        fewer = (max(0, fewer[0]), max(0, fewer[1]))
    return (expected.served(more) - expected.served(fewer)) * HOUR_S


def _binds_reasons(expected: Moment, fleet: Fleet) -> int:
    """0 where prefill loses more requests, 1 where decode does, -1 where neither loses one in a thousand."""
    many = (10**6, 10**6)
    whole = expected.served(many)
    of_prefill = whole - expected.served((fleet[0], many[1]))
    of_decode = whole - expected.served((many[0], fleet[1]))
    if max(of_prefill, of_decode) < 1e-3 * max(whole, 1e-9):
        return -1
    return 0 if of_prefill >= of_decode else 1

"""A decision of the policy `slo` in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.planner.policies.slo.ladder import FLIP, WAKE
from dynamo_local.planner.policies.slo.state import SloState

NEEDS_PREFILL = "the policy slo is for graphs with prefill workers of their own; throughput-load plans this one"
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
    told = (
        f"{numbers['expected_requests_per_second']:.3g} requests/s expected in {numbers['lead_s']:.0f} s "
        f"({numbers['low_requests_per_second']:.3g} to {numbers['high_requests_per_second']:.3g}), "
        f"{numbers['requests_per_second']:.3g} now{_sooner(numbers)}{_clearing(numbers)}; "
        f"with {_count(numbers['workers_wanted'])}{_flips(numbers)} "
        f"{100 * numbers['attainment']:.1f} % keep the targets, {_binds(numbers)}; "
        f"one less would miss {_requests(numbers['less_misses_per_hour'])} an hour, one more would save "
        f"{_requests(numbers['more_saves_per_hour'])}, and a GPU must be worth "
        f"{_requests(numbers['price_requests_per_hour'])}"
    )
    if rule == "min_endpoint":
        return f"{told}; there are never fewer"
    if rule == "max_gpu_budget":
        return f"{told}; both roles share {numbers['max_gpu_budget']:g} GPUs"
    if rule == "overridden":
        return f"{told}; but a plugin asked for another number"
    return told


def notes(state: SloState) -> tuple[str, ...]:
    """What a person should know about the numbers."""
    found = []
    for role, raw in zip(ROLES, (state.factors.prefill_raw, state.factors.decode_raw), strict=True):
        if abs(raw - 1) >= FACTOR_SAID:
            found.append(
                f"{role} takes {raw:.2g} times what the profile says: that is reckoned with; "
                "a profile of these engines would be better"
            )
    return tuple(found)


def _sooner(numbers: Mapping[str, float]) -> str:
    """What is expected at the leads of the quicker rungs."""
    return "".join(
        f", {numbers[f'{rung}_requests_per_second']:.3g} in {numbers[f'{rung}_lead_s']:.2g} s (a {rung})"
        for rung in QUICKER
        if f"{rung}_lead_s" in numbers
    )


def _flips(numbers: Mapping[str, float]) -> str:
    count = numbers.get("flips", 0.0)
    if not count:
        return ""
    return f" ({abs(count):g} {'more' if count > 0 else 'fewer'} by flips)"


def _clearing(numbers: Mapping[str, float]) -> str:
    more = numbers.get("clearing_requests_per_second", 0.0)
    return f", {more:.3g} of them to clear what waits" if more > 0 else ""


def _binds(numbers: Mapping[str, float]) -> str:
    role = int(numbers["binds"])
    return "neither role binds" if role < 0 else f"{ROLES[role]} binds"


def _count(number: float) -> str:
    return f"{number:g} worker{'' if number == 1 else 's'}"


def _requests(number: float) -> str:
    return f"{number:,.0f} request{'' if round(number) == 1 else 's'}"

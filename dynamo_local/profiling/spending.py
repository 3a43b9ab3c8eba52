"""What the budget of a measurement goes to, once it is known how long its graph took to start. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

TRACE_SHARE = 1 / 3
"""Of what is measured: the trace that the profile is checked by; five minutes at most."""
TRACE_MAX_S = 300.0
START_SHARE_MAX = 0.5
"""A start that takes more of the budget does so beside it: a profile of no points is none."""
ACTIONS_SHARE_MAX = 1 / 3
"""Of what the start leaves."""
ACTION_S = 15.0
"""Of the command around one more worker, and of the one less that follows."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Seconds for the points, for the trace, and kept for actions."""

    points_s: float
    trace_s: float
    actions_s: float


def spending(budget_s: float, started_s: float, cold_s: Collection[float]) -> Spending:
    """`started_s` is what the start took of the budget, `cold_s` what the cold start of each component takes that is
    to be tried again; none of them: no actions."""
    left_s = max(budget_s * (1 - START_SHARE_MAX), budget_s - started_s)
    actions_s = min(left_s * ACTIONS_SHARE_MAX, sum(each + ACTION_S for each in cold_s))
    trace_s = min(TRACE_MAX_S, (left_s - actions_s) * TRACE_SHARE)
    return Spending(left_s - actions_s - trace_s, trace_s, actions_s)

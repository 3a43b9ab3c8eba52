"""The decision of a policy that changes nothing."""

from __future__ import annotations

from dynamo_local.planner.values.decisions import Decision, Reason
from dynamo_local.planner.values.pull import Pull


def holding(pull: Pull, held: tuple[str, str], next_tick_at: float) -> Decision:
    """All components keep the workers that they have. `held` is the rule that says so, and its sentence;
    `next_tick_at` the absolute time of the next decision, in seconds."""
    rule, why = held
    return Decision(
        now_s=pull.at_s,
        targets={pool.component: pool.capacity for pool in pull.pools.all},
        reasons=tuple(Reason(pool.component, 0, rule, {"workers": pool.capacity}, why=why) for pool in pull.pools.all),
        next_tick_at=next_tick_at,
    )

"""Where a policy stands between two pulls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.planner.values.readings import Reading


@dataclass(frozen=True, slots=True)
class Standing:
    """For `dynamo planner status`, and for the record of the last decision.

    `next_tick_at` is when the next decision is due (None: not before the adjustment under way has ended), `deferred`
    are the components with an up that the policy holds back until a GPU is free. `interval_began_s` and `readings` are
    what the last decision was made from. `models` says by component where its model comes from.
    """

    next_tick_at: float | None
    adjusting: bool = False
    deferred: tuple[str, ...] = ()
    interval_began_s: float = 0.0
    readings: tuple[Reading, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)

"""When a plugin is due, and what it contributes in between. A plugin's `Turn` is all that is remembered of it.

A plugin is due one interval after its last answer, for the first time one interval after its registration. Only an
answer moves that anchor: a tick in which the plugin was skipped, could not be asked or failed does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dynamo_local.planner.pipeline.stages import Answer, HoldPolicy, PluginSpec, Predicted
from dynamo_local.planner.values.proposals import Override

EARLY = 0.05
"""A tick may come earlier than its time by this share of a plugin's interval: timers do not fire to the microsecond."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`anchor_s` is what the next turn is counted from, `held` the last answer, where it is contributed again while the
    plugin is not due, and `held_at_s` when it came."""

    anchor_s: float
    held: Override | Predicted | None = None
    held_at_s: float = 0.0


def registered(now_s: float, grid_s: float, scale_interval_s: float) -> Turn:
    """The turn of a plugin that registers now.

    The anchor is the last moment of the grid of ticks, which began at `grid_s`: plugins of one interval that registered
    shortly after each other are then due in the same tick. A grid of 0 s is none.
    """
    if scale_interval_s <= 0.0 or now_s < grid_s:
        return Turn(now_s)
    return Turn(grid_s + math.floor((now_s - grid_s) / scale_interval_s) * scale_interval_s)


def is_due(turn: Turn, spec: PluginSpec, now_s: float) -> bool:
    """Whether the plugin is to be asked in the tick of that time."""
    return now_s - turn.anchor_s >= spec.interval_s * (1 - EARLY)


def lag_s(turn: Turn, spec: PluginSpec, now_s: float) -> float:
    """For how long it has been due, in seconds."""
    return max(0.0, now_s - turn.anchor_s - spec.interval_s)


def answered(turn: Turn, spec: PluginSpec, answer: Answer, now_s: float) -> Turn:
    """After an answer. What was held before is forgotten, whatever was answered: an accept takes an override back."""
    if spec.hold_policy is HoldPolicy.HOLD_LAST:
        if isinstance(answer, Override):
            return Turn(now_s, replace(answer, final=False), now_s)
        if isinstance(answer, Predicted) and answer.prediction is not None:
            return Turn(now_s, replace(answer, final=False), now_s)
    return Turn(now_s)


def forgotten(turn: Turn) -> Turn:
    """Without what was held: the plugin's circuit has opened."""
    return Turn(turn.anchor_s)

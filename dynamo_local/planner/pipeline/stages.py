"""The four stages that plugins may take part in, and what a plugin says of itself when it registers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.proposals import Accept, Override, Reject

BUILTIN_PREDICT = "builtin_load_predict"
BUILTIN_PREDICT_PRIORITY = 100
"""Not 0 as in Dynamo: priorities on the wire begin with 0, so that nobody could come before it."""


class Stage(enum.StrEnum):
    """In the order of a tick. The names are `plugin_type` on the wire."""

    PREDICT = "predict"
    PROPOSE = "propose"
    RECONCILE = "reconcile"
    CONSTRAIN = "constrain"


class HoldPolicy(enum.IntEnum):
    """What a plugin contributes in ticks in which it is not due. The numbers are those of the wire."""

    ACCEPT_WHEN_IDLE = 0
    HOLD_LAST = 1


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A plugin, as it registered.

    `priority`: the smaller number wins. `interval_s` is the least time between two calls (0: in each tick). `needs` are
    paths of the context that are to be collected for it (none: all), `requires` paths without which it is not called.
    `window_s` is the length of the traffic's window that it wants (0: the planner's own).
    """

    plugin_id: str
    stage: Stage
    priority: int = 0
    version: str = ""
    protocol_version: str = "1.0"
    interval_s: float = 0.0
    hold_policy: HoldPolicy = HoldPolicy.ACCEPT_WHEN_IDLE
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a plugin of PREDICT answers; None is no opinion. `final`: nobody with a higher number is asked after it."""

    prediction: Prediction | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Nothing:
    """An answer in which nothing is set. It counts as an error, and as `Accept`."""


Answer = Predicted | Accept | Override | Reject | Nothing

"""Who looks on while the planner plans: its log, TensorBoard, Prometheus, `dynamo top`."""

from __future__ import annotations

from typing import Protocol

from dynamo_local.planner.record import DecisionRecord
from dynamo_local.planner.values import Fleet, Reading


class PlannerObserver(Protocol):
    """Told of everything, on the arbiter's event loop: must return at once, files and sockets are for a thread.

    What it raises is logged, and costs nobody else anything.
    """

    def on_reading(self, reading: Reading, fleet: Fleet) -> None:
        """One pull; also while the planner is paused, or holds for an adjustment."""
        ...

    def on_decision(self, record: DecisionRecord) -> None:
        """One decision, and what came of it; a hold is one, too."""
        ...

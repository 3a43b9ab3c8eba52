"""Observers of the planner: its log, TensorBoard, Prometheus, `dynamo top`."""

from __future__ import annotations

from typing import Protocol

from dynamo_local.planner.records.record import DecisionRecord
from dynamo_local.planner.values.pull import Pull


class PlannerObserver(Protocol):
    """Called on the arbiter's event loop, so it must return at once and leave files and sockets to a thread.

    Its exceptions are logged, and affect nothing else.
    """

    def on_pull(self, pull: Pull) -> None:
        """One pull; also while the planner is paused, or holds for an adjustment."""
        ...

    def on_decision(self, record: DecisionRecord) -> None:
        """One decision with its outcome; a hold is one, too."""
        ...

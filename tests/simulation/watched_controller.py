"""The controller of the simulation: it tells of the moves of each decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.core.fleet.events import Apply, Command, Event
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Answer, Move


class WatchedController(FleetController):
    """The controller, which tells of the moves of each decision as it is made."""

    on_moves: Callable[[Event, Fleet, tuple[Move, ...]], None] = staticmethod(lambda command, before, moves: None)
    """Before anything follows from them: what one step begins, the same step may end."""

    on_apply: Callable[[Fleet], None] = staticmethod(lambda before: None)

    def check(self, fleets: bool) -> None:
        """Whether every fleet is validated. One that a successor is still putting together cannot be."""
        self._validates = fleets

    def _adopt(self, event: Event, fleet: Fleet, effects: Any, answer: Answer, committed: Any) -> None:
        before = self.fleet
        if isinstance(event, Command):
            self.on_moves(event, before, answer.moves)
        super()._adopt(event, fleet, effects, answer, committed)
        if isinstance(event, Apply):
            self.on_apply(before)

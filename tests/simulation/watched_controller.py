"""The controller of the simulation: it tells of the moves of each decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.core.fleet import flipping, scaling
from dynamo_local.core.fleet.commands import decide_scale, decide_scale_all, decide_sleep, decide_wake
from dynamo_local.core.fleet.effects import Effect
from dynamo_local.core.fleet.events import (
    Apply,
    CancelDrain,
    Drain,
    Event,
    Flip,
    Scale,
    ScaleAll,
    ScaleFlip,
    Sleep,
    Wake,
)
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Move
from dynamo_local.errors import DynamoError


class WatchedController(FleetController):
    """The controller, which tells of the moves of each decision as it is made."""

    on_moves: Callable[[Event, Fleet, tuple[Move, ...]], None] = staticmethod(lambda order, before, moves: None)
    """Before anything follows from them: what one step begins, the same step may end."""

    on_refused: Callable[[], None] = staticmethod(lambda: None)
    """Nothing came of the moves after all."""

    on_apply: Callable[[Fleet], None] = staticmethod(lambda before: None)

    def check(self, fleets: bool) -> None:
        """Whether every fleet is validated. One that a successor is still putting together cannot be."""
        self._validates = fleets

    def feed(self, event: Event, *, committed: Callable[[], None] | None = None) -> tuple[Effect, ...]:
        before = self.fleet
        with contextlib.suppress(DynamoError):  # refused: the step says so
            self.on_moves(event, before, _moves(before, event))
        try:
            effects = super().feed(event, committed=committed)
        except DynamoError:
            self.on_refused()
            raise
        if isinstance(event, Apply):
            self.on_apply(before)
        return effects


def _moves(fleet: Fleet, event: Event) -> tuple[Move, ...]:
    match event:
        case Scale():
            return decide_scale(fleet, event)
        case ScaleAll():
            return tuple(move for moves in decide_scale_all(fleet, event).values() for move in moves)
        case Drain():
            return scaling.decide_drain(fleet, event.name, stimulus_id="seen", force=event.force).moves
        case CancelDrain():
            return scaling.decide_cancel(fleet, event.name, stimulus_id="seen").moves
        case Flip() | ScaleFlip():
            return flipping.decided(fleet, event)
        case Sleep():
            return decide_sleep(fleet, event)
        case Wake():
            return decide_wake(fleet, event)
    return ()

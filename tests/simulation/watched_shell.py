"""The shell of the simulation: it tells of the moves of each decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dynamo_local.arbiter.controller import Shell
from dynamo_local.core.fleet import flipping, scaling
from dynamo_local.core.fleet.commands import decide_scale, decide_scale_all, decide_sleep, decide_wake
from dynamo_local.core.fleet.effects import Instruction
from dynamo_local.core.fleet.events import (
    Apply,
    CancelDrain,
    Drain,
    Flip,
    Scale,
    ScaleAll,
    ScaleFlip,
    Sleep,
    Stimulus,
    Wake,
)
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Move
from dynamo_local.errors import DynamoError


class WatchedShell(Shell):
    """The shell, which tells of the moves of each decision as it is made."""

    on_moves: Callable[[Stimulus, Fleet, tuple[Move, ...]], None] = staticmethod(lambda order, before, moves: None)
    """Before anything follows from them: what one step begins, the same step may end."""

    on_refused: Callable[[], None] = staticmethod(lambda: None)
    """Nothing came of the moves after all."""

    on_apply: Callable[[Fleet], None] = staticmethod(lambda before: None)

    def check(self, fleets: bool) -> None:
        """Whether every fleet is validated. One that a successor is still putting together cannot be."""
        self._validates = fleets

    def feed(self, stimulus: Stimulus, *, committed: Callable[[], None] | None = None) -> tuple[Instruction, ...]:
        before = self.fleet
        with contextlib.suppress(DynamoError):  # refused: the step says so
            self.on_moves(stimulus, before, _moves(before, stimulus))
        try:
            instructions = super().feed(stimulus, committed=committed)
        except DynamoError:
            self.on_refused()
            raise
        if isinstance(stimulus, Apply):
            self.on_apply(before)
        return instructions


def _moves(fleet: Fleet, stimulus: Stimulus) -> tuple[Move, ...]:
    match stimulus:
        case Scale():
            return decide_scale(fleet, stimulus)
        case ScaleAll():
            return tuple(move for moves in decide_scale_all(fleet, stimulus).values() for move in moves)
        case Drain():
            return scaling.decide_drain(fleet, stimulus.name, stimulus_id="seen", force=stimulus.force).moves
        case CancelDrain():
            return scaling.decide_cancel(fleet, stimulus.name, stimulus_id="seen").moves
        case Flip() | ScaleFlip():
            return flipping.decided(fleet, stimulus)
        case Sleep():
            return decide_sleep(fleet, stimulus)
        case Wake():
            return decide_wake(fleet, stimulus)
    return ()

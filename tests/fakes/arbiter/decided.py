"""Decisions as values: the moves of a command, or its refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.fleet.events import Change, Drain, Scale
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.scaling import decide, decide_cancel, decide_drain
from dynamo_local.errors import DynamoError


@dataclass(frozen=True)
class Decided:
    """Shows what came of a decision."""

    moves: tuple[Move, ...] = ()
    refused: DynamoError | None = None

    def or_raise(self) -> tuple[Move, ...]:
        """The moves; raises the refusal."""
        if self.refused is not None:
            raise self.refused
        return self.moves


def decided(decision: Callable[[Fleet, Any], tuple[Move, ...]], view: Fleet, command: Any) -> Decided:
    """The decision's moves, or its refusal."""
    try:
        return Decided(decision(view, command))
    except DynamoError as refusal:
        return Decided(refused=refusal)


def scaled_to(view: Fleet, component: str, target: Change, **more: Any) -> Decided:
    return decided(decide, view, Scale(stimulus_id="t", component=component, target=target, **more))


def drained(view: Fleet, name: str, *, force: bool = False) -> Decided:
    return decided(decide_drain, view, Drain(stimulus_id="t", name=name, force=force))


def cancelled(view: Fleet, name: str) -> Decided:
    return decided(decide_cancel, view, Drain(stimulus_id="t", name=name, cancel=True))

"""Moves: what a command does to which worker. `commands.carry_out` turns each into transitions and effects.

A move does not say *how*: the worker's role decides by which signal it is asked to leave (`draining.how`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.fleet import FlipTarget, RestartPlan


class MoveKind(enum.StrEnum):
    """The values are names in a command's answer, where the list of moves is called `instructions`: both are public."""

    SPAWN = "spawn"
    """Start a process for it, on devices from the ledger. An entry of that name is started again (faulted, backing off,
    a template, drained to restart); else one is made."""
    DRAIN = "drain"
    """Ask it to leave. Legal also for one that drains already."""
    CANCEL_DRAIN = "cancel_drain"
    """Take the drain back: the same process registers again. It keeps its GPUs."""
    TAKE_BACK = "take_back"
    """It does not serve, and shall not any more: undo what is on its way, end the process if there is one.

    Starting: leave by SIGTERM (it may have registered in this moment), see `draining.leave_deadline_s`; gone at once
    where nobody has begun to make its process.
    Pending, backing off, faulted: no process; the entry goes, a bare one stays as the template.
    Crashed, start timed out: it is not started again. Drained for a restart: the drain goes on, no restart."""
    FLIP = "flip"
    """The same process takes over another component's role, under another name."""
    CANCEL_FLIP = "cancel_flip"
    """It stays in its role, if it is not too late."""
    SLEEP = "sleep"
    """It finishes its streams and sleeps; one that waits to be woken, or is being woken, goes on sleeping."""
    WAKE = "wake"
    """It serves again, as soon as it has its GPUs; one that is still to be put to sleep is not."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change to one worker."""

    kind: MoveKind
    #: Its watcher name.
    name: str
    reason: str = ""
    #: SPAWN: the component and the name's suffix.
    component: str = ""
    n: int = 0
    #: SPAWN: workers that leave still hold the devices. The entry stays pending until these are free.
    waits: bool = False
    #: DRAIN: it is started again when it is gone.
    restart: bool = False
    #: FLIP: its next name and component.
    becomes: FlipTarget | None = None
    #: SLEEP: 1 or 2.
    level: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of `step` to a command: the moves that were made. Empty for any other event."""

    moves: tuple[Move, ...] = ()
    #: For `ScaleAll`: the moves that concern each component. A flip concerns two.
    by_component: Mapping[str, tuple[Move, ...]] = field(default_factory=dict)
    #: For `Restart`: whom it restarts, in order, and warnings.
    plan: RestartPlan | None = None

"""Moves: what a command does to which worker. `commands.carry_out` turns each into transitions and effects.

A move does not say *how*: the worker's role decides by which signal it is asked to leave (`draining.how`). `kind` is
the move's name in a command's answer, where the list of moves is called `instructions`: both are public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dynamo_local.core.fleet.fleet import Intent, RestartPlan, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind
from dynamo_local.core.types import WorkerState as S


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Make a new entry, take `gpus` devices from the ledger, start it.

    `waits`: the devices are still held by workers that leave; the entry stays pending until they are free.
    """

    kind: ClassVar[str] = "spawn"
    name: str
    component: str
    n: int
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Revive:
    """Start an entry without a process again, under its name: faulted, backing off, a template, drained to restart."""

    kind: ClassVar[str] = "spawn"
    name: str
    component: str
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Ask it to leave; with `restart` it is started again when it is gone. Legal also for one that drains already."""

    kind: ClassVar[str] = "drain"
    name: str
    reason: str = ""
    restart: bool = False


@dataclass(frozen=True, slots=True)
class CancelDrain:
    """Take the drain back: the same process registers again. It keeps its GPUs."""

    kind: ClassVar[str] = "cancel_drain"
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """It does not serve, and shall not any more: undo what is on its way, end the process if there is one.

    Starting: leave by SIGTERM (it may have registered in this moment), see `drains.leave_deadline_s`; gone at once
    where nobody has begun to make its process.
    Pending, backing off, faulted: no process; the entry goes, a bare one stays as the template.
    Crashed, start timed out: it is not started again. Drained for a restart: the drain goes on, no restart.
    """

    kind: ClassVar[str] = "take_back"
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FlipWorker:
    """The same process takes over another component's role, under the name `to`; `n` is that name's suffix."""

    kind: ClassVar[str] = "flip"
    name: str
    to: str
    component: str
    n: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PutToSleep:
    """It finishes its streams and sleeps; one that waits to be woken, or is being woken, goes on sleeping."""

    kind: ClassVar[str] = "sleep"
    name: str
    level: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallOffFlipOf:
    """It stays in its role, if it is not too late."""

    kind: ClassVar[str] = "cancel_flip"
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """It serves again, as soon as it has its GPUs (`waits`: their holders leave); one that is still to be put to sleep
    is not."""

    kind: ClassVar[str] = "wake"
    name: str
    waits: bool = False
    reason: str = ""


Move = SpawnWorker | Revive | BeginDrain | CancelDrain | TakeBack | FlipWorker | CallOffFlipOf | PutToSleep | WakeUp


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of `step` to a command: the moves that were made. Empty for any other event."""

    moves: tuple[Move, ...] = ()
    #: For `ScaleAll`: the moves that concern each component. A flip concerns two.
    by_component: Mapping[str, tuple[Move, ...]] = field(default_factory=dict)
    #: For `Restart`: whom it restarts, in order, and warnings.
    plan: RestartPlan | None = None


def transition_for(move: Move, state: S) -> TransitionKind | None:
    """The transition that commits the move, for a worker in `state`; None if the state does not change now.

    That is so for `SpawnWorker` (its entry is made pending), for a drain under way, and for `CancelDrain`
    (`DrainCancelled` follows when the worker has registered again). A `TakeBack` of a worker whose process is still
    being ended commits `Intent.LEAVING`; `Removed` follows once the process is gone.
    """
    match move:
        case Revive():
            return TransitionKind.RESTART_REQUESTED
        case BeginDrain() if state is not S.DRAINING:
            return TransitionKind.DRAIN_REQUESTED
        case TakeBack() if state is S.STARTING:
            return TransitionKind.DRAIN_REQUESTED
        case TakeBack() if state in (S.PENDING, S.BACKING_OFF, S.FAULTED):
            return TransitionKind.REMOVED
    return None


def intent_after(worker: Worker, move: Move) -> Intent:
    """The worker's `Intent` to commit with the move's intent."""
    match move:
        case BeginDrain(restart=True):
            return Intent.RESTARTING
        case CancelDrain():
            return Intent.RETURNING
        case TakeBack() if worker.state in (S.CRASHED, S.START_TIMED_OUT):
            return Intent.LEAVING
    return Intent.STEADY

"""What a decision about workers consists of: moves. `machine` turns each into transitions and effects.

A move says nothing about *how*: by which sign a worker is asked to leave is `drains.how`, by its role.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.fleet import lifecycle as lc
from dynamo_local.core.fleet.fleet import Intent, Worker
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Make a new entry, take `gpus` devices from the ledger, start it.

    `waits`: the devices are still held by workers that leave; the entry stays pending until they are free.
    """

    name: str
    component: str
    n: int
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Revive:
    """Start an entry without a process again, under its name: faulted, backing off, a template, drained to restart."""

    name: str
    component: str
    gpus: int
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Ask it to leave; with `restart` it is started again when it is gone. Legal also for one that drains already."""

    name: str
    reason: str = ""
    restart: bool = False


@dataclass(frozen=True, slots=True)
class CancelDrain:
    """Take the drain back: the same process registers again. It keeps its GPUs."""

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

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FlipWorker:
    """The same process takes over another component's role, under the name `to`; `n` is that name's suffix."""

    name: str
    to: str
    component: str
    n: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PutToSleep:
    """It finishes its streams and sleeps; one that waits to be woken, or is being woken, goes on sleeping."""

    name: str
    level: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallOffFlipOf:
    """It stays in its role, if it is not too late."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """It serves again, as soon as it has its GPUs (`waits`: their holders leave); one that is still to be put to sleep
    is not."""

    name: str
    waits: bool = False
    reason: str = ""


Move = SpawnWorker | Revive | BeginDrain | CancelDrain | TakeBack | FlipWorker | CallOffFlipOf | PutToSleep | WakeUp


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """All of the moves or, with `refused`, none. No move and no refusal: it is so already."""

    stimulus_id: str
    moves: tuple[Move, ...] = ()
    refused: DynamoError | None = None

    def or_raise(self) -> tuple[Move, ...]:
        """The moves; raises the refusal."""
        if self.refused is not None:
            raise self.refused
        return self.moves


def transition_for(move: Move, state: S, stimulus_id: str) -> lc.LifecycleEvent | None:
    """The event that commits the move, for a worker in `state`; None where the state does not change now.

    None for `SpawnWorker` (its entry is made pending), for `CancelDrain` (`DrainCancelled` is observed, when it has
    registered again), for a drain under way, and for `TakeBack` of a worker whose process is still being ended
    (commit `Intent.LEAVING`, and `Removed` once the process is gone).
    """
    match move:
        case Revive():
            return lc.RestartRequested(stimulus_id=stimulus_id)
        case BeginDrain(reason=reason) if state is not S.DRAINING:
            return lc.DrainRequested(stimulus_id=stimulus_id, reason=reason)
        case TakeBack(reason=reason) if state is S.STARTING:
            return lc.DrainRequested(stimulus_id=stimulus_id, reason=reason)
        case TakeBack() if state in (S.PENDING, S.BACKING_OFF, S.FAULTED):
            return lc.Removed(stimulus_id=stimulus_id)
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

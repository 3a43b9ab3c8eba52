"""The controller's view of the world. The arbiter (`arbiter_effects`), the simulator and the tests implement it.

Nothing here waits. An act is begun, and its result comes back by the callback that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo_local.core.fleet.effects import (
    CallBack,
    CallOffFlip,
    Commit,
    CountRequests,
    Effect,
    EndSession,
    FlipRole,
    Forget,
    LookAtGpus,
    LookUpKey,
    Order,
    Rename,
    Revoke,
    Signal,
    Spawn,
    Sweep,
)
from dynamo_local.core.fleet.events import Event
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.notes import About
from dynamo_local.system.gpu_locks import GpuLocked

Act = (
    Spawn
    | Revoke
    | Signal
    | EndSession
    | CallBack
    | CountRequests
    | Order
    | LookUpKey
    | Sweep
    | LookAtGpus
    | Forget
    | FlipRole
    | CallOffFlip
    | Rename
)
"""Acts on the world, once the intent is committed."""

Done = Callable[[Event | None], None]
"""Called once when an act has ended, with what was observed by it, if anything was."""


class EffectRunner(Protocol):
    """The world. See `tests/contract/test_effects.py`, which every implementation passes."""

    def lock(self, name: str, uuids: Sequence[str]) -> tuple[str, ...]:
        """Reserve the devices host-wide, all or none; those held already stay held. Returns the newly locked ones.

        Raises `GpuLocked`.
        """
        ...

    def unlock(self, uuids: Sequence[str]) -> None:
        """Give devices back; ones that are not held are ignored."""
        ...

    def commit(self, commit: Commit, fleet: Fleet, effects: Sequence[Effect], then: Callable[[], None]) -> None:
        """Write the named entries, as they are in `fleet` or newer, log transitions and notes, then call `then`.

        Commits are written in the order in which they are given; some may be written together. A file that cannot be
        written is reported and tried again. That stops nothing: `then` is called all the same. `effects` are
        all of the step's, for the log.
        """
        ...

    def begin(self, act: Act, worker: Worker | None, done: Done) -> None:
        """Begin an act on a worker (None for one that has left the fleet, or for `LookAtGpus`)."""
        ...

    def wake_at(self, at_s: float) -> None:
        """Call the controller's `tick` at that time (of the arbiter's monotonic clock) or a little later."""
        ...

    def tell(self, text: str, about: About = None) -> None:
        """Tell a person. See `core.notes.Tell`."""
        ...

    def report(self, worker: Worker, reason: str) -> None:
        """A worker failed; its state is the one in which it did."""
        ...


__all__ = ["Act", "Done", "EffectRunner", "GpuLocked"]

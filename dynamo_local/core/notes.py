"""Notes: reminders for a person in `dynamo status`, and how long they stay. Pure.

A note goes with its cause. A repeated note is counted, not shown twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from dynamo_local.core.types import WorkerState

NEWS_KEPT_S = 600.0
"""For how long a note is shown whose cause is nothing that lasts; the arbiter's log has it for good."""
KEPT = 20
"""More than these are no reminder; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Ailing:
    """A worker is in trouble: until it is ready, or has left."""

    worker: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something lasts until `Over` is told of it. There is one note of it at a time, with the latest words."""

    name: str


@dataclass(frozen=True, slots=True)
class Over:
    """The `Trouble` of that name has passed. This goes to the log, and is no reminder."""

    name: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The status has a line of its own for it: no note beside that."""


About = Ailing | Trouble | Over | Elsewhere | None
"""The cause of a note. None: an event without an end, shown for `NEWS_KEPT_S`."""


class Tell(Protocol):
    """Tells a person something."""

    def __call__(self, text: str, about: About = None) -> None:
        """`about` says until when it is worth a note in the status."""
        ...


class HasState(Protocol):
    """A worker, as far as this module needs it."""

    @property
    def state(self) -> WorkerState:
        """Its state."""
        ...


@dataclass(frozen=True, slots=True)
class Note:
    """One note. Times are seconds of the arbiter's monotonic clock, of the first and the last time it was told."""

    text: str
    about: Ailing | Trouble | None
    first_s: float
    last_s: float
    count: int = 1


def noted(notes: tuple[Note, ...], text: str, about: About, now_s: float) -> tuple[Note, ...]:
    """The notes after this was told, the latest last."""
    if isinstance(about, Elsewhere):
        return notes
    if isinstance(about, Over):
        return tuple(note for note in notes if note.about != Trouble(about.name))
    new = Note(text, about, now_s, now_s)
    for note in notes:
        if note.about == about and (note.text == text or isinstance(about, Trouble)):
            new = replace(note, text=text, last_s=now_s, count=note.count + 1)
            notes = tuple(other for other in notes if other is not note)
    return (*notes, new)[-KEPT:]


def still_due(notes: tuple[Note, ...], workers: Mapping[str, HasState], now_s: float) -> tuple[Note, ...]:
    """Those whose cause is not gone."""
    return tuple(note for note in notes if _due(note, workers, now_s))


def _due(note: Note, workers: Mapping[str, HasState], now_s: float) -> bool:
    match note.about:
        case Ailing(worker=name):
            worker = workers.get(name)
            return worker is not None and worker.state not in (WorkerState.READY, WorkerState.EXITED)
        case Trouble():
            return True
        case None:
            return now_s - note.last_s < NEWS_KEPT_S

"""What the arbiter tells people: to its log, to `dynamo status`, and to whoever watches a start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.instructions import Transition
from dynamo_local.core.life.stimuli import Stimulus
from dynamo_local.core.notes import About, Ailing, Note, noted, still_due

log = logging.getLogger(__name__)


class Notes:
    """The notes of now: an observer of the fleet. `show` puts a line before whoever watches."""

    def __init__(self, show: Callable[[str], None], clock: Clock) -> None:
        self._show = show
        self._clock = clock
        self._kept: tuple[Note, ...] = ()

    def tell(self, text: str, about: About = None) -> None:
        """See `core.notes.Tell`."""
        log.warning("%s", text)
        self._add(text, about)
        self._show(text)

    def failed(self, worker: str, why: str) -> None:
        """A worker failed: for `dynamo status` alone, the end of its log is shown elsewhere."""
        self._add(f"{worker} {why}", Ailing(worker))

    def _add(self, text: str, about: About) -> None:
        self._kept = noted(self._kept, text, about, self._clock.now_s())

    def as_json(self, fleet: Fleet) -> list[dict[str, Any]]:
        """For `dynamo status --json`, the latest last: how often it was told, first and last in seconds since 1970."""
        self.on_fleet(fleet)
        ahead_s = self._clock.wall_s() - self._clock.now_s()
        return [
            {
                "text": note.text,
                "count": note.count,
                "first_at": round(note.first_s + ahead_s, 3),
                "last_at": round(note.last_s + ahead_s, 3),
            }
            for note in self._kept
        ]

    # --- control.effects.Observer --------------------------------------------------------------

    def on_stimulus(self, stimulus: Stimulus) -> None:
        """Of no interest here."""

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Of no interest here."""

    def on_fleet(self, fleet: Fleet) -> None:
        """Forget what has passed."""
        if self._kept:
            self._kept = still_due(self._kept, fleet.workers, self._clock.now_s())

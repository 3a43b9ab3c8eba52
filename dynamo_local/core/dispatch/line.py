"""In which order prefills are pulled: what can keep its target before what cannot, which never starves.

Entries that can keep it are pulled in the order in which they came: their targets are alike, so that is the order of
their deadlines. One whose latest start has passed when its turn comes, while others wait, goes to a second line, behind
all of the first. That line has every `LATE_EVERY`-th turn, and every turn that the first leaves.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

LATE_EVERY = 8
"""Of so many turns in a row, one is for what is late."""

E = TypeVar("E")


def is_late(start_by_s: float | None, now_s: float) -> bool:
    """Whether an entry that has to be begun by then (None: no target) cannot keep its target any more."""
    return start_by_s is not None and start_by_s < now_s


class Turns:
    """Whose turn it is, for one who pulls."""

    def __init__(self) -> None:
        self._since_late = 0

    @property
    def late_first(self) -> bool:
        """Whether what is late has the next turn, if there is any."""
        return self._since_late >= LATE_EVERY - 1

    def pulled(self, *, late: bool) -> None:
        """An entry was taken from that line."""
        self._since_late = 0 if late else self._since_late + 1

    def none_late(self) -> None:
        """It was the turn of what is late, and nothing is: the other line has as many turns again."""
        self._since_late = 0


class PrefillLine(Generic[E]):
    """Both lines in one place, as the prefill queue keeps them on its server."""

    def __init__(self) -> None:
        self._first: deque[tuple[E, float | None]] = deque()
        self._late: deque[E] = deque()

    def __len__(self) -> int:
        return len(self._first) + len(self._late)

    def __bool__(self) -> bool:
        return bool(self._first or self._late)

    @property
    def late(self) -> int:
        """Entries in the second line."""
        return len(self._late)

    def append(self, entry: E, start_by_s: float | None) -> None:
        """One more; `start_by_s` None: it has no target."""
        self._first.append((entry, start_by_s))

    def remove(self, entry: E) -> None:
        """It is not wanted any more. ValueError if it is not here."""
        for place, (each, _) in enumerate(self._first):
            if each is entry:
                del self._first[place]
                return
        self._late.remove(entry)

    def popleft(self, turns: Turns, now_s: float) -> E:
        """The next one. IndexError if there is none."""
        if self._late and turns.late_first:
            turns.pulled(late=True)
            return self._late.popleft()
        while self._first:
            entry, start_by_s = self._first.popleft()
            if not (self._first and is_late(start_by_s, now_s)):
                turns.pulled(late=False)
                return entry
            self._late.append(entry)
        turns.pulled(late=True)
        return self._late.popleft()

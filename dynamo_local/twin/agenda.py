"""What happens next, in an order that depends on nothing but the time and what it is."""

from __future__ import annotations

import enum
import heapq


class What(enum.IntEnum):
    """Kinds of events, in the order in which those of one instant happen."""

    ENGINE = 0
    """An engine's schedule has something to tell; `index` is the instance."""
    PULLED = 1
    """KV has arrived; `index` is the request."""
    EXIT = 2
    """A leaving process may be done; `index` is the instance."""
    DEADLINE = 3
    """Something that the shell of the fleet waits for is due."""
    STARTED = 4
    """A process is ready to serve; `index` is the instance."""
    FLIPPED = 5
    """A process has registered in its new role; `index` is the instance."""
    ORDERED = 6
    """A process has carried out an order to sleep or to wake; `index` is the instance."""
    PREFILL_DEADLINE = 7
    """A request has waited for its remote prefill long enough; `index` is the request."""
    REQUEST_DEADLINE = 8
    """A client has waited long enough; `index` is the request."""
    ROUND = 9
    """The planner looks."""
    ARRIVAL = 10
    """The next request comes."""


Item = tuple[float, int, int]
"""(at_s, What, index)"""


class Agenda:
    """A heap of `(at_s, what, index)`. Ties are broken by what and index, never by who asked first: advancing many
    passes as one event must not change any order."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[Item] = []

    def add(self, at_s: float, what: What, index: int = 0) -> None:
        """One more. The same one twice is allowed."""
        heapq.heappush(self._heap, (at_s, int(what), index))

    @property
    def next_at_s(self) -> float | None:
        """When the next one is; None: never."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Item:
        """The next one. IndexError if there is none."""
        return heapq.heappop(self._heap)

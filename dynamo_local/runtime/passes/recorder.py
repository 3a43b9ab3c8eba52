"""What a worker keeps of its engine's passes until somebody asks: the last two thousand of each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile

from dynamo_local.core.passes import ForwardPass

KEPT_PASSES = 2048
"""Ten seconds of an engine that makes two hundred a second: a planner asks every five."""


class PassRecorder:
    """`ports.PassSink`. `at_s` of what is recorded is on the worker's clock; the worker id is filled in by who tells.

    `listeners` are called with each pass; `refresh` is called before the passes are read, so that an engine can record
    what has ended meanwhile.
    """

    def __init__(self) -> None:
        self.worker_id: str | None = None
        """Where it is not the worker's own instance id: a command registers itself."""
        self._ranks: dict[int, deque[ForwardPass]] = {}
        self.missed: dict[int, int] = {}
        """By rank: passes that never came, as the gaps in their numbers show."""
        self.listeners: list[Callable[[ForwardPass], None]] = []
        self.refresh: Callable[[], None] = lambda: None

    def record(self, passed: ForwardPass) -> None:
        """Keep it. A number below the last one: the engine was started again, and everything begins anew."""
        rank = passed.engine.dp_rank
        kept = self._ranks.setdefault(rank, deque(maxlen=KEPT_PASSES))
        if kept:
            ahead = passed.counter_id - kept[-1].counter_id - 1
            if ahead < -1:
                kept.clear()
            elif ahead > 0:
                self.missed[rank] = self.missed.get(rank, 0) + ahead
        kept.append(passed)
        for listener in self.listeners:
            listener(passed)

    def since(self, after: Mapping[int, int], most: int) -> list[ForwardPass]:
        """Of each rank what came after the pass with that number (by rank; all of a rank that is not in it), oldest
        first: at most `most` passes, evenly spread, and a heartbeat only where it is the last of all."""
        self.refresh()
        return [passed for rank, kept in self._ranks.items() for passed in _newer(kept, after.get(rank, -1), most)]

    def last(self) -> ForwardPass | None:
        """The latest of all ranks."""
        ends = [kept[-1] for kept in self._ranks.values() if kept]
        return max(ends, key=lambda passed: passed.at_s) if ends else None


def _newer(kept: deque[ForwardPass], after: int, most: int) -> list[ForwardPass]:
    if not kept:
        return []
    last = kept[-1]
    anew = after > last.counter_id
    newest_first = takewhile(lambda passed: anew or passed.counter_id > after, reversed(kept))
    passes = [passed for passed in newest_first if not passed.heartbeat][::-1]
    if len(passes) > most:
        passes = [passes[(n + 1) * len(passes) // most - 1] for n in range(most)]
    return [*passes, last] if last.heartbeat else passes

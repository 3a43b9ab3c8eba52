"""Streams that share decode workers: whose mean gap between tokens is within the target. Pure.

All streams of a worker get their tokens in the same passes, so a worker is one count of passes: a stream that comes at
pass V with n tokens ends at V + n, and its mean gap is the time from one to the other over n. Between two events a pass
takes what the engine says of the KV that is in use in the middle between them.

This is where a planner's processor time goes, so nothing is computed twice: what a worker takes until its next end is
kept until it changes, and only workers of which a stream has ended are looked at before a choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine

WARM_UP = 0.15
"""Share of the streams at the beginning that only fill the workers, and are not judged."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams by the time at which their prefill is done: `(seconds, prompt tokens, tokens yet to come)`."""

    came: tuple[tuple[float, int, int], ...]

    @classmethod
    def of(cls, demand: Demand, times: Sequence[float]) -> Streams:
        """Those of this demand, each from its time (seconds) on: a burst of prompts is no burst of streams."""
        rows = sorted(zip(times, demand.isl, demand.osl, strict=True))
        return cls(tuple((at_s, isl, max(1, osl - 1)) for at_s, isl, osl in rows))

    @property
    def judged_from(self) -> int:
        """The first one that is judged."""
        return int(len(self.came) * WARM_UP)

    @property
    def judged(self) -> int:
        """So many are judged."""
        return len(self.came) - self.judged_from


def decode_share(demand: Demand, times: Sequence[float], workers: int, engine: Engine, itl_s: float) -> float:
    """Share of the streams that keep `itl_s` seconds in the mean, and that need not wait for KV. `times`: when each
    request's prefill is done (seconds)."""
    return Run(Streams.of(demand, times), workers, engine, itl_s).share()


class Run:
    """So many workers with these streams, as far as somebody wanted to know it."""

    def __init__(self, streams: Streams, workers: int, engine: Engine, itl_s: float) -> None:
        self._streams = streams
        self._left = enumerate(streams.came)
        self._tally = _Tally()
        self._fleet = [_Worker(engine, itl_s, self._tally) for _ in range(workers)]
        self._go_on = self._in_turn if engine.options.turns else self._least_loaded
        self._loads = [0.0] * workers
        self._due: list[tuple[float, int]] = [(math.inf, -1)]
        """When a worker's next stream ends. An entry that is not the worker's any more counts for nothing."""

    def share(self, least: float = 0.0) -> float:
        """Of the streams, those that are kept (`decode_share`); or -1, as soon as it cannot be `least` any more. Asked
        again, it goes on from there."""
        judged = self._streams.judged
        if not judged:
            return 1.0
        most = judged - _fewest(judged, least)
        if self._tally.missed <= most and self._go_on(most):
            for each in self._fleet:
                each.finish()
        return self._tally.kept / judged if self._tally.missed <= most else -1.0

    def _in_turn(self, most: int) -> bool:
        """False where more than `most` are missed."""
        judged_from, tally, fleet = self._streams.judged_from, self._tally, self._fleet
        for number, (at_s, isl, tokens) in self._left:
            worker = fleet[number % len(fleet)]
            worker.advance(at_s)
            worker.take(at_s, isl, tokens, number >= judged_from)
            if tally.missed > most:
                return False
        return True

    def _least_loaded(self, most: int) -> bool:
        """False where more than `most` are missed."""
        judged_from, tally, fleet = self._streams.judged_from, self._tally, self._fleet
        loads, due = self._loads, self._due
        for number, (at_s, isl, tokens) in self._left:
            if due[0][0] <= at_s:  # of all others the load is what it was
                self._end_until(at_s)
            index = loads.index(min(loads))
            worker = fleet[index]
            before_s = worker.due_s
            worker.advance(at_s)
            worker.take(at_s, isl, tokens, number >= judged_from)
            loads[index] = worker.load
            if worker.due_s != before_s:
                heappush(due, (worker.due_s, index))
            if tally.missed > most:
                return False
        return True

    def _end_until(self, at_s: float) -> None:
        """Bring the workers of which a stream ends by then to that moment."""
        due, ended = self._due, []
        while due[0][0] <= at_s:
            due_s, index = heappop(due)
            worker = self._fleet[index]
            if worker.due_s == due_s:
                worker.advance(at_s)
                self._loads[index] = worker.load
                ended.append((worker.due_s, index))
        for entry in ended:
            heappush(due, entry)


class _Tally:
    """Streams that were kept, and that were missed."""

    __slots__ = ("kept", "missed")

    def __init__(self) -> None:
        self.kept = self.missed = 0


def _fewest(judged: int, least: float) -> int:
    """So many of them are `least` of them."""
    kept = max(0, math.ceil(least * judged) - 2)  # it may be rounded
    while kept < judged and kept / judged < least:
        kept += 1
    return kept


class _Worker:
    """One decode engine. `now_s` is where it has been brought to, and `due_s` when its next stream ends, if no other
    comes before; `passes` are counted in fractions."""

    __slots__ = (
        "_itl_s", "_max_kv", "_max_seqs", "_pass_s", "_tally", "_took_s", "_waiting",
        "due_s", "kv", "load", "now_s", "passes", "streams",
    )  # fmt: skip

    def __init__(self, engine: Engine, itl_s: float, tally: _Tally) -> None:
        self._itl_s, self._tally = itl_s, tally
        self._pass_s: Callable[[float, float], float] = engine.itl_s
        self._max_kv, self._max_seqs = engine.max_kv_tokens, engine.options.max_num_seqs
        self._waiting: deque[tuple[int, int]] = deque()
        self.streams: list[tuple[float, float, int, int, bool]] = []
        self.now_s = self.passes = self.kv = self.load = 0.0
        self.due_s = math.inf
        self._took_s: float | None = None
        """From `now_s` to the next end; None where something has changed since."""

    def take(self, at_s: float, isl: int, tokens: int, judged: bool) -> None:
        """A stream of so many tokens yet to come, whose prompt has `isl`. Bring it to `at_s` first."""
        streams = self.streams
        self.load += isl + tokens / 2
        if streams and (self._waiting or self.kv + isl > self._max_kv or len(streams) >= self._max_seqs):
            self._waiting.append((isl, tokens))
            self._tally.missed += judged
            return
        heappush(streams, (self.passes + tokens, at_s, isl, tokens, judged))
        self.kv += isl
        self._took_s = took_s = self._to_next_s()
        self.due_s = self.now_s + took_s

    def advance(self, to_s: float) -> None:
        """Bring it to that moment."""
        streams = self.streams
        while streams:
            took_s = self._took_s
            if took_s is None:
                took_s = self._to_next_s()
            if self.now_s + took_s > to_s:
                if to_s > self.now_s:
                    done = (streams[0][0] - self.passes) * (to_s - self.now_s) / took_s if took_s > 0 else 0.0
                    self.passes += done
                    self.kv += len(streams) * done
                    self._took_s = None
                self.now_s = to_s
                return
            self.now_s += took_s
            self._end()
            if streams:
                self._took_s = took_s = self._to_next_s()
                self.due_s = self.now_s + took_s
            else:
                self._took_s, self.due_s = None, math.inf
        self.now_s = to_s

    def _to_next_s(self) -> float:
        """How long its passes take until the next stream ends."""
        streams, passes = self.streams, self.passes
        count = len(streams)
        ahead = streams[0][0] - passes
        kv = self.kv + count * ahead / 2
        return ahead * self._pass_s(kv, kv / count)

    def finish(self) -> None:
        """Until the last stream has ended."""
        while self.streams:
            self.now_s += self._to_next_s() if self._took_s is None else self._took_s
            self._took_s = None
            self._end()

    def _end(self) -> None:
        """The next stream, at `now_s`."""
        streams = self.streams
        ahead = streams[0][0] - self.passes
        self.passes += ahead
        self.kv += len(streams) * ahead
        _, began_s, isl, tokens, judged = heappop(streams)
        self.kv = self.kv - isl - tokens if streams else 0.0
        self.load -= isl + tokens / 2
        if judged:
            if self.now_s - began_s <= self._itl_s * tokens * (1 + 1e-9):
                self._tally.kept += 1
            else:
                self._tally.missed += 1
        waiting = self._waiting
        while waiting and not (streams and (self.kv + waiting[0][0] > self._max_kv or len(streams) >= self._max_seqs)):
            isl, tokens = waiting.popleft()
            heappush(streams, (self.passes + tokens, self.now_s, isl, tokens, False))
            self.kv += isl

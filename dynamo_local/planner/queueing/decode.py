"""Streams that share decode workers: whose mean gap between tokens is within the target. Pure.

All streams of a worker get their tokens in the same passes, so a worker is one count of passes: a stream that comes at
pass V with n tokens ends at V + n, and its mean gap is the time from one to the other over n. Between two events a pass
takes what the engine says of the KV that is in use in the middle between them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine

WARM_UP = 0.15
"""Share of the streams at the beginning that only fill the workers, and are not judged."""


def decode_share(demand: Demand, times: Sequence[float], workers: int, engine: Engine, itl_s: float) -> float:
    """Share of the streams that keep `itl_s` seconds in the mean, and that need not wait for KV. `times`: when each
    request's prefill is done (seconds): a burst of prompts is no burst of streams."""
    fleet = [_Worker(engine, itl_s) for _ in range(workers)]
    judged_from = int(len(times) * WARM_UP)
    turns = engine.options.turns
    for number, (at_s, isl, osl) in enumerate(sorted(zip(times, demand.isl, demand.osl, strict=True))):
        if turns:
            worker = fleet[number % workers]
        else:
            for each in fleet:
                if each.due_s <= at_s:  # until then its load is what it was
                    each.advance(at_s)
            worker = min(fleet, key=_load)
        worker.advance(at_s)
        worker.take(at_s, isl, max(1, osl - 1), number >= judged_from)
    for each in fleet:
        each.finish()
    judged = sum(each.judged for each in fleet)
    return sum(each.kept for each in fleet) / judged if judged else 1.0


def _load(worker: _Worker) -> float:
    return worker.load


class _Worker:
    """One decode engine. `now_s` is where it has been brought to, and `due_s` when its next stream ends, if no other
    comes before; `passes` are counted in fractions."""

    __slots__ = (
        "_engine", "_itl_s", "_max_kv", "_max_seqs", "_waiting",
        "due_s", "judged", "kept", "kv", "load", "now_s", "passes", "streams",
    )  # fmt: skip

    def __init__(self, engine: Engine, itl_s: float) -> None:
        self._engine, self._itl_s = engine, itl_s
        self._max_kv, self._max_seqs = engine.max_kv_tokens, engine.options.max_num_seqs
        self._waiting: deque[tuple[float, int, int, bool]] = deque()
        self.streams: list[tuple[float, float, int, int, bool]] = []
        self.now_s = self.passes = self.kv = self.load = 0.0
        self.due_s = math.inf
        self.kept = self.judged = 0

    def take(self, at_s: float, isl: int, tokens: int, judged: bool) -> None:
        """A stream of so many tokens yet to come, whose prompt has `isl`. Bring it to `at_s` first."""
        self.judged += judged
        self.load += isl + tokens / 2
        if self._waiting or not self._fits(isl):
            self._waiting.append((at_s, isl, tokens, False))
            return
        self._start(at_s, isl, tokens, judged)
        self._put_due()

    def _fits(self, isl: int) -> bool:
        if not self.streams:
            return True
        return self.kv + isl <= self._max_kv and len(self.streams) < self._max_seqs

    def _start(self, at_s: float, isl: int, tokens: int, judged: bool) -> None:
        heappush(self.streams, (self.passes + tokens, at_s, isl, tokens, judged))
        self.kv += isl

    def advance(self, to_s: float) -> None:
        """Bring it to that moment."""
        streams, engine = self.streams, self._engine
        while streams:
            count = len(streams)
            ahead = streams[0][0] - self.passes
            kv = self.kv + count * ahead / 2
            took_s = ahead * engine.itl_s(kv, kv / count)
            if self.now_s + took_s > to_s:
                done = ahead * (to_s - self.now_s) / took_s if took_s > 0 else 0.0
                self.passes += done
                self.kv += count * done
                self.now_s = to_s
                return
            self.now_s += took_s
            self.passes += ahead
            self.kv += count * ahead
            self._end()
            self._put_due()
        self.now_s = to_s

    def _put_due(self) -> None:
        streams = self.streams
        if not streams:
            self.due_s = math.inf
            return
        count = len(streams)
        ahead = streams[0][0] - self.passes
        kv = self.kv + count * ahead / 2
        self.due_s = self.now_s + ahead * self._engine.itl_s(kv, kv / count)

    def finish(self) -> None:
        """Until the last stream has ended."""
        while self.streams:
            count = len(self.streams)
            ahead = self.streams[0][0] - self.passes
            kv = self.kv + count * ahead / 2
            self.now_s += ahead * self._engine.itl_s(kv, kv / count)
            self.passes += ahead
            self.kv += count * ahead
            self._end()

    def _end(self) -> None:
        _, began_s, isl, tokens, judged = heappop(self.streams)
        self.kv = self.kv - isl - tokens if self.streams else 0.0
        self.load -= isl + tokens / 2
        self.kept += judged and self.now_s - began_s <= self._itl_s * tokens * (1 + 1e-9)
        while self._waiting and self._fits(self._waiting[0][1]):
            _, isl, tokens, judged = self._waiting.popleft()
            self._start(self.now_s, isl, tokens, judged)

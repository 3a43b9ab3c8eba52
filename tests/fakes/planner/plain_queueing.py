"""The queueing model as plainly as it can be said: every worker is brought to every moment, and nothing is remembered.

The shipped model's results for the same requests must be equal to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from dynamo_local.planner.queueing import CONTEXTS, KV_STEPS, Demand, Engine, EngineOptions, Passes, Streams

WARM_UP = 0.15
FULL, LOST = 0.001, 0.25


class PlainEngine:
    """Decode passes by the profile, linear between the points of a table."""

    def __init__(self, passes: Passes, options: EngineOptions) -> None:
        self.options = options
        self.max_kv_tokens = options.max_kv_tokens or passes.max_kv_tokens
        self._passes = passes

    def _at(self, column: int, row: int) -> float:
        kv_tokens = int(column * (self.max_kv_tokens / KV_STEPS))
        return self._passes.itl_s(kv_tokens, CONTEXTS[row]) * self.options.decode_factor

    def itl_s(self, kv_tokens: float, context: float) -> float:
        row = max((row for row in range(len(CONTEXTS) - 1) if CONTEXTS[row] <= context), default=0)
        share = min(max((context - CONTEXTS[row]) / (CONTEXTS[row + 1] - CONTEXTS[row]), 0.0), 1.0)
        at = min(kv_tokens / (self.max_kv_tokens / KV_STEPS), KV_STEPS)
        column = int(at)
        part = at - column
        short = self._at(column, row) + (self._at(column + 1, row) - self._at(column, row)) * part
        long = self._at(column, row + 1) + (self._at(column + 1, row + 1) - self._at(column, row + 1)) * part
        return short + (long - short) * share


class _PlainWorker:
    def __init__(self, engine: PlainEngine, itl_s: float) -> None:
        self.engine, self.itl_s = engine, itl_s
        self.waiting: deque[tuple[float, int, int, bool]] = deque()
        self.streams: list[tuple[float, float, int, int, bool]] = []
        self.now_s = self.passes = self.kv = self.load = 0.0
        self.due_s = float("inf")
        self.kept = self.judged = 0
        self.full = False

    def begin(self, isl: int, tokens: int, left: float) -> None:
        if not self.fits(isl + tokens - left):
            self.full = True
        if not self.full:
            heappush(self.streams, (left, 0.0, isl, tokens, False))
            self.kv += isl + tokens - left
            self.load += isl + tokens / 2
            self.put_due()

    def take(self, at_s: float, isl: int, tokens: int, judged: bool) -> None:
        self.judged += judged
        self.load += isl + tokens / 2
        if self.waiting or not self.fits(isl):
            self.waiting.append((at_s, isl, tokens, False))
            return
        self.start(at_s, isl, tokens, judged)
        self.put_due()

    def fits(self, isl: float) -> bool:
        room = self.kv + isl <= self.engine.max_kv_tokens and len(self.streams) < self.engine.options.max_num_seqs
        return not self.streams or room

    def start(self, at_s: float, isl: int, tokens: int, judged: bool) -> None:
        heappush(self.streams, (self.passes + tokens, at_s, isl, tokens, judged))
        self.kv += isl

    def next(self) -> tuple[float, float]:
        count = len(self.streams)
        ahead = self.streams[0][0] - self.passes
        kv = self.kv + count * ahead / 2
        return ahead, ahead * self.engine.itl_s(kv, kv / count)

    def put_due(self) -> None:
        self.due_s = self.now_s + self.next()[1] if self.streams else float("inf")

    def advance(self, to_s: float) -> None:
        while self.streams:
            count = len(self.streams)
            ahead, took_s = self.next()
            if self.now_s + took_s > to_s:
                done = ahead * (to_s - self.now_s) / took_s if took_s > 0 else 0.0
                self.passes += done
                self.kv += count * done
                break
            self.end(ahead, took_s)
            self.put_due()
        self.now_s = to_s

    def finish(self) -> None:
        count = len(self.streams)
        for end, began_s, _, tokens, judged in self.streams:
            at_s = self.now_s + (end - self.passes) * self.engine.itl_s(self.kv, self.kv / count)
            self.kept += judged and at_s - began_s <= self.itl_s * tokens * (1 + 1e-9)

    def end(self, ahead: float, took_s: float) -> None:
        self.now_s += took_s
        self.passes += ahead
        self.kv += len(self.streams) * ahead
        _, began_s, isl, tokens, judged = heappop(self.streams)
        self.kv = self.kv - isl - tokens if self.streams else 0.0
        self.load -= isl + tokens / 2
        self.kept += judged and self.now_s - began_s <= self.itl_s * tokens * (1 + 1e-9)
        while self.waiting and self.fits(self.waiting[0][1]):
            _, isl, tokens, judged = self.waiting.popleft()
            self.start(self.now_s, isl, tokens, judged)


def steady_share(
    demand: Demand, times: Sequence[float], workers: int, engine: PlainEngine, itl_s: float, model: Engine
) -> float:
    """As `Run` of steady streams. Those that run at the beginning are by the shipped `model`."""
    fleet = [_PlainWorker(engine, itl_s) for _ in range(workers)]
    streams = Streams.of(demand, times, steady=True)
    begun = [0.0] * workers
    for number, (isl, tokens, left) in enumerate(streams.running(workers, model, slower=1.0)):
        index = number % workers if engine.options.turns else begun.index(min(begun))
        begun[index] += isl + tokens / 2
        fleet[index].begin(isl, tokens, left)
    judged_from = int(len(times) * WARM_UP)
    for number, (at_s, isl, osl) in enumerate(sorted(zip(times, demand.isl, demand.osl, strict=True))):
        if engine.options.turns:
            worker = fleet[number % workers]
        else:
            for each in fleet:
                if each.due_s <= at_s:
                    each.advance(at_s)
            worker = min(fleet, key=lambda each: each.load)
        worker.advance(at_s)
        worker.take(at_s, isl, max(1, osl - 1), number >= judged_from)
    for each in fleet:
        each.finish()
    judged = sum(each.judged for each in fleet)
    return sum(each.kept for each in fleet) / judged if judged else 1.0


def done_at(times: Sequence[float], took_s: Sequence[float], workers: int) -> list[float]:
    """As `queueing.prefill.done_at`, of prompts that take so long, one at a time on each worker."""
    free, done = [0.0] * workers, []
    for at_s, prompt_s in zip(times, took_s, strict=True):
        done.append(max(at_s, free[0]) + prompt_s)
        heapreplace(free, done[-1])
    return done


def monotone(of: Callable[[int], float], workers_max: int) -> tuple[float, ...]:
    """Shares of 0 to `workers_max` workers, of which only those are computed that matter."""
    best = of(workers_max)
    low, high = 0, workers_max
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if of(middle) >= best - FULL else (middle, high)
    shares = [0.0] * high + [best] * (workers_max + 1 - high)
    for workers in range(high - 1, 0, -1):
        shares[workers] = min(of(workers), shares[workers + 1])
        if shares[workers] < LOST * best:
            break
    return tuple(shares)

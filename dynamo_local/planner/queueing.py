"""Streams that share decode workers: whose mean gap between tokens is within the target. Pure.

All streams of a worker get their tokens in the same passes, so a worker is one count of passes. A stream that comes at
pass V with n tokens ends at V + n. Its mean gap is the time from one to the other over n. The pass time between two
events is that of the KV in use in the middle between them.

Most of a planner's processor time goes here, so nothing is computed twice. The time until a worker's next end is kept
until it changes. Only workers with an ended stream are looked at before a choice.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import Protocol

# --- demand
# The demand on the workers: requests with their own lengths, in the bursts in which they come. Pure.


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of a stretch of time, as they came, brought to one request per second in the mean.

    `gaps` are the seconds from each request to the next at that rate; `isl` and `osl` its tokens. At λ requests per
    second they come as `times(λ)`: the same bursts, denser.
    """

    gaps: tuple[float, ...]
    isl: tuple[int, ...]
    osl: tuple[int, ...]

    def times(self, rate: float) -> list[float]:
        """Seconds at which they come, at `rate` requests per second."""
        return [at / rate for at in accumulate(self.gaps)]


# --- engine
# The times of an engine, by its profile and its corrections. Pure; seconds and tokens.

PROMPT_STEP = 128
"""Prompt lengths are looked up in steps of so many tokens: the profile has seventeen points."""
PROMPTS_KEPT = 8
"""The prompt times of so many demands are cached."""
KV_STEPS = 96
CONTEXTS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536)
"""Between two of these, and of `KV_STEPS` + 1 points of KV in use, the time of a decode pass is linear."""


class Passes(Protocol):
    """`profiles.ProfileModel`."""

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds."""
        ...

    def ttft_s(self, prompt_tokens: int) -> float:
        """Seconds of a prefill of so many tokens, alone."""
        ...

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        """Seconds of a decode pass."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines are used. `batched_tokens`: prompt tokens of one prefill pass, which prompts share where `batches`
    (else one prompt at a time). `turns`: workers are taken in turn (round robin); else a prefill goes to the first
    that is free, and a stream to where the least KV is in use. `prefill_factor` and `decode_factor` are what was
    measured over what the profile says. `mixed`: the workers are aggregated, and do both."""

    batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_kv_tokens: int = 0
    batches: bool = False
    turns: bool = False
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    mixed: bool = False


class Engine:
    """Times of passes, from tables: the queueing model asks tens of thousands of times."""

    def __init__(self, passes: Passes, options: EngineOptions) -> None:
        self.options = options
        self.max_kv_tokens = options.max_kv_tokens or passes.max_kv_tokens
        self.prompts_s = lru_cache(maxsize=PROMPTS_KEPT)(self._prompts_s)
        """Seconds of each of these prompts: the same ones are asked for again and again."""
        factor = options.prefill_factor
        steps = options.batched_tokens // PROMPT_STEP + 2
        self._prefill = [passes.ttft_s(max(1, step * PROMPT_STEP)) * factor for step in range(steps)]
        kv_step = self.max_kv_tokens / KV_STEPS
        rows = [
            [passes.itl_s(int(column * kv_step), context) * options.decode_factor for column in range(KV_STEPS + 2)]
            for context in CONTEXTS
        ]
        self.itl_s = _decode_pass(rows, kv_step)
        """Seconds of a decode pass with so many tokens of KV in use, so many of them per stream."""

    def pass_s(self, tokens: int) -> float:
        """Seconds of a prefill pass of so many prompt tokens, at most `batched_tokens`."""
        step, rest = divmod(tokens, PROMPT_STEP)
        low = self._prefill[step]
        return low + (self._prefill[step + 1] - low) * rest / PROMPT_STEP

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a whole prompt, in as many passes as it takes."""
        full, rest = divmod(tokens, self.options.batched_tokens)
        return full * self.pass_s(self.options.batched_tokens) + (self.pass_s(rest) if rest else 0.0)

    def _prompts_s(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(self.prompt_s(each) for each in tokens)


def _decode_pass(rows: Sequence[Sequence[float]], kv_step: float) -> Callable[[float, float], float]:
    """A function with all that it needs at hand: nothing is asked as often."""
    rises = [[high - low for low, high in pairwise(row)] for row in rows]
    cells = [
        (float(short), float(long - short), rows[row], rises[row], rows[row + 1], rises[row + 1])
        for row, (short, long) in enumerate(pairwise(CONTEXTS))
    ]
    by_context = [cells[0], *cells, cells[-1]]

    def itl_s(kv_tokens: float, context: float) -> float:
        from_context, width, shorts, short_rises, longs, long_rises = by_context[bisect_right(CONTEXTS, context)]
        at = kv_tokens / kv_step
        if at > KV_STEPS:
            at = KV_STEPS
        column = int(at)
        part = at - column
        short = shorts[column] + short_rises[column] * part
        share = (context - from_context) / width
        if share <= 0:
            return short
        long = longs[column] + long_rises[column] * part
        if share >= 1:
            share = 1.0
        return short + (long - short) * share

    return itl_s


WARM_UP = 0.15
"""Share of the streams at the beginning that only fill the workers, and are not judged."""
STEADY_ROUNDS = 16
"""After so many rounds, the gap between tokens and the number of streams that it makes agree."""
PROMPTS_SHARE_MAX = 0.95
"""A worker's share of time for prompts is taken to be at most this much."""


Running = tuple[int, int, float]
"""A stream that runs: tokens of its prompt, tokens after the first one, and how many of these are yet to come."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams by the time at which their prefill is done: `(seconds, prompt tokens, tokens yet to come)`. Those before
    `judged_from` only fill the workers. `steady`: as many came before them, and the workers begin as full as that
    makes them. Else they begin empty."""

    came: tuple[tuple[float, int, int], ...]
    judged_from: int
    steady: bool = False

    @classmethod
    def of(cls, demand: Demand, times: Sequence[float], *, steady: bool = False) -> Streams:
        """Those of this demand, each from its time (seconds) on: a burst of prompts is no burst of streams."""
        rows = sorted(zip(times, demand.isl, demand.osl, strict=True))
        came = tuple((at_s, isl, max(0, osl - 1)) for at_s, isl, osl in rows)
        return cls(came, int(len(rows) * WARM_UP), steady)

    @property
    def judged(self) -> int:
        """So many are judged."""
        return len(self.came) - self.judged_from

    @property
    def lasted_s(self) -> float:
        """Seconds from the first to the last of them."""
        return self.came[-1][0] - self.came[0][0] if self.came else 0.0

    def slower(self, workers: int, engine: Engine) -> float:
        """How many times as long a decode pass takes in the mean, because aggregated workers compute prompts too."""
        if not engine.options.mixed or not self.lasted_s:
            return 1.0
        prompts_s = sum(engine.prompts_s(tuple(isl for _, isl, _ in self.came)))
        return 1.0 / (1.0 - min(prompts_s / self.lasted_s / workers, PROMPTS_SHARE_MAX))

    def running(self, workers: int, engine: Engine, slower: float) -> Iterator[Running]:
        """Those that run at the beginning; none unless `steady`. Passes take `slower` times as long as without prompts.

        They are the rate times how long a stream lasts (Little's law), which depends on how many there are; no more
        than fit. A long stream is among them in proportion to its length, at any of its tokens.
        """
        if not self.steady or not self.lasted_s:
            return
        ends = list(accumulate(tokens for _, _, tokens in self.came))
        if not ends[-1]:
            return
        context = sum(tokens * (isl + tokens / 2) for _, isl, tokens in self.came) / ends[-1]
        tokens_per_s, gap_s = ends[-1] / self.lasted_s, 0.0
        for _ in range(STEADY_ROUNDS):
            gap_s = slower * engine.itl_s(gap_s * tokens_per_s / workers * context, context)
        count = min(round(gap_s * tokens_per_s), workers * engine.options.max_num_seqs)
        for number in range(count):
            at = (number + 0.5) / count * ends[-1]
            index = bisect_right(ends, at)
            _, isl, tokens = self.came[index]
            yield isl, tokens, ends[index] - at


def decode_share(demand: Demand, times: Sequence[float], workers: int, engine: Engine, itl_s: float) -> float:
    """Share of the streams that keep `itl_s` seconds in the mean, and that need not wait for KV. `times`: when each
    request's prefill is done (seconds)."""
    return Run(Streams.of(demand, times), workers, engine, itl_s).share()


class Run:
    """So many workers with these streams, as far as somebody wanted to know it. With `ttft_s` the workers are
    aggregated: the streams are requests by their arrival, whose first token must come within it."""

    def __init__(
        self, streams: Streams, workers: int, engine: Engine, itl_s: float, ttft_s: float | None = None
    ) -> None:
        self._streams = streams
        self._left = enumerate(streams.came)
        self._tally = _Tally()
        self._fleet = [
            _Worker(engine, itl_s, self._tally) if ttft_s is None else _Mixed(engine, itl_s, self._tally, ttft_s)
            for _ in range(workers)
        ]
        self._go_on = self._in_turn if engine.options.turns else self._least_loaded
        self._slower = streams.slower(workers, engine)
        for worker, running in zip(self._fleet, self._running(engine), strict=True):
            worker.begin(running)
        self._loads = [each.load for each in self._fleet]
        self._due = [(math.inf, -1), *((each.due_s, index) for index, each in enumerate(self._fleet))]
        """When a worker's next stream ends. An entry that is not the worker's any more counts for nothing."""
        heapify(self._due)

    def _running(self, engine: Engine) -> Sequence[Sequence[Running]]:
        """Those that run at the beginning, by worker."""
        workers = len(self._fleet)
        running = list(self._streams.running(workers, engine, self._slower))
        if engine.options.turns:
            return [running[first::workers] for first in range(workers)]
        loads = [(0.0, index) for index in range(workers)]
        found: list[list[Running]] = [[] for _ in loads]
        for isl, tokens, left in running:
            load, index = loads[0]
            found[index].append((isl, tokens, left))
            heapreplace(loads, (load + isl + tokens / 2, index))
        return found

    def share(self, least: float = 0.0) -> float:
        """The number of streams that keep the target (`decode_share`); or -1, as soon as it cannot be `least` any more.
        Asked again, it goes on from there."""
        judged = self._streams.judged
        if not judged:
            return 1.0
        most = judged - _fewest(judged, least)
        if self._tally.missed <= most and self._go_on(most):
            for each in self._fleet:
                each.finish(self._slower)
        return self._tally.kept / judged if self._tally.missed <= most else -1.0

    @property
    def missed(self) -> Sequence[int]:
        """The numbers of the judged streams that missed the target, after `share`."""
        return self._tally.numbers

    def _in_turn(self, most: int) -> bool:
        """False where more than `most` are missed."""
        judged_from, tally, fleet = self._streams.judged_from, self._tally, self._fleet
        for number, (at_s, isl, tokens) in self._left:
            worker = fleet[number % len(fleet)]
            worker.advance(at_s)
            worker.take(at_s, isl, tokens, number if number >= judged_from else -1)
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
            worker.take(at_s, isl, tokens, number if number >= judged_from else -1)
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
    """Judged streams: how many were kept, how many were missed, and the numbers of the missed ones."""

    __slots__ = ("kept", "missed", "numbers")

    def __init__(self) -> None:
        self.kept = self.missed = 0
        self.numbers: list[int] = []

    def miss(self, number: int) -> None:
        self.missed += 1
        self.numbers.append(number)


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
        self.streams: list[tuple[float, float, int, int, int]] = []
        self.now_s = self.passes = self.kv = self.load = 0.0
        self.due_s = math.inf
        self._took_s: float | None = None
        """From `now_s` to the next end; None where something has changed since."""

    def take(self, at_s: float, isl: int, tokens: int, number: int) -> None:
        """A stream of so many tokens yet to come, whose prompt has `isl`. A `number` below 0 is not judged. Bring the
        worker to `at_s` first."""
        streams = self.streams
        self.load += isl + tokens / 2
        if streams and (self._waiting or self.kv + isl > self._max_kv or len(streams) >= self._max_seqs):
            self._waiting.append((isl, tokens))
            if number >= 0:
                self._tally.miss(number)
            return
        heappush(streams, (self.passes + tokens, at_s, isl, tokens, number))
        self.kv += isl
        self._took_s = took_s = self._to_next_s()
        self.due_s = self.now_s + took_s

    def begin(self, running: Sequence[Running]) -> None:
        """With these streams, as many as fit."""
        for isl, tokens, left in running:
            if self.streams and (self.kv + isl + tokens - left > self._max_kv or len(self.streams) >= self._max_seqs):
                break
            self.streams.append((left, 0.0, isl, tokens, -1))
            self.kv += isl + tokens - left
            self.load += isl + tokens / 2
        if self.streams:
            heapify(self.streams)
            self.due_s = self._to_next_s()

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

    def finish(self, slower: float) -> None:
        """Until the last stream has ended. Others go on to come, so the passes stay as they are; they take `slower`
        times as long as without prompts."""
        if not self.streams:
            return
        pass_s = slower * self._pass_s(self.kv, self.kv / len(self.streams))
        for ends, began_s, _, tokens, number in self.streams:
            if number >= 0:
                self._judge(self.now_s + (ends - self.passes) * pass_s - began_s, tokens, number)
        self.streams.clear()

    def _judge(self, took_s: float, tokens: int, number: int) -> None:
        """A stream that took so long for so many tokens."""
        if took_s <= self._itl_s * tokens * (1 + 1e-9):
            self._tally.kept += 1
        else:
            self._tally.miss(number)

    def _end(self) -> None:
        """The next stream, at `now_s`."""
        streams = self.streams
        ahead = streams[0][0] - self.passes
        self.passes += ahead
        self.kv += len(streams) * ahead
        _, began_s, isl, tokens, number = heappop(streams)
        self.kv = self.kv - isl - tokens if streams else 0.0
        self.load -= isl + tokens / 2
        if number >= 0:
            self._judge(self.now_s - began_s, tokens, number)
        waiting = self._waiting
        while waiting and not (streams and (self.kv + waiting[0][0] > self._max_kv or len(streams) >= self._max_seqs)):
            isl, tokens = waiting.popleft()
            heappush(streams, (self.passes + tokens, self.now_s, isl, tokens, -1))
            self.kv += isl


class _Mixed(_Worker):
    """One aggregated engine. While prompts wait, its passes take prompt tokens besides the next token of each stream.
    Such a pass takes as long as both one after the other. A pass that has begun ends, so `now_s` may be later than the
    moment that it was brought to."""

    __slots__ = ("_computed", "_engine", "_prompts", "_ttft_s")

    def __init__(self, engine: Engine, itl_s: float, tally: _Tally, ttft_s: float) -> None:
        super().__init__(engine, itl_s, tally)
        self._engine, self._ttft_s = engine, ttft_s
        self._prompts: deque[tuple[float, int, int, int]] = deque()
        self._computed = 0
        """Tokens of the first prompt that earlier passes have computed."""

    def take(self, at_s: float, isl: int, tokens: int, number: int) -> None:
        self.load += isl + tokens / 2
        self._prompts.append((at_s, isl, tokens, number))
        self.due_s = min(self.due_s, self.now_s)

    def advance(self, to_s: float) -> None:
        while self.now_s < to_s:
            if self._prompts and self._admits():
                self._mixed_pass()
            elif self.streams:
                super().advance(min(to_s, self.now_s + self._to_next_s()))
            else:
                self.now_s = to_s
        if self._prompts:
            self.due_s = self.now_s
        else:
            self.due_s = self.now_s + self._to_next_s() if self.streams else math.inf

    def finish(self, slower: float) -> None:
        while self._prompts:
            self.advance(self.now_s + 1.0)
        super().finish(slower)

    def _admits(self) -> bool:
        streams = self.streams
        fits = self.kv + self._prompts[0][1] <= self._max_kv and len(streams) < self._max_seqs
        return fits or self._computed > 0 or not streams

    def _mixed_pass(self) -> None:
        """Prompts, and parts of them, as far as one pass takes them; one token for each stream."""
        left, took_s, launch_s, done = self._engine.options.batched_tokens, 0.0, 0.0, []
        streams, prompts, engine = self.streams, self._prompts, self._engine
        kv = self.kv
        while prompts and left and self._admits():
            at_s, isl, tokens, number = prompts[0]
            part = min(left, isl - self._computed)
            if not self._computed:  # prompts that begin in one pass are launched together
                launch_s = engine.pass_s(0)
                took_s -= launch_s
            took_s += engine.prompt_s(self._computed + part) - engine.prompt_s(self._computed)
            left -= part
            self._computed += part
            if self._computed < isl:
                break
            self._computed = 0
            prompts.popleft()
            self.kv += isl
            done.append((at_s, isl, tokens, number))
        if streams:
            took_s += self._pass_s(kv, kv / len(streams))
            self.passes += 1
            self.kv += len(streams)
        self.now_s += took_s + launch_s
        while streams and streams[0][0] <= self.passes:
            self._end()
        for at_s, isl, tokens, number in done:
            if number >= 0 and self.now_s - at_s > self._ttft_s:
                self._tally.miss(number)
                number = -1
            if not tokens:  # the answer is this one token
                self.kv -= isl
                self.load -= isl
                self._tally.kept += number >= 0
                continue
            heappush(streams, (self.passes + tokens, self.now_s, isl, tokens, number))
        self._took_s = None


# --- prefill
# Prompts that wait for prefill workers: when each is done, and who has the first token in time. Pure.


def prefill_share(demand: Demand, rate: float, workers: int, engine: Engine, ttft_s: float, after_s: float) -> float:
    """Share of the prompts that are done, and `after_s` later have a token, within `ttft_s` seconds."""
    times = demand.times(rate)
    return within(times, done_at(times, demand.isl, workers, engine), ttft_s - after_s)


def within(times: Sequence[float], done: Sequence[float], allowed_s: float) -> float:
    """Share of those that were done so soon."""
    return sum(done_s - at_s <= allowed_s for at_s, done_s in zip(times, done, strict=True)) / len(times)


def done_at(times: list[float], isl: tuple[int, ...], workers: int, engine: Engine) -> list[float]:
    """When each of these prompts, which come at those times (seconds, ascending), is done."""
    if not engine.options.turns:
        return _shared(times, engine.prompts_s(isl), workers)
    done = [0.0] * len(times)
    for first in range(min(workers, len(times))):
        done[first::workers] = _alone(times[first::workers], isl[first::workers], engine)
    return done


def _shared(times: list[float], took_s: Sequence[float], workers: int) -> list[float]:
    """One queue, one prompt at a time on each worker. `took_s`: what each takes."""
    free = [0.0] * workers
    done = []
    for at_s, prompt_s in zip(times, took_s, strict=True):
        free_s = free[0]
        done_s = (at_s if at_s > free_s else free_s) + prompt_s
        heapreplace(free, done_s)
        done.append(done_s)
    return done


def _alone(times: list[float], isl: tuple[int, ...], engine: Engine) -> list[float]:
    """One worker with a queue of its own, whose passes take prompts, and parts of them, in their order."""
    if not engine.options.batches:
        return _shared(times, engine.prompts_s(isl), 1)
    limit = engine.options.batched_tokens
    done: list[float] = []
    now_s, index, left = 0.0, 0, 0
    while index < len(times):
        left = left or isl[index]
        now_s = max(now_s, times[index])
        space, ended = limit, 0
        while index < len(times) and space and times[index] <= now_s:
            left = left or isl[index]
            part = min(left, space)
            space, left = space - part, left - part
            if not left:
                ended += 1
                index += 1
        now_s += engine.pass_s(limit - space)
        done += [now_s] * ended
    return done


# --- shares
# How the shares depend on the number of workers, for several rates at once; what was computed once is remembered.
# Pure
# but for that memory.

FULL = 0.001
"""A share that near to that of the largest fleet is as good."""
LOST = 0.25
"""Below this part of it nothing is computed any more: no planner goes there."""
KEPT_MAX = 400


@dataclass(frozen=True, slots=True)
class Shares:
    """For one rate: the shares of requests within TTFT, and within ITL, by the number of workers (0, 1, 2, …)."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]


class Evaluator:
    """Shares for one demand after the other."""

    def __init__(self, engine: Engine, ttft_s: float, itl_s: float) -> None:
        self._engine = engine
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self._after_s = min(itl_s, engine.itl_s(engine.max_kv_tokens / 8, 2048))
        self._known: OrderedDict[tuple[int, float, int], Shares] = OrderedDict()
        self.computed = 0

    def shares(self, demand: Demand, key: int, rate: float, workers_max: int) -> Shares:
        """For 0 to `workers_max` workers. `key` stands for the demand."""
        known = self._known.get((key, rate, workers_max))
        if known is None:
            known = self._known[key, rate, workers_max] = self._computed(demand, rate, workers_max)
            while len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return known

    def misses(self, past: Past, workers_max: int) -> Misses:
        """The requests of this past that each number of workers up to `workers_max` would have missed."""
        return misses(past, workers_max, self._engine, self._ttft_s, self._itl_s)

    def _computed(self, demand: Demand, rate: float, workers_max: int) -> Shares:
        self.computed += 1
        engine, times = self._engine, demand.times(rate)
        if engine.options.mixed:
            requests = Streams.of(demand, times, steady=True)

            def aggregated(workers: int, least: float) -> float:
                if workers not in both:
                    both[workers] = Run(requests, workers, engine, self._itl_s, self._ttft_s)
                return both[workers].share(least)

            both: dict[int, Run] = {}
            return Shares((1.0,) * (workers_max + 1), _monotone(aggregated, workers_max))
        allowed_s = self._ttft_s - self._after_s
        done: dict[int, list[float]] = {}

        def prefill(workers: int, _least: float) -> float:
            done[workers] = done_at(times, demand.isl, workers, engine)
            return within(times, done[workers], allowed_s)

        shares = _monotone(prefill, workers_max)
        # Streams come as the smallest fleet lets them go that is as good as the largest.
        enough = next(workers for workers, share in enumerate(shares) if share >= shares[-1] - FULL)
        first_s = done.get(enough) or done_at(times, demand.isl, max(1, enough), engine)
        streams = Streams.of(demand, first_s, steady=True)
        runs: dict[int, Run] = {}

        def decode(workers: int, least: float) -> float:
            if workers not in runs:
                runs[workers] = Run(streams, workers, engine, self._itl_s)
            return runs[workers].share(least)

        return Shares(shares, _monotone(decode, workers_max))


def _monotone(of: Callable[[int, float], float], workers_max: int) -> tuple[float, ...]:
    """Shares of 0 to `workers_max` workers, of which only those are computed that matter. `of` may say -1 where it is
    less than the second argument."""
    known = {workers_max: of(workers_max, 0.0)}
    best = known[workers_max]
    low, high = 0, workers_max
    while high - low > 1:
        middle = (low + high) // 2
        known[middle] = of(middle, best - FULL)
        if known[middle] >= best - FULL:
            high = middle
        else:
            low = middle
    shares = [0.0] * (workers_max + 1)
    shares[high:] = [best] * (workers_max + 1 - high)
    for workers in range(high - 1, 0, -1):
        share = known.get(workers, -1.0)
        shares[workers] = min(share if share >= 0 else of(workers, 0.0), shares[workers + 1])
        if shares[workers] < LOST * best:
            break
    return tuple(shares)


# --- hindsight
# Requests as they really came, against every number of workers: who would have missed a target. Pure.

HOPELESS = 0.75
"""Where more than this share would miss its target, fewer workers are not looked at: they miss as many, or more."""


@dataclass(frozen=True, slots=True)
class Past:
    """Requests as they came: seconds (ascending), and the tokens of prompt and answer.

    Those before `judged_from_s` only fill the workers. The rest is counted in bins of `bin_s` seconds from then on.
    With `turned` the other shape of the graph is judged as well: aggregated in place of apart, or apart in place of
    aggregated. `decode_factor` is that of the engines in the judgement.
    """

    times: tuple[float, ...]
    isl: tuple[int, ...]
    osl: tuple[int, ...]
    judged_from_s: float
    bin_s: float
    bins: int
    turned: bool = False
    decode_factor: float = 1.0

    def bin(self, at_s: float) -> int:
        """The bin of that moment; below 0, or from `bins` on, where it is not judged."""
        return math.floor((at_s - self.judged_from_s) / self.bin_s)


@dataclass(frozen=True, slots=True)
class Misses:
    """Requests of each bin that would have missed a target, by the number of workers (0, 1, 2, …): `prefill[n][bin]`
    their TTFT, `decode[n][bin]` their ITL. `requests` are all of each bin."""

    requests: tuple[int, ...]
    prefill: tuple[tuple[int, ...], ...]
    decode: tuple[tuple[int, ...], ...]


def misses(past: Past, workers_max: int, engine: Engine, ttft_s: float, itl_s: float) -> Misses:
    """The requests that each number of workers would have missed, if there had been so many all the time."""
    times, bins = list(past.times), [past.bin(at_s) for at_s in past.times]
    requests = _counted(bins, range(len(times)), past.bins)
    if engine.options.mixed:
        came = zip(times, past.isl, past.osl, strict=True)
        streams = Streams(tuple((at_s, isl, max(0, osl - 1)) for at_s, isl, osl in came), 0)

        def aggregated(workers: int) -> tuple[int, ...]:
            run = Run(streams, workers, engine, itl_s, ttft_s)
            run.share()
            return _counted(bins, run.missed, past.bins)

        none = ((0,) * past.bins,) * (workers_max + 1)
        return Misses(requests, none, _by_number(aggregated, requests, workers_max))
    allowed_s = ttft_s - min(itl_s, engine.itl_s(engine.max_kv_tokens / 8, 2048))
    done: dict[int, list[float]] = {}

    def prefill(workers: int) -> tuple[int, ...]:
        found = done[workers] = done_at(times, past.isl, workers, engine)
        return _counted(bins, [n for n, at_s in enumerate(times) if found[n] - at_s > allowed_s], past.bins)

    of_prefill = _by_number(prefill, requests, workers_max)
    enough = next(n for n, missed in enumerate(of_prefill) if sum(missed) <= sum(of_prefill[-1]) + FULL * len(times))
    first_s = done.get(enough) or done_at(times, past.isl, max(1, enough), engine)
    rows = sorted(zip(first_s, past.isl, past.osl, bins, strict=True))
    streams = Streams(tuple((at_s, isl, max(0, osl - 1)) for at_s, isl, osl, _ in rows), 0)
    of_stream = [each[3] for each in rows]

    def decode(workers: int) -> tuple[int, ...]:
        run = Run(streams, workers, engine, itl_s)
        run.share()
        return _counted(of_stream, run.missed, past.bins)

    return Misses(requests, of_prefill, _by_number(decode, requests, workers_max))


def _counted(bins: Sequence[int], numbers: Sequence[int], count: int) -> tuple[int, ...]:
    found = [0] * count
    for number in numbers:
        if 0 <= bins[number] < count:
            found[bins[number]] += 1
    return tuple(found)


def _by_number(
    of: Callable[[int], tuple[int, ...]], requests: tuple[int, ...], workers_max: int
) -> tuple[tuple[int, ...], ...]:
    """For 0 to `workers_max` workers. Only those numbers are computed that matter, as in `_monotone`."""
    known = {workers_max: of(workers_max)}
    good = sum(known[workers_max]) + FULL * sum(requests)
    low, high = 0, workers_max
    while high - low > 1:
        middle = (low + high) // 2
        known[middle] = of(middle)
        low, high = (low, middle) if sum(known[middle]) <= good else (middle, high)
    found = [requests] * (workers_max + 1)
    found[high:] = [known[high]] * (workers_max + 1 - high)
    for workers in range(high - 1, 0, -1):
        found[workers] = known.get(workers) or of(workers)
        if sum(found[workers]) > HOPELESS * sum(requests):
            break
    return tuple(found)

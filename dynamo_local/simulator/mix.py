"""Several models on the GPUs of one host: engines as a few numbers, requests, and a policy that shares the GPUs.

A request waits in its model's queue, in order, until a worker has a free place. Prefills of a worker run one after the
other, or in the prefill workers beside it. Its streams share its passes; a pass grows with the batch. A worker that is
taken away accepts nothing new, finishes what runs, falls asleep, and only then frees its GPUs. Nothing is cut, dropped
or reordered.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from dynamo_local.core.gpu_shares import ModelNow, Sharing, Usage, shares, slack_s

TICK_S = 1.0
LATEST_S = 3600.0
"""Requests that have no answer so long after the last arrival stay unanswered: their model has no worker."""

JOINED, FINISHED, READY, FREED, TICK = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One model's worker. Times are in seconds.

    A pass of `n` requests takes `alone_s × (1 + n / grows)`; `slots` is the largest `n` within the target. A worker
    starts in `start_s`, wakes in `wake_s` and falls asleep in `sleep_s`. At most `parked` of them sleep.
    """

    gpus: int
    slots: int
    prefill_s: float
    """For each token of a prompt."""
    alone_s: float
    grows: float
    ttft_s: float
    itl_s: float
    start_s: float
    wake_s: float
    sleep_s: float
    parked: int
    prompts: int = 1
    """Prompts that are computed at once: in the worker one, or one in each prefill worker beside it."""
    sharing: Sharing = field(default_factory=Sharing)

    def busy_s(self, isl: float, osl: float) -> float:
        """How long a request of these lengths holds its place in a full batch."""
        return isl * self.prefill_s + osl * self.itl_s

    def within(self, speed: float) -> int:
        """The largest batch within the target at that speed; 0: not even one request alone is."""
        return max(0, math.floor(self.grows * (self.itl_s * speed / self.alone_s - 1) + 1e-9))


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes (s), which model it asks (its number), tokens of prompt and answer."""

    at_s: float
    model: int
    isl: int
    osl: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Models that share `gpus`. Requests come for `length_s`; those after `warm_up_s` are judged."""

    gpus: int
    engines: tuple[Engine, ...]
    length_s: float
    warm_up_s: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One worker on its GPUs. `clock` counts the tokens that each of its streams has got since it began."""

    model: int
    engine: Engine
    gpus: tuple[int, ...]
    slots: int
    speed: float
    ready: bool = False
    leaving: bool = False
    since_s: float = math.inf
    """Ready since then."""
    here: int = 0
    streams: list[tuple[float, int]] = field(default_factory=list)
    clock: float = 0.0
    at_s: float = 0.0
    computing: list[float] = field(default_factory=list)
    """A heap: until when the prompts that were given to it last are computed. At most `engine.prompts`."""
    version: int = 0

    def prefilled_s(self, now_s: float, isl: int) -> float:
        """When the first token of one more request comes."""
        free_s = heappop(self.computing) if len(self.computing) == self.engine.prompts else now_s
        first_s = max(now_s, free_s) + isl * self.engine.prefill_s / self.speed
        heappush(self.computing, first_s)
        return first_s

    def advance(self, now_s: float) -> None:
        """Give the streams their tokens until now."""
        if self.streams:
            self.clock += (now_s - self.at_s) / self.pass_s()
        self.at_s = now_s

    def pass_s(self) -> float:
        """How long one token of each stream takes now."""
        return self.engine.alone_s * (1 + len(self.streams) / self.engine.grows) / self.speed


Placed = tuple[int, tuple[int, ...], int, float]
"""Model, GPUs, slots and speed of a worker that is there from the start."""


class Policy(Protocol):
    """Decides how many workers each model has."""

    ticks: bool
    """Decides every second; else only when a request is held."""
    divided: bool
    """Workers share the speed of a GPU with those on it that have requests now."""

    def first(self, mix: Mix) -> Sequence[Placed]:
        """The workers that are there at the start."""

    def targets(self, world: World, now_s: float) -> Sequence[int] | None:
        """Workers of each model from now on; None: as before."""


@dataclass(slots=True)
class Result:
    """A run. For each request, in their order: its first token (s after it came; inf: none), mean time between tokens,
    and how long it waited for a worker."""

    ttfts_s: list[float]
    itls_s: list[float]
    waits_s: list[float]
    gpu_hours: float
    switches: int
    """Workers that were ordered after the warm-up."""
    served: list[int]
    """Requests in the order in which workers took them."""
    finished: int


class World:
    """One run of a mix's requests under a policy."""

    def __init__(self, mix: Mix, requests: Sequence[Request], policy: Policy) -> None:
        self.mix, self.requests, self.policy = mix, requests, policy
        models = range(len(mix.engines))
        self.workers: list[list[Worker]] = [[] for _ in models]
        """Ready, or on their way; not those that leave."""
        self.queues: list[deque[int]] = [deque() for _ in models]
        self.here = [0 for _ in models]
        """Requests that run or wait."""
        self.parked = [mix.engines[model].parked for model in models]
        """Workers asleep: as many as main memory holds are prepared at the start."""
        self.ended = [0 for _ in models]
        self.used_s = [-math.inf for _ in models]
        """When the model last had a request."""
        self.free: set[int] = set(range(mix.gpus))
        self.wanted = [0 for _ in models]
        self._events: list[tuple[float, int, int, Worker | None, int]] = []
        self._number = 0
        self._on_gpu: list[list[Worker]] = [[] for _ in range(mix.gpus)]
        count = len(requests)
        self._first_s, self._done_s, self._taken_s = [math.inf] * count, [math.inf] * count, [math.inf] * count
        self._served: list[int] = []
        self._held_gpu_s, self._gpus_at_s, self._switches, self._finished = 0.0, 0.0, 0, 0

    # --- what a policy may ask

    def is_held(self, model: int) -> bool:
        """Whether requests wait, and no worker of the model serves."""
        return bool(self.queues[model]) and not any(each.ready for each in self.workers[model])

    def held_s(self, model: int, now_s: float) -> float:
        """How long the oldest waits."""
        return now_s - self.requests[self.queues[model][0]].at_s if self.queues[model] else 0.0

    def arrives_s(self, model: int) -> float:
        """When one more worker would serve."""
        engine = self.mix.engines[model]
        return engine.wake_s if self.parked[model] else engine.start_s

    # --- the run

    def run(self) -> Result:
        """Serve all requests."""
        for model, gpus, slots, speed in self.policy.first(self.mix):
            self._place(Worker(model, self.mix.engines[model], gpus, slots, speed, ready=True, since_s=0.0))
            self.wanted[model] += 1
        if self.policy.ticks:
            self._push(0.0, TICK)
        came, total = 0, len(self.requests)
        last_s = (self.requests[-1].at_s if total else 0.0) + LATEST_S
        while self._finished < total:
            event_s = self._events[0][0] if self._events else math.inf
            if came < total and self.requests[came].at_s <= event_s:
                self._came(came)
                came += 1
            elif event_s > last_s:
                break
            else:
                now_s, _, kind, worker, value = heappop(self._events)
                self._happened(now_s, kind, worker, value)
        return self._result()

    def _happened(self, now_s: float, kind: int, worker: Worker | None, value: int) -> None:
        if worker is None:
            self._decide(now_s)
            self._push(now_s + TICK_S, TICK)
        elif kind == JOINED:
            worker.advance(now_s)
            heappush(worker.streams, (worker.clock + self.requests[value].osl, value))
            self._reschedule(worker)
        elif kind == FINISHED:
            if value == worker.version:
                self._finish(now_s, worker)
        elif kind == READY:
            worker.ready, worker.since_s = True, now_s
            self._dispatch(now_s, worker.model)
        elif kind == FREED:
            self._freed(now_s, worker)

    def _push(self, at_s: float, kind: int, worker: Worker | None = None, value: int = 0) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, kind, worker, value))

    def _came(self, number: int) -> None:
        request = self.requests[number]
        model, now_s = request.model, request.at_s
        self.used_s[model] = now_s
        self.here[model] += 1
        self.queues[model].append(number)
        if self.workers[model]:
            self._dispatch(now_s, model)
        else:
            self._decide(now_s)

    def _dispatch(self, now_s: float, model: int) -> None:
        """Give waiting requests to the workers with the most free places."""
        queue, workers = self.queues[model], self.workers[model]
        while queue:
            best, least = None, 1.0
            for each in workers:
                if each.ready and each.here < least * each.slots:
                    best, least = each, each.here / each.slots
            if best is None:
                return
            self._take(now_s, best, queue.popleft())

    def _take(self, now_s: float, worker: Worker, number: int) -> None:
        request = self.requests[number]
        self._taken_s[number] = now_s
        self._served.append(number)
        worker.here += 1
        if worker.here == 1 and self.policy.divided:
            self._redivide(now_s, worker)
        self._first_s[number] = first_s = worker.prefilled_s(now_s, request.isl)
        self._push(first_s, JOINED, worker, number)

    def _reschedule(self, worker: Worker) -> None:
        worker.version += 1
        if worker.streams:
            left_s = max(0.0, worker.streams[0][0] - worker.clock) * worker.pass_s()
            self._push(worker.at_s + left_s, FINISHED, worker, worker.version)

    def _finish(self, now_s: float, worker: Worker) -> None:
        worker.advance(now_s)
        _, number = heappop(worker.streams)
        self._done_s[number] = now_s
        self._finished += 1
        worker.here -= 1
        self.here[worker.model] -= 1
        self.ended[worker.model] += 1
        self.used_s[worker.model] = now_s
        self._reschedule(worker)
        if worker.leaving:
            self._leave(now_s, worker)
        else:
            self._dispatch(now_s, worker.model)
        if not worker.here and self.policy.divided:
            self._redivide(now_s, worker)

    def _redivide(self, now_s: float, changed: Worker) -> None:
        """Divide the speed of each GPU among its workers that have requests."""
        for worker in {each for gpu in changed.gpus for each in self._on_gpu[gpu]}:
            worker.advance(now_s)
            worker.speed = 1 / max(1, *(sum(each.here > 0 for each in self._on_gpu[gpu]) for gpu in worker.gpus))
            self._reschedule(worker)

    # --- workers come and go

    def _decide(self, now_s: float) -> None:
        targets = self.policy.targets(self, now_s)
        if targets is None:
            return
        self.wanted = list(targets)
        for model, wanted in enumerate(self.wanted):
            # Workers that are on their way stay: they were ordered a moment ago.
            able = sorted((each for each in self.workers[model] if each.ready), key=_taken_first)
            for worker in able[: max(0, len(self.workers[model]) - wanted)]:
                worker.leaving = True
                self.workers[model].remove(worker)
                self._leave(now_s, worker)
        self._order(now_s)

    def _leave(self, now_s: float, worker: Worker) -> None:
        if not worker.here:
            self._push(now_s + worker.engine.sleep_s, FREED, worker)

    def _freed(self, now_s: float, worker: Worker) -> None:
        engine = worker.engine
        self.parked[worker.model] = min(engine.parked, self.parked[worker.model] + 1)
        self._count_gpus(now_s)
        self.free.update(worker.gpus)
        for gpu in worker.gpus:
            self._on_gpu[gpu].remove(worker)
        self._order(now_s)

    def _order(self, now_s: float) -> None:
        """Order the workers that are wanted, as far as GPUs are free: those of held requests first, by age."""
        short = [m for m, wanted in enumerate(self.wanted) if wanted > len(self.workers[m])]
        for model in sorted(short, key=lambda m: -self.held_s(m, now_s) if self.is_held(m) else 1.0):
            engine = self.mix.engines[model]
            while len(self.workers[model]) < self.wanted[model] and len(self.free) >= engine.gpus:
                gpus = tuple(sorted(self.free)[: engine.gpus])
                arrives_s = self.arrives_s(model)
                self.parked[model] = max(0, self.parked[model] - 1)
                worker = Worker(model, engine, gpus, engine.slots, 1.0, at_s=now_s)
                self._count_gpus(now_s)
                self._place(worker)
                self._switches += now_s >= self.mix.warm_up_s
                self._push(now_s + arrives_s, READY, worker)

    def _place(self, worker: Worker) -> None:
        self.workers[worker.model].append(worker)
        for gpu in worker.gpus:
            self._on_gpu[gpu].append(worker)
            self.free.discard(gpu)

    def _count_gpus(self, now_s: float) -> None:
        """Count the GPUs that were held since the last change, within the time that is judged."""
        begins_s, ends_s = self.mix.warm_up_s, self.mix.length_s
        passed_s = max(0.0, min(now_s, ends_s) - max(self._gpus_at_s, begins_s))
        self._held_gpu_s += passed_s * (self.mix.gpus - len(self.free))
        self._gpus_at_s = now_s

    def _result(self) -> Result:
        self._count_gpus(self.mix.length_s)
        ttfts, itls, waits = [], [], []
        for number, each in enumerate(self.requests):
            first_s, done_s = self._first_s[number], self._done_s[number]
            answered = done_s < math.inf
            ttfts.append(first_s - each.at_s if answered else math.inf)
            itls.append((done_s - first_s) / each.osl if answered else math.inf)
            waits.append(self._taken_s[number] - each.at_s)
        return Result(ttfts, itls, waits, self._held_gpu_s / 3600, self._switches, self._served, self._finished)


def _taken_first(worker: Worker) -> tuple[int, float]:
    """The least busy worker leaves first, and the oldest of several."""
    return worker.here, worker.since_s


def within(mix: Mix, requests: Sequence[Request], result: Result) -> Mapping[int, tuple[int, int]]:
    """For each model: its requests after the warm-up, and how many of them are within both targets."""
    found = {model: [0, 0] for model in range(len(mix.engines))}
    for each, ttft_s, itl_s in zip(requests, result.ttfts_s, result.itls_s, strict=True):
        if each.at_s >= mix.warm_up_s:
            engine = mix.engines[each.model]
            found[each.model][0] += 1
            found[each.model][1] += ttft_s <= engine.ttft_s and itl_s <= engine.itl_s * (1 + 1e-9)
    return {model: (came, kept) for model, (came, kept) in found.items()}


# --- policies


class Shared:
    """`core.gpu_shares.shares`, with what an arbiter measures. Each model has its floor at the start."""

    ticks = True
    divided = False

    def __init__(self) -> None:
        self._usage = defaultdict[int, Usage](lambda: Usage(seen_s=0.0, used_s=-math.inf))

    def first(self, mix: Mix) -> Sequence[Placed]:
        models = [m for m, engine in enumerate(mix.engines) for _ in range(engine.sharing.floor)]
        return fixed_workers(mix.engines, models)

    def targets(self, world: World, now_s: float) -> Sequence[int]:
        models = [_now(world, model, self._usage[model], now_s) for model in range(len(world.mix.engines))]
        decided = shares(models, world.mix.gpus)
        return [decided[each.name].workers for each in models]


def _now(world: World, model: int, usage: Usage, now_s: float) -> ModelNow:
    engine, workers = world.mix.engines[model], world.workers[model]
    here, waiting = world.here[model], world.queues[model]
    usage.look(now_s, running=here - len(waiting), here=here, ended=world.ended[model])
    held = len(waiting) if world.is_held(model) else 0
    ready = [each.since_s for each in workers if each.ready]
    ordered = max(len(workers), world.wanted[model])
    young = ordered - sum(each <= now_s - engine.sharing.min_stay_s for each in ready)
    return ModelNow(
        name=str(model),
        sharing=engine.sharing,
        gpus=engine.gpus,
        workers=ordered,
        young=young,
        requests=sum(each.here for each in workers) + len(waiting) - held,
        held=held,
        held_s=world.held_s(model, now_s) if held else 0.0,
        rate=usage.rate,
        rate_long=usage.rate_long,
        rate_sd=usage.rate_sd,
        busy_s=usage.busy_s,
        slots=engine.slots,
        slack_s=slack_s(engine.ttft_s),
        arrives_s=world.arrives_s(model),
        stayed_s=now_s - max(ready) if ready else None,
        unused_s=now_s - usage.used_s,
    )


@dataclass(slots=True)
class Fixed:
    """Workers that are there from the start, and stay."""

    workers: Sequence[Placed]
    ticks: bool = False
    divided: bool = False

    def first(self, mix: Mix) -> Sequence[Placed]:
        return self.workers

    def targets(self, world: World, now_s: float) -> None:
        return None


def fixed_workers(engines: Sequence[Engine], models: Sequence[int]) -> list[Placed]:
    """A worker of each of these models, one after the other on the GPUs."""
    found, at = list[Placed](), 0
    for model in models:
        engine = engines[model]
        found.append((model, tuple(range(at, at + engine.gpus)), engine.slots, 1.0))
        at += engine.gpus
    return found

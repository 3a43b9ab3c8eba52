"""How the shares depend on the number of workers, for several rates at once; what was computed once is remembered. Pure
but for that memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.planner.queueing.decode import Run, Streams
from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine
from dynamo_local.planner.queueing.prefill import done_at, within

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

    def _computed(self, demand: Demand, rate: float, workers_max: int) -> Shares:
        self.computed += 1
        engine, times = self._engine, demand.times(rate)
        allowed_s = self._ttft_s - self._after_s
        done: dict[int, list[float]] = {}

        def prefill(workers: int, _least: float) -> float:
            done[workers] = done_at(times, demand.isl, workers, engine)
            return within(times, done[workers], allowed_s)

        shares = _monotone(prefill, workers_max)
        # Streams come as the smallest fleet lets them go that is as good as the largest.
        enough = next(workers for workers, share in enumerate(shares) if share >= shares[-1] - FULL)
        streams = Streams.of(demand, done.get(enough) or done_at(times, demand.isl, max(1, enough), engine))
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

"""How the shares depend on the number of workers, for several rates at once; what was computed once is remembered. Pure
but for that memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.planner.queueing.decode import decode_share
from dynamo_local.planner.queueing.demand import Demand
from dynamo_local.planner.queueing.engine import Engine
from dynamo_local.planner.queueing.prefill import prefill_share

FULL = 0.001
"""A share that near to that of the largest fleet is as good."""
LOST = 0.25
"""Below this part of it nothing is computed any more: no planner goes there."""
KEPT_MAX = 4000


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
        self._known: OrderedDict[tuple[str, int, float, int], float] = OrderedDict()
        self.computed = 0

    def shares(self, demand: Demand, key: int, rate: float, workers_max: int) -> Shares:
        """For 0 to `workers_max` workers. `key` stands for the demand."""
        prefill = _monotone(lambda n: self._share("prefill", demand, key, rate, n), workers_max)
        decode = _monotone(lambda n: self._share("decode", demand, key, rate, n), workers_max)
        return Shares(prefill, decode)

    def _share(self, role: str, demand: Demand, key: int, rate: float, workers: int) -> float:
        name = (role, key, rate, workers)
        found = self._known.get(name)
        if found is not None:
            return found
        self.computed += 1
        if role == "prefill":
            value = prefill_share(demand, rate, workers, self._engine, self._ttft_s, self._after_s)
        else:
            value = decode_share(demand, rate, workers, self._engine, self._itl_s)
        self._known[name] = value
        while len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return value


def _monotone(of: Callable[[int], float], workers_max: int) -> tuple[float, ...]:
    """Shares of 0 to `workers_max` workers, of which only those are computed that matter."""
    best = of(workers_max)
    low, high = 0, workers_max
    while high - low > 1:
        middle = (low + high) // 2
        if of(middle) >= best - FULL:
            high = middle
        else:
            low = middle
    shares = [0.0] * (workers_max + 1)
    shares[high:] = [best] * (workers_max + 1 - high)
    for workers in range(high - 1, 0, -1):
        shares[workers] = min(of(workers), shares[workers + 1])
        if shares[workers] < LOST * best:
            break
    return tuple(shares)

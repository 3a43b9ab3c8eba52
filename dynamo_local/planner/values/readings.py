"""One pull of the load planner's metrics, and sums without rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dynamo_local.core.types import Load, Missing


def exact_sum(values: Sequence[float | Fraction]) -> Fraction:
    """The sum, without any rounding, of finite floats and of sums of such.

    With rounded sums a mean of equal samples is not always that sample, and could miss a threshold by a rounding error.
    """
    # The largest denominator is a common one, because the denominators of floats are powers of 2. Adding 64 fractions
    # one by one took six times as long.
    ratios = [value.as_integer_ratio() for value in values]
    common = max((under for _, under in ratios), default=1)
    return Fraction(sum(over * (common // under) for over, under in ratios), common)


@dataclass(frozen=True, slots=True)
class KvUsageSum:
    """The exact sum of `gpu_cache_usage_perc` over `count` samples; `waiting` is the sum of `num_requests_waiting` of
    the same samples."""

    usage: Fraction = Fraction()
    waiting: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One pull of the metrics. A value that was not obtained, or is older than three pulls, is `Missing`: never 0.

    `queue` is the number of requests in the prefill queue that nobody has pulled yet; None where the graph has no
    prefill component. `loads` are those of the decode (or aggregated) workers that are ready, by watcher name.
    `kv` is summed once, here: a decision over many readings of many workers stays cheap. A load whose KV use is
    `Missing` is no sample.
    """

    at_s: float
    queue: float | Missing | None
    loads: Mapping[str, Load | Missing]
    kv: KvUsageSum = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usages: list[float] = []
        waiting = 0
        for load in self.loads.values():
            if isinstance(load, Missing) or isinstance(load.gpu_cache_usage_perc, Missing):
                continue
            usages.append(load.gpu_cache_usage_perc)
            waiting += load.num_requests_waiting
        object.__setattr__(self, "kv", KvUsageSum(exact_sum(usages), waiting, len(usages)))

"""Forward passes: what an engine's scheduler did in one pass, under the names of Dynamo's FPM format. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class EngineId(NamedTuple):
    """One data-parallel rank of one worker. `worker_id` is the instance id as a decimal string, as Dynamo writes it."""

    worker_id: str
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that a pass scheduled, or that were queued behind it.

    Scheduled: `sum_prefill_tokens` are those computed in this pass, `sum_prefill_kv_tokens` those of prompts whose KV
    was read and not computed. Queued: `sum_prefill_tokens` are whole prompts; queued decodes are preempted or wait
    for remote KV. Variances are of the population, `var_prefill_length` of whole prompts.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


NONE = Requests()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass. `wall_time_s` 0 marks a heartbeat: no pass has ended for a while. `queued` is still true then, and
    `scheduled` is what the pass under way computes (nothing: the engine is idle).

    `counter_id` rises by one per engine, so a gap shows what was lost. `at_s` is when it ended: on the planner's clock
    for a planner, on the worker's own in a worker.
    """

    engine: EngineId
    counter_id: int
    wall_time_s: float
    scheduled: Requests = NONE
    queued: Requests = NONE
    at_s: float = 0.0

    @property
    def heartbeat(self) -> bool:
        """No pass was run."""
        return self.wall_time_s <= 0.0


def variance(count: int, total: int, squares: int) -> float:
    """Population variance, from the sum and the sum of squares, without rounding in between."""
    return (count * squares - total * total) / (count * count) if count > 1 else 0.0


class Tally:
    """Count, sum and variance of whole numbers that come and go, in constant time and without rounding."""

    __slots__ = ("_squares", "count", "total")

    def __init__(self) -> None:
        self.count = self.total = self._squares = 0

    def add(self, value: int) -> None:
        """Take one more value in."""
        self.count += 1
        self.total += value
        self._squares += value * value

    def remove(self, value: int) -> None:
        """One that was added before goes."""
        self.count -= 1
        self.total -= value
        self._squares -= value * value

    @property
    def variance(self) -> float:
        """Population variance. 0.0 for no values."""
        return variance(self.count, self.total, self._squares)

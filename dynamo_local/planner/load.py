"""The load planner's policy: one interval's observation in, a decision with its reasons out. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from dynamo_local.core.types import Missing
from dynamo_local.planner.options import LoadOptions
from dynamo_local.planner.rules import (
    NEW_DECODE_WORKER_GRACE_PERIOD,
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD,
    Facts,
    Side,
    Verdict,
    floor_workers,
    judge,
)
from dynamo_local.planner.values import UNIT_BITS, Decision, KvSum, Observation, Pool, Reading, Reason

__all__ = ["LoadOptions", "LoadPolicy"]


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """`rules.judge` on what was observed. It remembers nothing: all that it needs is in the observation."""

    options: LoadOptions

    def on_tick(self, observation: Observation) -> Decision:
        """Decide about one interval. The next tick is due where this interval's successor ends, without drift."""
        facts = self._facts(observation)
        verdicts = judge(facts)
        pools = observation.fleet.pools
        reasons = tuple(_reason(side, verdict, facts) for side, verdict in zip(facts.sides, verdicts, strict=True))
        targets = {pool.component: pool.capacity + reason.step for pool, reason in zip(pools, reasons, strict=True)}
        return Decision(
            now_s=observation.now_s,
            targets=targets,
            reasons=_in_order(reasons),
            next_tick_at=next_tick_at(observation, self.options.adjustment_interval_s),
        )

    def _facts(self, observation: Observation) -> Facts:
        options, fleet = self.options, observation.fleet
        sides = []
        if fleet.prefill is not None:
            depths = queue_samples(observation.readings)
            sides.append(
                _side(
                    fleet.prefill,
                    mean=sum(depths, Fraction()) / len(depths) if depths else None,
                    expected=expected_queue(depths[0], depths[-1]) if depths else None,
                    down=options.prefill_queue_scale_down_threshold,
                    up=options.prefill_queue_scale_up_threshold,
                )
            )
        added_at_s = fleet.decode.added_at_s
        sides.append(
            _side(
                fleet.decode,
                mean=mean_kv(observation.readings, options.decode_kv_per_waiting_request),
                down=options.decode_kv_scale_down_threshold,
                up=options.decode_kv_scale_up_threshold,
                since_added_s=None if added_at_s is None else observation.interval_began_s - added_at_s,
            )
        )
        return Facts(
            adjusting=fleet.adjusting,
            sides=tuple(sides),
            max_gpu_budget=options.max_gpu_budget,
            min_gpu_budget=options.min_gpu_budget,
            grace_s=NEW_DECODE_WORKER_GRACE_PERIOD * options.adjustment_interval_s,
        )


def next_tick_at(observation: Observation, interval_s: float) -> float:
    """The first moment after now that is a whole number of intervals after this one began."""
    began_s = observation.interval_began_s
    count = math.floor((observation.now_s - began_s) / interval_s) + 1
    while began_s + count * interval_s <= observation.now_s:
        count += 1
    return began_s + count * interval_s


def queue_samples(readings: Sequence[Reading]) -> list[Fraction]:
    """The depths that could be had, in order."""
    return [
        Fraction(reading.queue)
        for reading in readings
        if reading.queue is not None and not isinstance(reading.queue, Missing) and math.isfinite(reading.queue)
    ]


def expected_queue(first: Fraction, last: Fraction) -> Fraction:
    """Where the queue is heading by the time that a new prefill worker would help."""
    return last + NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD * (last - first)


def mean_kv(readings: Sequence[Reading], per_waiting_request: float = 0.0) -> Fraction | None:
    """The mean over all samples of all workers, exact; None without one."""
    *_, total = accumulate((reading.kv for reading in readings), initial=KvSum())
    if not total.count:
        return None
    kv = Fraction(total.units, total.count << UNIT_BITS)
    return kv + Fraction(per_waiting_request) * total.waiting / total.count


def _side(
    pool: Pool,
    *,
    mean: Fraction | None,
    down: float,
    up: float,
    expected: Fraction | None = None,
    since_added_s: float | None = None,
) -> Side:
    return Side(
        component=pool.component,
        gpus_per_worker=pool.gpus_per_worker,
        capacity=pool.capacity,
        waiting=pool.waiting,
        deferred=pool.deferred,
        cancellable=pool.cancellable,
        gpus_spoken_for=pool.gpus_spoken_for,
        mean=mean,
        down=down,
        up=up,
        expected=expected,
        since_added_s=since_added_s,
    )


def _reason(side: Side, verdict: Verdict, facts: Facts) -> Reason:
    numbers: dict[str, float] = {
        "down": side.down,
        "up": side.up,
        "workers": side.capacity,
        "floor": floor_workers(facts.min_gpu_budget, side.gpus_per_worker),
        "gpus_per_worker": side.gpus_per_worker,
        "gpus_counted": verdict.gpus_counted,
        "max_gpu_budget": facts.max_gpu_budget,
    }
    if side.mean is not None:
        numbers["mean"] = float(side.mean)
    if side.expected is not None:
        numbers["expected"] = float(side.expected)
    if side.since_added_s is not None:
        numbers["since_added_s"], numbers["grace_s"] = side.since_added_s, facts.grace_s
    return Reason(side.component, verdict.step, verdict.rule, numbers, deferred=verdict.deferred)


def _in_order(reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Downs first; else prefill before decode."""
    return tuple(sorted(reasons, key=lambda reason: reason.step >= 0))

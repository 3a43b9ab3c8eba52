"""The load planner's policy: one interval's observation in, a decision with its reasons out. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing, floor_workers
from dynamo_local.planner.policies.load_rules import (
    NEW_DECODE_WORKER_GRACE_PERIOD,
    Facts,
    Side,
    Verdict,
    judge,
    mean_name,
    nearest,
)
from dynamo_local.planner.values import Decision, IntervalObservation, Pool, Reading, Reason, exact_sum

__all__ = ["LoadPolicy", "PlannerConfig"]


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Applies `rules.judge` to an observation. Stateless: all that it needs is in the observation."""

    options: PlannerConfig

    def on_tick(self, observation: IntervalObservation) -> Decision:
        """Decide about one interval. The next tick is due at the end of the next interval, without drift."""
        facts = self._facts(observation)
        verdicts = judge(facts)
        reasons = tuple(_reason(facts, index, verdict) for index, verdict in enumerate(verdicts))
        targets = {
            pool.component: pool.capacity + reason.step
            for pool, reason in zip(observation.pools.all, reasons, strict=True)
        }
        return Decision(
            now_s=observation.now_s,
            targets=targets,
            reasons=_in_order(reasons),
            next_tick_at=next_tick_at(observation, self.options.adjustment_interval),
            apart=not _swaps(facts, verdicts),
        )

    def _facts(self, observation: IntervalObservation) -> Facts:
        options, pools = self.options, observation.pools
        sides = []
        if pools.prefill is not None:
            depths = queue_samples(observation.readings)
            sides.append(
                _side(
                    pools.prefill,
                    mean=exact_mean(depths),
                    samples=len(depths),
                    ends=(depths[0], depths[-1]) if depths else None,
                    down=options.prefill_queue_scale_down_threshold,
                    up=options.prefill_queue_scale_up_threshold,
                )
            )
        added_at_s = pools.decode.added_at_s
        sides.append(
            _side(
                pools.decode,
                mean=mean_kv(observation.readings, options.decode_kv_per_waiting_request),
                samples=sum(reading.kv.count for reading in observation.readings),
                down=options.decode_kv_scale_down_threshold,
                up=options.decode_kv_scale_up_threshold,
                since_added_s=None if added_at_s is None else observation.interval_began_s - added_at_s,
            )
        )
        return Facts(
            adjusting=pools.adjusting,
            sides=tuple(sides),
            max_gpu_budget=options.max_gpu_budget,
            min_gpu_budget=options.min_gpu_budget,
            grace_s=NEW_DECODE_WORKER_GRACE_PERIOD * options.adjustment_interval,
        )


def _swaps(facts: Facts, verdicts: Sequence[Verdict]) -> bool:
    """One more here and one less there, which can be one flip: together, or not at all."""
    acts = {verdict.step: side for side, verdict in zip(facts.sides, verdicts, strict=True) if not verdict.deferred}
    return 1 in acts and -1 in acts and bool(acts[-1].flippable)


def next_tick_at(observation: IntervalObservation, interval_s: float) -> float:
    """The first moment after now that is a whole number of intervals after this one began."""
    began_s = observation.interval_began_s
    count = math.floor((observation.now_s - began_s) / interval_s) + 1
    if began_s + count * interval_s <= observation.now_s:  # the quotient was rounded down
        count += 1
    return began_s + count * interval_s


def queue_samples(readings: Sequence[Reading]) -> list[float]:
    """The known queue depths, in order."""
    return [
        reading.queue
        for reading in readings
        if reading.queue is not None and not isinstance(reading.queue, Missing) and math.isfinite(reading.queue)
    ]


def exact_mean(values: Sequence[float]) -> float | None:
    """The mean, rounded only once: the mean of equal values is that value. None without values."""
    if not values:
        return None
    if all(isinstance(value, int) for value in values):
        return sum(values) / len(values)
    return _divided(exact_sum(values), len(values))


def mean_kv(readings: Sequence[Reading], per_waiting_request: float = 0.0) -> float | None:
    """The mean over all samples of all workers, rounded once like `exact_mean`; None without samples."""
    count = sum(reading.kv.count for reading in readings)
    if not count:
        return None
    total = exact_sum([reading.kv.usage for reading in readings])
    if per_waiting_request:
        total += Fraction(per_waiting_request) * sum(reading.kv.waiting for reading in readings)
    return _divided(total, count)


def _divided(total: Fraction, count: int) -> float:
    """`float(total / count)`, ten times as fast: Python divides whole numbers exactly and rounds once."""
    return total.numerator / (total.denominator * count)


def _side(
    pool: Pool,
    *,
    mean: float | None,
    down: float,
    up: float,
    samples: int,
    ends: tuple[float, float] | None = None,
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
        gpus_lacking=pool.gpus_lacking,
        mean=mean,
        down=down,
        up=up,
        samples=samples,
        ends=ends,
        since_added_s=since_added_s,
        flippable=pool.flippable,
    )


def _reason(facts: Facts, index: int, verdict: Verdict) -> Reason:
    side = facts.sides[index]
    numbers: dict[str, float] = {
        "scale_down_threshold": side.down,
        "scale_up_threshold": side.up,
        "workers": side.capacity,
        "workers_min": floor_workers(facts.min_gpu_budget, side.gpus_per_worker),
        "gpus_per_worker": side.gpus_per_worker,
        "gpus_counted": verdict.gpus_counted,
        "max_gpu_budget": facts.max_gpu_budget,
    }
    if side.mean is not None:
        numbers[mean_name(side)] = side.mean
    expected = side.expected
    if expected is not None:
        numbers["prefill_queue_expected"] = expected
    if side.since_added_s is not None:
        numbers["since_added_s"], numbers["grace_s"] = side.since_added_s, facts.grace_s
    otherwise = nearest(facts, index, verdict)
    return Reason(side.component, verdict.step, verdict.rule, numbers, otherwise, verdict.deferred)


def _in_order(reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Downs first; else prefill before decode."""
    return tuple(sorted(reasons, key=lambda reason: reason.step >= 0))

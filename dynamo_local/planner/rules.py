"""The load planner's rules (planner-rules 1-7), on the few numbers that they compare. `load.LoadPolicy` measures and
explains; here it is decided. All arithmetic is exact (fractions), so a threshold is a threshold.

In prose, for each component:

* Nothing is decided while an adjustment is under way (rule 2), nor without a sample (rule 1). A component without any
  worker, ready or coming, is brought back without samples: there is nobody to take them from.
* Below its floor it gets one more.
* Down before up, prefill before decode (a full prefill queue also fills the decode workers' caches). One step at most.
* Down: below the lower threshold, unless the floor or (decode) the grace period of a new worker holds it.
* Up: above the upper threshold. Not while another one waits to start (it counts as capacity), not where the prefill
  queue is about to empty by itself, not above the budget. A worker that still drains is taken back first: its GPUs
  are counted already.
* An up that only fits once the GPU of this same decision's down is free is planned now and carried out then.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dynamo_local.planner.values import Rule

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Intervals in which a new decode worker keeps decode from going down: its empty cache alone lowers the mean."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Intervals that the queue's trend is followed into the future: about what a new prefill worker needs to help."""


@dataclass(frozen=True, slots=True)
class Side:
    """One component: its workers, what was measured, and its thresholds.

    `mean` is None without a sample. `expected` is where the prefill queue is heading (None for decode). `since_added_s`
    is from the moment that the last worker was added to the beginning of the interval (None: grace is over, or there
    is none: prefill).
    """

    component: str
    gpus_per_worker: int
    capacity: int
    waiting: int
    deferred: int
    cancellable: int
    gpus_spoken_for: int
    mean: Fraction | None
    down: float
    up: float
    expected: Fraction | None = None
    since_added_s: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All numbers of one decision. `sides` are prefill (where there is one) and decode."""

    adjusting: bool
    sides: tuple[Side, ...]
    max_gpu_budget: int
    min_gpu_budget: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is decided about one component, by which rule. `gpus_counted` is the budget's use when it was its turn."""

    rule: Rule
    step: int = 0
    deferred: bool = False
    gpus_counted: int = 0


def floor_workers(min_gpu_budget: int, gpus_per_worker: int) -> int:
    """The fewest workers that hold `min_gpu_budget` GPUs; never below one."""
    return max(1, -(-min_gpu_budget // max(1, gpus_per_worker)))


def judge(facts: Facts) -> tuple[Verdict, ...]:
    """One verdict for each side, in their order."""
    spoken_for = sum(side.gpus_spoken_for for side in facts.sides)
    if facts.adjusting:
        return tuple(Verdict(Rule.ADJUSTING, gpus_counted=spoken_for) for _ in facts.sides)
    downs = [_down(side, facts) for side in facts.sides]
    freed = sum(
        side.gpus_per_worker for side, down in zip(facts.sides, downs, strict=True) if down.step and not down.deferred
    )
    verdicts = []
    for side, down in zip(facts.sides, downs, strict=True):
        verdict = down
        if down.rule in (Rule.SCALE_UP, Rule.BELOW_FLOOR):
            verdict = _up(side, down.rule, spoken_for, freed, facts.max_gpu_budget)
        verdicts.append(Verdict(verdict.rule, verdict.step, verdict.deferred, spoken_for))
        if verdict.rule in (Rule.SCALE_UP, Rule.BELOW_FLOOR):
            spoken_for += side.gpus_per_worker
    return tuple(verdicts)


def _down(side: Side, facts: Facts) -> Verdict:
    """Rules 1 and 3. `SCALE_UP` and `BELOW_FLOOR` with no step say that more is wanted: `_up` goes on."""
    floor = floor_workers(facts.min_gpu_budget, side.gpus_per_worker)
    if side.mean is None and side.capacity > 0:
        return Verdict(Rule.MISSING)
    if side.capacity < floor:
        return Verdict(Rule.BELOW_FLOOR)
    assert side.mean is not None  # without capacity it is below the floor, which is one at least
    if side.mean > side.up:
        return Verdict(Rule.SCALE_UP)
    if side.mean >= side.down:
        return Verdict(Rule.WITHIN)
    if side.capacity <= floor:
        return Verdict(Rule.FLOOR)
    if side.since_added_s is not None and side.since_added_s < facts.grace_s:
        return Verdict(Rule.GRACE)
    return Verdict(Rule.SCALE_DOWN, -1, deferred=side.deferred > 0)


def _up(side: Side, wanted: Rule, spoken_for: int, freed: int, budget: int) -> Verdict:
    """Rules 4, 5 and 7."""
    if side.waiting > 0:
        return Verdict(Rule.COMING)
    if wanted is Rule.SCALE_UP and side.expected is not None and side.expected <= side.up:
        return Verdict(Rule.QUEUE_EMPTYING)
    if side.cancellable > 0:
        return Verdict(Rule.TAKE_BACK, 1)
    needed = spoken_for + side.gpus_per_worker
    if needed <= budget:
        return Verdict(wanted, 1)
    if needed - freed <= budget:
        return Verdict(wanted, 1, deferred=True)
    return Verdict(Rule.BUDGET)

"""The load planner's rules (planner-rules 1-7), on the few numbers that they compare. `load.LoadPolicy` computes these
numbers and explains the result.

In prose, for each component:

* Nothing is decided while an adjustment is under way (rule 2), nor without a sample (rule 1). A component without any
  worker, ready or coming, is brought back without samples: there is nobody to take them from.
* Below its floor it gets one more.
* Down before up, prefill before decode (a full prefill queue also fills the decode workers' caches). One step at most.
* Down: below the lower threshold, unless the floor or (decode) the grace period of a new worker holds it.
* Up: above the upper threshold. Not while another one waits to start (it counts as capacity), not where the prefill
  queue is about to empty by itself, not above the budget. A worker that still drains is taken back first: its GPUs
  are counted already.
* An up that only fits once the GPU of this same decision's down is free is planned now and carried out then; at once
  where the one that goes down can take over its role (a flip).
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_local.core.floors import floor_workers
from dynamo_local.planner.values.decisions import Rule

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""For this many intervals after a new decode worker decode does not go down: the empty cache lowers the mean."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""The queue's trend is extrapolated by this many intervals: about what a new prefill worker takes to help."""


class Side(NamedTuple):
    """One component: its workers, what was measured, and its thresholds.

    `mean` is over `samples` of them, None without one. `ends` are the first and the last of the prefill queue (None
    for decode, whose trend nobody asks for). `since_added_s` is from the moment that the last worker was added to the
    beginning of the interval (None: no grace to be had, as for prefill). `gpus_spoken_for` counts against the budget;
    `gpus_lacking` of these are what the waiting ones will take. `flippable` could take over the other side's role now.
    """

    component: str
    gpus_per_worker: int
    capacity: int
    waiting: int
    deferred: int
    cancellable: int
    gpus_spoken_for: int
    gpus_lacking: int
    mean: float | None
    samples: int
    down: float
    up: float
    flippable: int
    ends: tuple[float, float] | None = None
    since_added_s: float | None = None

    @property
    def expected(self) -> float | None:
        """The extrapolated length of the prefill queue at the time when a new worker would help."""
        if self.ends is None:
            return None
        first, last = self.ends
        return last + NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD * (last - first)


class Facts(NamedTuple):
    """All numbers of one decision. `sides` are prefill (where there is one) and decode."""

    adjusting: bool
    sides: tuple[Side, ...]
    max_gpu_budget: int
    min_gpu_budget: int
    grace_s: float


class Verdict(NamedTuple):
    """What is decided about one component, by which rule. `gpus_counted`: the budget's use when it was judged."""

    rule: Rule
    step: int
    deferred: bool
    gpus_counted: int


_Answer = tuple[Rule, int, bool]
"""A verdict without the count."""


def judge(facts: Facts) -> tuple[Verdict, ...]:
    """One verdict for each side, in their order."""
    counted = sum(side.gpus_spoken_for for side in facts.sides)
    if facts.adjusting:
        return tuple(Verdict(Rule.ADJUSTING, 0, False, counted) for _ in facts.sides)
    wishes = [_wish(side, facts) for side in facts.sides]
    downs = [side for side, (_, step, deferred) in zip(facts.sides, wishes, strict=True) if step and not deferred]
    freed = sum(side.gpus_per_worker for side in downs)
    flips = any(side.flippable for side in downs)
    verdicts = []
    for side, answer in zip(facts.sides, wishes, strict=True):
        if answer[0] in _WISHES:
            answer = _up(side, answer[0], counted, freed, flips, facts.max_gpu_budget)
        verdicts.append(Verdict(*answer, counted))
        if answer[0] in _WISHES:
            counted += side.gpus_per_worker
    return tuple(verdicts)


_WISHES = (Rule.SCALE_UP, Rule.BELOW_FLOOR)
"""One more is wanted: `_up` says whether it can be had."""


def _wish(side: Side, facts: Facts) -> _Answer:
    """Rules 1 and 3. One of `_WISHES` has no step yet."""
    floor = floor_workers(facts.min_gpu_budget, side.gpus_per_worker)
    if side.mean is None and side.capacity > 0:
        return Rule.MISSING, 0, False
    if side.mean is None or side.capacity < floor:
        return Rule.BELOW_FLOOR, 0, False
    if side.mean > side.up:
        return Rule.SCALE_UP, 0, False
    if side.mean >= side.down:
        return Rule.WITHIN, 0, False
    if side.capacity <= floor:
        return Rule.FLOOR, 0, False
    if side.since_added_s is not None and side.since_added_s < facts.grace_s:
        return Rule.GRACE, 0, False
    return Rule.SCALE_DOWN, -1, side.deferred > 0


def _up(side: Side, wish: Rule, counted: int, freed: int, flips: bool, budget: int) -> _Answer:
    """Rules 4, 5 and 7."""
    if side.waiting > 0:
        return Rule.COMING, 0, False
    expected = side.expected
    if wish is Rule.SCALE_UP and expected is not None and expected <= side.up:
        return Rule.QUEUE_EMPTYING, 0, False
    if side.cancellable > 0:
        return Rule.TAKE_BACK, 1, False
    needed = counted + side.gpus_per_worker
    if needed <= budget:
        return wish, 1, False
    if needed - freed <= budget:
        return wish, 1, not flips
    return Rule.BUDGET, 0, False

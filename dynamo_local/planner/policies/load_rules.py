"""The load planner's seven rules, on the few numbers that they compare. `load.LoadPolicy` computes these
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
* An up may fit only when the GPU of this decision's own down is free. The up is then planned now and carried out
  later. It is carried out at once if the worker that goes down can take over its role (a flip).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dynamo_local.core.types import floor_workers
from dynamo_local.planner.values import Counterfactual, Rule, boundary

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
    """The decision about one component, and its rule. `gpus_counted`: the budget's use when it was judged."""

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
    claims = [_claim(side, facts) for side in facts.sides]
    downs = [side for side, (_, step, deferred) in zip(facts.sides, claims, strict=True) if step and not deferred]
    freed = sum(side.gpus_per_worker for side in downs)
    flips = any(side.flippable for side in downs)
    verdicts = []
    for side, answer in zip(facts.sides, claims, strict=True):
        if answer[0] in _WISHES:
            answer = _up(side, answer[0], counted, freed, flips, facts.max_gpu_budget)
        verdicts.append(Verdict(*answer, counted))
        if answer[0] in _WISHES:
            counted += side.gpus_per_worker
    return tuple(verdicts)


_WISHES = (Rule.SCALE_UP, Rule.BELOW_FLOOR)
"""One more is wanted: `_up` says whether it can be had."""


def _claim(side: Side, facts: Facts) -> _Answer:
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


def _up(side: Side, claim: Rule, counted: int, freed: int, flips: bool, budget: int) -> _Answer:
    """Rules 4, 5 and 7."""
    if side.waiting > 0:
        return Rule.COMING, 0, False
    expected = side.expected
    if claim is Rule.SCALE_UP and expected is not None and expected <= side.up:
        return Rule.QUEUE_EMPTYING, 0, False
    if side.cancellable > 0:
        return Rule.TAKE_BACK, 1, False
    needed = counted + side.gpus_per_worker
    if needed <= budget:
        return claim, 1, False
    if needed - freed <= budget:
        return claim, 1, not flips
    return Rule.BUDGET, 0, False


# --- counterfactuals
# The nearest change of one number that would have decided otherwise.
#
# Candidates are numbers that were measured or counted, and the budgets; not the thresholds (a threshold moved to the
# mean says the same as the mean moved to the threshold):
#
# * `prefill_queue_size`, `average_kv_load`: every sample of the interval has this value (a queue that stands still);
# * `prefill_queue_last`: the last sample alone, which says where the queue is heading;
# * `workers`: of the component, with their GPUs; `workers_waiting`: that have not begun to start;
# * `since_added_s`: from the last decode worker's coming to the interval's beginning;
# * `max_gpu_budget`, `min_gpu_budget`.
#
# *Nearest* is the smallest change relative to the larger of both values, `|needed - value| / max(|needed|, |value|)`;
# of equal ones the first of this list. Each candidate is checked twice before it is reported. With `needed` the step
# of the component differs. One step short of `needed` (the next float, or one less of a count) the step is the same.


class _Change(NamedTuple):
    """`name` from `value` to `needed`; `short` is one step short of that. `apply` gives the facts with it."""

    name: str
    value: float
    needed: float
    short: float
    apply: Callable[[float], Facts]


def _size(change: _Change) -> float:
    value, needed = change[1:3]
    return 0.0 if needed == value else abs(needed - value) / max(abs(needed), abs(value))


def nearest(facts: Facts, index: int, verdict: Verdict) -> Counterfactual | None:
    """For the side of that index. None where no single number would have changed its step."""
    if verdict.rule in (Rule.ADJUSTING, Rule.MISSING):
        return None
    for change in sorted(_changes(facts, index, verdict), key=_size):
        step = judge(change.apply(change.needed))[index].step
        if step != verdict.step and judge(change.apply(change.short))[index].step == verdict.step:
            return Counterfactual(change.name, change.value, change.needed, step)
    return None


WithSide = Callable[[Side], Facts]


_MORE = (Rule.SCALE_UP, Rule.BELOW_FLOOR, Rule.TAKE_BACK, Rule.QUEUE_EMPTYING, Rule.BUDGET, Rule.COMING)
"""Whether more was wanted: then the budget and the queue's trend mattered, otherwise the floor and grace."""


def _changes(facts: Facts, index: int, verdict: Verdict) -> Iterator[_Change]:
    side = facts.sides[index]

    def with_side(changed: Side) -> Facts:
        return facts._replace(sides=(*facts.sides[:index], changed, *facts.sides[index + 1 :]))

    if side.mean is not None:
        yield from _means(side, side.mean, with_side)
    if verdict.rule in _MORE:
        if side.mean is not None and side.ends is not None and side.samples > 1:
            yield from _last(side, side.mean, side.ends, with_side)
        yield from _space(facts, index, verdict, with_side)
        if side.waiting:
            yield _Change("workers_waiting", side.waiting, 0, 1, lambda n: with_side(_with_waiting(side, int(n))))
    elif side.since_added_s is not None:
        yield from _ages(facts, side, side.since_added_s, with_side)
    yield from _floors(facts, side, with_side)


def mean_name(side: Side) -> str:
    """The name of the mean that is compared with the thresholds, as in TensorBoard."""
    return "average_kv_load" if side.ends is None else "prefill_queue_size"


def _means(side: Side, mean: float, with_side: WithSide) -> Iterator[_Change]:
    """To just beyond a threshold, or back onto it."""

    def apply(value: float) -> Facts:
        return with_side(side._replace(mean=value, ends=None if side.ends is None else (value, value)))

    name = mean_name(side)
    above, below = math.nextafter(side.up, math.inf), math.nextafter(side.down, -math.inf)
    if mean > side.up:
        yield _Change(name, mean, side.up, above, apply)
    else:
        yield _Change(name, mean, above, side.up, apply)
    if mean < side.down:
        yield _Change(name, mean, side.down, below, apply)
    elif below >= 0:
        yield _Change(name, mean, below, side.down, apply)


def _last(side: Side, mean: float, ends: tuple[float, float], with_side: WithSide) -> Iterator[_Change]:
    """To where the trend leads just above the threshold, or onto it: `last + buffer * (last - first) = up`."""
    first, last = ends

    def apply(value: float) -> Facts:
        return with_side(side._replace(ends=(first, value), mean=mean + (value - last) / side.samples))

    def expected(value: float) -> float:
        return value + buffer * (value - first)

    buffer = NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD
    emptied, grows = boundary((side.up + buffer * first) / (buffer + 1), lambda value: expected(value) <= side.up)
    if expected(last) > side.up:
        yield _Change("prefill_queue_last", last, emptied, grows, apply)
    else:
        yield _Change("prefill_queue_last", last, grows, emptied, apply)


def _space(facts: Facts, index: int, verdict: Verdict, with_side: WithSide) -> Iterator[_Change]:
    """Changes at which one more just fits into the budget, or just does not. They count the present use, the use
    without the GPU that the other component frees, and the use with the GPU that the other component takes first.
    """
    side, budget = facts.sides[index], facts.max_gpu_budget
    others = [other.gpus_per_worker for i, other in enumerate(facts.sides) if i != index]
    fits = verdict.gpus_counted + side.gpus_per_worker
    for gpus in (0, *others, *(-gpus for gpus in others)):
        yield from _whole(
            "max_gpu_budget",
            budget,
            fits + gpus - 1,
            facts.min_gpu_budget,
            lambda value: facts._replace(max_gpu_budget=int(value)),
        )
    if side.gpus_per_worker:
        for gpus in (0, *others):
            edge = side.capacity + (budget - fits + gpus) // side.gpus_per_worker
            yield from _whole("workers", side.capacity, edge, side.waiting, _workers(side, with_side))


def _floors(facts: Facts, side: Side, with_side: WithSide) -> Iterator[_Change]:
    """To where the floor lets one go or no longer does, or wants one more: by workers, and by `min_gpu_budget`."""
    floor = floor_workers(facts.min_gpu_budget, side.gpus_per_worker)
    for edge in (floor - 1, floor):
        yield from _whole("workers", side.capacity, edge, side.waiting, _workers(side, with_side))
    for edge in ((side.capacity - 1) * side.gpus_per_worker, side.capacity * side.gpus_per_worker):
        if edge < facts.max_gpu_budget:
            yield from _whole(
                "min_gpu_budget",
                facts.min_gpu_budget,
                edge,
                1,
                lambda value: facts._replace(min_gpu_budget=int(value)),
            )


def _workers(side: Side, with_side: WithSide) -> Callable[[float], Facts]:
    """So many workers, with as many GPUs as they need."""

    def apply(count: float) -> Facts:
        gpus = side.gpus_spoken_for + (int(count) - side.capacity) * side.gpus_per_worker
        return with_side(side._replace(capacity=int(count), gpus_spoken_for=gpus))

    return apply


def _with_waiting(side: Side, count: int) -> Side:
    """With fewer waiting workers: the GPUs that they would have taken do not count."""
    lacking = min(side.gpus_lacking, count * side.gpus_per_worker)
    return side._replace(
        waiting=count,
        capacity=side.capacity - side.waiting + count,
        deferred=min(side.deferred, count),
        gpus_lacking=lacking,
        gpus_spoken_for=side.gpus_spoken_for - side.gpus_lacking + lacking,
    )


def _ages(facts: Facts, side: Side, since_s: float, with_side: WithSide) -> Iterator[_Change]:
    """To the end of grace, or to just before it."""

    def apply(value: float) -> Facts:
        return with_side(side._replace(since_added_s=value))

    inside = math.nextafter(facts.grace_s, -math.inf)
    if since_s < facts.grace_s:
        yield _Change("since_added_s", since_s, facts.grace_s, inside, apply)
    else:
        yield _Change("since_added_s", since_s, inside, facts.grace_s, apply)


def _whole(name: str, value: int, edge: int, least: int, apply: Callable[[float], Facts]) -> Iterator[_Change]:
    """Across the edge between `edge` and `edge + 1`, from whichever side the value is on."""
    needed, short = (edge + 1, edge) if value <= edge else (edge, edge + 1)
    if needed >= least:
        yield _Change(name, value, needed, short, apply)

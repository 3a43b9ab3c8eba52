"""The nearest change of one number that would have decided otherwise.

Candidates are numbers that were measured or counted, and the budgets; not the thresholds (a threshold moved to the
mean says the same as the mean moved to the threshold):

* `prefill_queue_size`, `average_kv_load`: every sample of the interval has this value (a queue that stands still);
* `prefill_queue_last`: the last sample alone, which says where the queue is heading;
* `workers`: of the component, with their GPUs; `workers_waiting`: that have not begun to start;
* `since_added_s`: from the last decode worker's coming to the interval's beginning;
* `max_gpu_budget`, `min_gpu_budget`.

*Nearest* is the smallest change relative to the larger of both values, `|needed - value| / max(|needed|, |value|)`;
of equal ones the first of this list. Each is proved before it is told: judged anew with `needed` the component's step
is another, and one step short of it (the next float, or one less of what is counted) it is still the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from dynamo_local.planner.rules import (
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD,
    Facts,
    Side,
    Verdict,
    floor_workers,
    judge,
)
from dynamo_local.planner.values import Counterfactual, Rule


@dataclass(frozen=True, slots=True)
class _Change:
    """`name` from `value` to `needed`; `short` is one step short of that. `apply` gives the facts with it."""

    name: str
    value: float
    needed: float
    short: float
    apply: Callable[[float], Facts]

    @property
    def size(self) -> float:
        largest = max(abs(self.needed), abs(self.value))
        return abs(self.needed - self.value) / largest if largest else 0.0


def nearest(facts: Facts, index: int, verdict: Verdict) -> Counterfactual | None:
    """For the side of that index. None where no single number would have changed its step."""
    if verdict.rule in (Rule.ADJUSTING, Rule.MISSING):
        return None
    for change in sorted(_changes(facts, index, verdict), key=lambda change: change.size):
        step = judge(change.apply(change.needed))[index].step
        if step != verdict.step and judge(change.apply(change.short))[index].step == verdict.step:
            return Counterfactual(change.name, change.value, change.needed, step)
    return None


WithSide = Callable[[Side], Facts]


def _changes(facts: Facts, index: int, verdict: Verdict) -> Iterator[_Change]:
    side = facts.sides[index]

    def with_side(changed: Side) -> Facts:
        return replace(facts, sides=(*facts.sides[:index], changed, *facts.sides[index + 1 :]))

    if side.mean is not None:
        yield from _means(side, side.mean, with_side)
        if side.ends is not None and side.samples > 1:
            yield from _last(side, side.mean, side.ends, with_side)
    others = [0, *(other.gpus_per_worker for i, other in enumerate(facts.sides) if i != index)]
    room = facts.max_gpu_budget - verdict.gpus_counted
    yield from _workers(facts, side, [room + gpus for gpus in others], with_side)
    if side.since_added_s is not None:
        yield from _ages(facts, side, side.since_added_s, with_side)
    yield from _max_budgets(facts, side, verdict, others)
    yield from _min_budgets(facts, side)


def mean_name(side: Side) -> str:
    """Of the number that is held against the thresholds; TensorBoard's names."""
    return "average_kv_load" if side.ends is None else "prefill_queue_size"


def _means(side: Side, mean: Fraction, with_side: WithSide) -> Iterator[_Change]:
    """To just beyond a threshold, or back onto it."""

    def apply(value: float) -> Facts:
        exact = Fraction(value)
        return with_side(replace(side, mean=exact, ends=None if side.ends is None else (exact, exact)))

    name, value = mean_name(side), float(mean)
    above, below = math.nextafter(side.up, math.inf), math.nextafter(side.down, -math.inf)
    if mean > side.up:
        yield _Change(name, value, side.up, above, apply)
    else:
        yield _Change(name, value, above, side.up, apply)
    if mean < side.down:
        yield _Change(name, value, side.down, below, apply)
    elif below >= 0:
        yield _Change(name, value, below, side.down, apply)


def _last(side: Side, mean: Fraction, ends: tuple[Fraction, Fraction], with_side: WithSide) -> Iterator[_Change]:
    """To where the trend leads just above the threshold, or onto it: `last + buffer * (last - first) = up`."""

    first, last = ends

    def apply(value: float) -> Facts:
        exact = Fraction(value)
        return with_side(replace(side, ends=(first, exact), mean=mean + (exact - last) / side.samples))

    buffer = NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD
    turn = (Fraction(side.up) + buffer * first) / (buffer + 1)
    emptied = float(turn)
    if emptied > turn:
        emptied = math.nextafter(emptied, -math.inf)
    grows = math.nextafter(emptied, math.inf)
    if last > turn:
        yield _Change("prefill_queue_last", float(last), emptied, grows, apply)
    else:
        yield _Change("prefill_queue_last", float(last), grows, emptied, apply)


def _workers(facts: Facts, side: Side, rooms: Iterable[int], with_side: WithSide) -> Iterator[_Change]:
    """To the floor, to either side of it, or to as many as leave room in the budget for one more (or no longer do)."""
    size, value = side.gpus_per_worker, side.capacity

    def apply(count: float) -> Facts:
        gpus = side.gpus_spoken_for + (int(count) - value) * size
        return with_side(replace(side, capacity=int(count), gpus_spoken_for=gpus))

    floor = floor_workers(facts.min_gpu_budget, size)
    edges = {floor - 1, floor, *(value + room // size - 1 for room in rooms if size)}
    for edge in sorted(edges):
        yield from _whole("workers", value, edge, side.waiting, apply)
    if side.waiting:

        def apply_waiting(count: float) -> Facts:
            return with_side(_with_waiting(side, int(count)))

        yield _Change("workers_waiting", side.waiting, 0, 1, apply_waiting)


def _with_waiting(side: Side, count: int) -> Side:
    """Fewer that wait: what they would have taken counts no more."""
    lacking = min(side.gpus_lacking, count * side.gpus_per_worker)
    return replace(
        side,
        waiting=count,
        capacity=side.capacity - side.waiting + count,
        deferred=min(side.deferred, count),
        gpus_lacking=lacking,
        gpus_spoken_for=side.gpus_spoken_for - side.gpus_lacking + lacking,
    )


def _ages(facts: Facts, side: Side, since_s: float, with_side: WithSide) -> Iterator[_Change]:
    """To the end of grace, or to just before it."""

    def apply(value: float) -> Facts:
        return with_side(replace(side, since_added_s=value))

    inside = math.nextafter(facts.grace_s, -math.inf)
    if since_s < facts.grace_s:
        yield _Change("since_added_s", since_s, facts.grace_s, inside, apply)
    else:
        yield _Change("since_added_s", since_s, inside, facts.grace_s, apply)


def _max_budgets(facts: Facts, side: Side, verdict: Verdict, others: Iterable[int]) -> Iterator[_Change]:
    """To where one more fits or no longer does: beside what is counted, without the GPU that the other component
    frees, or with the one that it takes first."""

    def apply(value: float) -> Facts:
        return replace(facts, max_gpu_budget=int(value))

    fits = verdict.gpus_counted + side.gpus_per_worker
    edges = {fits + sign * gpus - 1 for gpus in others for sign in (-1, 1)}
    for edge in sorted(edges):
        yield from _whole("max_gpu_budget", facts.max_gpu_budget, edge, facts.min_gpu_budget, apply)


def _min_budgets(facts: Facts, side: Side) -> Iterator[_Change]:
    """To where the floor lets one go or no longer does, or wants one more."""

    def apply(value: float) -> Facts:
        return replace(facts, min_gpu_budget=int(value))

    size, value = side.gpus_per_worker, facts.min_gpu_budget
    for edge in ((side.capacity - 1) * size, side.capacity * size):
        for change in _whole("min_gpu_budget", value, edge, 1, apply):
            if change.needed <= facts.max_gpu_budget:
                yield change


def _whole(name: str, value: int, edge: int, least: int, apply: Callable[[float], Facts]) -> Iterator[_Change]:
    """Across the edge between `edge` and `edge + 1`, from whichever side the value is on."""
    needed, short = (edge + 1, edge) if value <= edge else (edge, edge + 1)
    if needed >= least:
        yield _Change(name, value, needed, short, apply)

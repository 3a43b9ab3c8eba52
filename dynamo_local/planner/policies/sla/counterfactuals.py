"""The nearest change of one number that would have decided otherwise, each proved by judging again.

Candidates are `next_num_req` (the forecast), `max_gpu_budget`, `min_endpoint` and `max_step`. *Nearest* is the smallest
change relative to the larger of both values, as for the load planner. With `needed` the component's step is `step`; one
short of it (the next float, or one less of what is counted) it is still what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from dynamo_local.planner.policies.sla.bounds import Facts, judge
from dynamo_local.planner.values.decisions import Counterfactual

_LOOK_AT = 16
"""So many changes of either role are looked at in each direction: one that is farther off tells nobody anything."""

_NEAR = 1e-13
"""Of a number of requests: rounding moves a change by less."""

Step = Callable[[Facts], int]


def nearest(facts: Facts, index: int) -> Counterfactual | None:
    """For the side of that index. None where no single number would have changed its step."""
    side = facts.sides[index]

    def step(other: Facts) -> int:
        return judge(other)[index].target - side.capacity

    found = [*_by_requests(facts, step)]
    for name, numbers in _counts(facts).items():
        found += _by_count(facts, name, numbers, step)
    return min(found, key=_size, default=None)


def _size(other: Counterfactual) -> float:
    return abs(other.needed - other.value) / max(abs(other.needed), abs(other.value))


def _by_requests(facts: Facts, step: Step) -> Iterator[Counterfactual]:
    """Fewer, and more. Between two of the `_edges` every number of requests needs the same engines."""
    now = step(facts)
    for edges in (_edges(facts, -1), _edges(facts, +1)):
        before = facts.next_num_req
        for at in edges:
            other = step(facts._replace(next_num_req=at))
            if other != now:
                yield _exactly(facts, before, at, now, step)
                break
            before = at


def _edges(facts: Facts, direction: int) -> list[float]:
    """Numbers of requests, going away from the forecast, with one change of one role's engines between two of them."""
    changes = set()
    for side in facts.sides:
        if side.need is None or side.wanted is not None:
            continue
        engine = side.need.requests_per_engine(facts.interval_s)
        first = math.floor(facts.next_num_req / engine) + (direction > 0)
        changes |= {engine * (first + direction * n) for n in range(_LOOK_AT)}
    ahead = (count for count in changes if count >= 0 and (count - facts.next_num_req) * direction >= 0)
    away = sorted(ahead, reverse=direction < 0)
    between = [(a + b) / 2 for a, b in pairwise(away)]
    return [*between, 0.0] if direction < 0 else between


def _exactly(facts: Facts, same: float, different: float, now: int, step: Step) -> Counterfactual:
    """The float at which the step changes, between one where it is the same and one where it is not.

    Halving the whole distance takes some fifty judgements; mostly the change is where one of the roles needs another
    engine, so the few floats around those points are looked at first."""
    for side in facts.sides:
        if side.need is None or side.wanted is not None:
            continue
        edge = side.need.edge((same + different) / 2, facts.interval_s)
        low, high = sorted((same, different))
        near = [edge * (1 - _NEAR), edge * (1 + _NEAR)]
        if not (low < near[0] and near[1] < high):
            continue
        before, after = near if same < different else reversed(near)
        if step(facts._replace(next_num_req=before)) == now != step(facts._replace(next_num_req=after)):
            same, different = before, after
            break
    while (middle := same + (different - same) / 2) not in (same, different):
        if step(facts._replace(next_num_req=middle)) == now:
            same = middle
        else:
            different = middle
    return Counterfactual("next_num_req", facts.next_num_req, different, step(facts._replace(next_num_req=different)))


Directions = tuple[Iterable[int], Iterable[int]]


def _counts(facts: Facts) -> dict[str, Directions]:
    """The whole numbers that may matter, upwards and downwards: beyond the least that does not bind, none does."""
    wanted = [max(v.engines, facts.floor(s), s.capacity) for s, v in zip(facts.sides, judge(facts), strict=True)]
    gpus = sum(count * side.gpus_per_worker for count, side in zip(wanted, facts.sides, strict=True))
    farthest = max(abs(v.engines - s.capacity) for s, v in zip(facts.sides, judge(facts), strict=True))
    limits = {"max_gpu_budget": gpus, "min_endpoint": max(wanted) + 1, "max_step": farthest}
    values = {name: getattr(facts, name) for name in limits}
    return {
        name: (range(values[name] + 1, min(limit, values[name] + _LOOK_AT) + 1), _down(min(values[name], limit)))
        for name, limit in limits.items()
    }


def _down(value: int) -> range:
    return range(value - 1, max(0, value - _LOOK_AT), -1)


def _by_count(facts: Facts, name: str, numbers: Directions, step: Step) -> Iterator[Counterfactual]:
    """The first number in each direction that changes the step."""
    value, now = getattr(facts, name), step(facts)
    for direction in numbers:
        for number in direction:
            if (other := step(_with(facts, name, number))) != now:
                yield Counterfactual(name, value, number, other)
                break


def _with(facts: Facts, name: str, number: int) -> Facts:
    changed: dict[str, Any] = {name: number}
    return facts._replace(**changed)

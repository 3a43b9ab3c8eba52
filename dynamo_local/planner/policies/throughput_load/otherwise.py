"""The nearest change of one number that would have decided otherwise, for one role.

Candidates: each number that the load loop compared (to its limit); the predicted requests (to where it would have held;
where it held, to where it would not); the bound, where it kept a role up; the budgets, where they cut a wish. Each is
tried before it is reported: with `needed` the step is another one. *Nearest* is as for the load planner: the smallest
change relative to the larger of both values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynamo_local.planner.policies.throughput_load.budget import Wish, granted
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions
from dynamo_local.planner.policies.throughput_load.signals import Compared, Signals, judged
from dynamo_local.planner.policies.throughput_load.state import LoadVerdict, Role, ThroughputVerdict
from dynamo_local.planner.policies.throughput_load.throughput import needed_replicas
from dynamo_local.planner.values.decisions import Counterfactual
from dynamo_local.planner.values.scaling import LoadScaling, ThroughputScaling


class Settled(NamedTuple):
    """One role's step, and which rule decided it."""

    rule: LoadScaling | ThroughputScaling
    role: Role
    step: int
    load: LoadVerdict | None
    throughput: ThroughputVerdict | None
    bound: int | None


_JUDGED = (
    LoadScaling.SCALE_UP,
    LoadScaling.SCALE_DOWN,
    LoadScaling.NO_CHANGE,
    LoadScaling.SCALE_DOWN_REFUSED_CONSOLIDATION,
)
"""Rules that compare the engines' load, and nothing else."""


def nearest(
    settled: Settled, wishes: Sequence[tuple[Role, int]], options: ThroughputLoadOptions
) -> Counterfactual | None:
    """None where no single number would have given another step."""
    changes = [*_by_load(settled), *_by_prediction(settled, options), *_by_bound(settled)]
    if settled.rule.value == LoadScaling.GPU_BUDGET_GUARD_HOLD.value:
        changes += _by_budget(settled, wishes, options)
    other = [change for change in changes if change.step != settled.step]
    return min(other, key=_size, default=None)


def _size(change: Counterfactual) -> float:
    largest = max(abs(change.needed), abs(change.value))
    return abs(change.needed - change.value) / largest if largest else 0.0


def _by_load(settled: Settled) -> Iterator[Counterfactual]:
    load, role = settled.load, settled.role
    if load is None or not any(settled.rule is rule for rule in _JUDGED):
        return
    signals = load.signals
    for compared in {one.name: one for one in (*signals.up, *signals.down)}.values():
        needed = _across(compared)
        if needed < 0:
            continue
        rule = judged(_with(signals, compared.name, needed), capacity=role.pool.capacity, floor=role.floor)
        step = {LoadScaling.SCALE_UP: 1, LoadScaling.SCALE_DOWN: -1}.get(rule, 0)
        if step < 0 and role.pool.capacity - 1 < (settled.bound or 0):
            step = 0
        yield Counterfactual(compared.name, compared.value, needed, step)


def _across(compared: Compared) -> float:
    """The nearest value at which it holds, or no longer does."""
    at_limit = compared._replace(value=compared.limit)
    if at_limit.holds != compared.holds:
        return compared.limit
    towards = math.inf if compared.value <= compared.limit else -math.inf
    return math.nextafter(compared.limit, towards)


def _with(signals: Signals, name: str, value: float) -> Signals:
    return Signals(*(tuple(one._replace(value=value) if one.name == name else one for one in part) for part in signals))


def _by_bound(settled: Settled) -> Iterator[Counterfactual]:
    if settled.rule is LoadScaling.SCALE_DOWN_CAPPED_BY_THROUGHPUT and settled.bound is not None:
        yield Counterfactual("throughput_lower_bound", settled.bound, settled.role.pool.capacity - 1, -1)


def _by_prediction(settled: Settled, options: ThroughputLoadOptions) -> Iterator[Counterfactual]:
    """To the edges of the present number of workers, in whole requests; where neither jump nor budget took part."""
    seen, role, capacity = settled.throughput, settled.role, settled.role.pool.capacity
    if seen is None or seen.engine_rps is None or seen.predicted_rps is None or seen.bound != seen.replicas:
        return
    engine_rps, value = seen.engine_rps, seen.predicted_rps * options.throughput_adjustment_interval_s
    if not any(settled.rule is rule for rule in _PREDICTED):
        return
    window_s = options.throughput_adjustment_interval_s
    one = engine_rps * window_s

    def change(needed: int) -> Counterfactual:
        step = needed_replicas(needed / window_s, engine_rps, role.floor) - capacity
        least = 0 if options.loads else step  # beside the load loop it is only a lower bound
        return Counterfactual("predicted_num_req", value, needed, max(least, step))

    at_most = math.floor(capacity * one)
    one_less = math.floor((capacity - 1) * one)
    yield change(at_most if settled.step > 0 else at_most + 1)
    yield change(one_less + 1 if settled.step < 0 else one_less)


_PREDICTED = (ThroughputScaling.SET_LOWER_BOUND, ThroughputScaling.SCALE, ThroughputScaling.NO_CHANGE)


def _by_budget(
    settled: Settled, wishes: Sequence[tuple[Role, int]], options: ThroughputLoadOptions
) -> Iterator[Counterfactual]:
    asked = [Wish(role.pool.capacity, wanted, role.floor, role.pool.gpus_per_worker) for role, wanted in wishes]
    total = sum(max(one.wanted, one.floor) * one.gpus for one in asked)
    index = [role.name for role, _ in wishes].index(settled.role.name)

    def step(gpus_max: float, gpus_min: int) -> int:
        return granted(asked, gpus_max=gpus_max, gpus_min=gpus_min)[index].replicas - asked[index].current

    if total > options.gpus_max:
        yield Counterfactual("max_gpu_budget", options.gpus_max, total, step(total, options.gpus_min))
    elif total < options.gpus_min:
        yield Counterfactual("min_gpu_budget", options.gpus_min, total, step(options.gpus_max, total))

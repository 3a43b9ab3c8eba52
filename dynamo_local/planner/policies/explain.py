"""A decision in words, with its numbers: one line for each component, fit for a terminal at night."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from dynamo_local.planner.policies.throughput_load.reasons import NAMES
from dynamo_local.planner.values import Counterfactual, Decision, Reason, Rule

_RULES = frozenset(Rule)

_WORDS = NAMES | {
    "average_kv_load": "KV load",
    "prefill_queue_size": "the queue",
    "prefill_queue_last": "the queue's last sample",
    "workers": "worker",
    "workers_waiting": "waiting worker",
    "max_gpu_budget": "max-gpu-budget",
    "min_gpu_budget": "min-gpu-budget",
    "min_endpoint": "min-endpoint",
    "max_step": "max-throughput-scaling-replicas",
}


def explain(decision: Decision) -> tuple[str, ...]:
    """`VllmWorker +1 (scale_up): KV load 0.93 > 0.9 with 3 of 8 GPUs held; at KV load 0.9 it would have held`.

    One line for each component, in the order of the steps, then one for each note.
    """
    return (*(explain_reason(reason) for reason in decision.reasons), *decision.notes)


def explain_reason(reason: Reason) -> str:
    """One component's line."""
    what = f"{reason.step:+d}" if reason.step else "holds"
    try:
        why = reason.why or (_why(reason) if reason.rule in _RULES else _numbers(reason.numbers))
    except KeyError as missing:  # the log may be from another version
        why = f"written by another version: there is no {missing} in it"
    line = f"{reason.component} {what} ({reason.rule}): {why}"
    if reason.deferred and reason.step > 0:
        line += "; it starts when the GPU of this decision's down is really free"
    elif reason.deferred:
        line += "; it had not started: it waited for a GPU"
    return line if reason.otherwise is None else f"{line}; {_otherwise(reason.otherwise)}"


def _why(reason: Reason) -> str:
    numbers, rule = reason.numbers, reason.rule
    gpus = _gpus(numbers)
    if rule == Rule.GPU_FREED:
        return f"the GPU that it waited for is free, {gpus}"
    if rule == Rule.ADJUSTING:
        return "an adjustment is under way"
    if rule == Rule.MISSING:
        return "no sample in this interval"
    if rule == Rule.BELOW_FLOOR:
        return f"{_workers(numbers)}, below the floor of {numbers['workers_min']:g}, {gpus}"
    if rule == Rule.BUDGET:
        return f"{_load(numbers)}, but {gpus} and one more takes {numbers['gpus_per_worker']:g}"
    ends: Mapping[str, str] = {
        Rule.SCALE_UP: f" with {gpus}",
        Rule.SCALE_DOWN: f" with {_workers(numbers)}",
        Rule.TAKE_BACK: ", and one that still drains is taken back",
        Rule.FLOOR: f", but {_workers(numbers)} is the floor",
        Rule.GRACE: f", but the last one was added {_added(numbers.get('since_added_s', 0))} "
        f"(grace {numbers.get('grace_s', 0):g} s)",
        Rule.QUEUE_EMPTYING: f", but it heads for {numbers.get('prefill_queue_expected', 0):.4g}",
        Rule.COMING: ", but one more is on its way",
    }
    return _load(numbers) + ends.get(rule, "")


def _added(since_s: float) -> str:
    """When a worker was added, seconds before the interval began; negative: within the interval."""
    return f"{since_s:.0f} s before the interval" if since_s >= 0 else f"{-since_s:.0f} s into the interval"


def _numbers(numbers: Mapping[str, float]) -> str:
    """Those of a policy whose rules have no words here."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items()) or "no numbers"


def _load(numbers: Mapping[str, float]) -> str:
    """The mean and how it stands to the thresholds."""
    for name in ("average_kv_load", "prefill_queue_size"):
        if name in numbers:
            mean, down, up = numbers[name], numbers["scale_down_threshold"], numbers["scale_up_threshold"]
            if mean > up:
                return f"{_WORDS[name]} {_beside(mean, up)} > {up:g}"
            if mean < down:
                return f"{_WORDS[name]} {_beside(mean, down)} < {down:g}"
            return f"{_WORDS[name]} {mean:.3g} is within {down:g} and {up:g}"
    return f"{_workers(numbers)}, and no sample"


def _beside(value: float, threshold: float) -> str:
    """The value, with as few digits as still show that it is not the threshold."""
    for digits in range(3, 17):
        text = f"{value:.{digits}g}"
        if float(text) != threshold:
            return text
    return repr(value)


def _workers(numbers: Mapping[str, float]) -> str:
    return _count(numbers["workers"], "worker")


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _gpus(numbers: Mapping[str, float]) -> str:
    return f"{numbers['gpus_counted']:g} of {numbers['max_gpu_budget']:g} GPUs held or promised"


def _otherwise(other: Counterfactual) -> str:
    would = f"it would have gone {other.step:+d}" if other.step else "it would have held"
    name = _WORDS.get(other.name, other.name)
    if other.name in ("workers", "workers_waiting"):
        return f"with {_count(other.needed, name)} instead of {other.value:g} {would}"
    if other.name == "since_added_s":
        return f"at {_rounded(other)} s since the last one was added {would}"
    if other.name == "next_num_req":
        return f"with {_rounded(other)} requests in the next interval {would}"
    if other.name.endswith("_gpu_budget") or other.name in ("min_endpoint", "max_step"):
        return f"with {name} {other.needed:g} instead of {other.value:g} {would}"
    return f"at {name} {_rounded(other)} {would}"


def _rounded(other: Counterfactual) -> str:
    """For a person: `above 0.9` for the float just beyond 0.9, else six digits, rounded away from what there was."""
    text = f"{other.needed:.6g}"
    if float(text) == other.needed:
        return text
    if math.isclose(float(text), other.needed, rel_tol=1e-9):
        return f"{'above' if other.needed > float(text) else 'below'} {text}"
    away = ROUND_CEILING if other.needed > other.value else ROUND_FLOOR
    return f"{Context(6, away).create_decimal_from_float(other.needed):g}"

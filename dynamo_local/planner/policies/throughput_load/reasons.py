"""Why each role's step is what it is: Dynamo's enums, and the numbers that were compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.policies.budget import Claim, Fit, Granted, granted
from dynamo_local.planner.policies.throughput_load.loops import needed_replicas
from dynamo_local.planner.policies.throughput_load.signals import Compared, Signals, judged
from dynamo_local.planner.policies.throughput_load.state import LoadVerdict, Role, ScalingState, ThroughputVerdict
from dynamo_local.planner.values import Counterfactual, LoadScaling, Reason, ThroughputScaling

# --- explaining
# A role's reason in words, with its numbers; and the words for numbers, which `explain` uses, too.

Numbers = Mapping[str, float]

NAMES = {
    "estimated_ttft_ms_min": "TTFT on the best engine",
    "estimated_ttft_ms_max": "TTFT on the worst engine",
    "waiting_ms_max": "the wait behind the queue",
    "waiting_ms_consolidated": "the wait behind the queue, with one engine less,",
    "prefill_busy_max": "the busiest engine's share of time",
    "prefill_busy_consolidated": "the busiest engine's share of time, with one less,",
    "estimated_itl_ms_min": "ITL on the best engine",
    "estimated_itl_ms_max": "ITL on the worst engine",
    "estimated_itl_ms_consolidated": "ITL with one engine less",
    "decode_kv_tokens_max": "KV tokens on the fullest engine",
    "decode_kv_tokens_consolidated": "KV tokens per engine, with one less,",
    "prefill_queue_any": "the longest queue",
    "prefill_queue_max": "the longest queue of the interval",
    "prefill_queue_consolidated": "the longest queue, with one engine less,",
    "decode_kv_any": "KV on the fullest engine",
    "decode_kv_max": "the most KV of the interval",
    "decode_kv_consolidated": "KV per engine, with one less,",
    "engines_hung": "engines that run no pass though requests wait",
    "predicted_num_req": "predicted requests",
    "throughput_lower_bound": "the throughput loop's lower bound",
}

_UP = ("estimated_ttft_ms_min", "estimated_itl_ms_min", "prefill_queue_any", "decode_kv_any")
"""Those that ask for more when they are above their limits."""


def why(rule: str, numbers: Numbers) -> str:
    """`TTFT on the best engine 720 > 500`."""
    return _WORDS.get(rule, _loads)(numbers)


def _loads(numbers: Numbers) -> str:
    """The comparisons: those that ask for more, then, where one could go, what would be without it."""
    ups = [name for name in _UP if name in numbers]
    downs = _downs(numbers) if numbers["workers"] > max(1, numbers["workers_min"]) else []
    if ups or downs:
        return "; ".join(_compared(numbers, name) for name in (*ups, *downs))
    return _sized(numbers) if "predicted_replicas" in numbers else "nothing was due"


def _up(numbers: Numbers) -> str:
    over = [name for name in _UP if name in numbers and numbers[name] >= numbers[f"{name}_limit"]]
    return " and ".join(_compared(numbers, name) for name in over)


def _downs(numbers: Numbers) -> list[str]:
    """The estimates with one engine less, and the reason that keeps all from going."""
    compared = [name for name in numbers if f"{name}_limit" in numbers and name not in _UP]
    after = [name for name in compared if name.endswith("_consolidated") or name == "engines_hung"]
    return after or compared


def _down(numbers: Numbers) -> str:
    return " and ".join(_compared(numbers, name) for name in _downs(numbers))


def _refused(numbers: Numbers) -> str:
    after = [name for name in numbers if name.endswith("_consolidated")]
    return " and ".join(_compared(numbers, name) for name in after if numbers[name] >= numbers[f"{name}_limit"])


def _compared(numbers: Numbers, name: str) -> str:
    value, limit = numbers[name], numbers[f"{name}_limit"]
    sign = ">" if value > limit else "<" if value < limit else "="
    return f"{NAMES.get(name, name)} {value:.4g} {sign} {limit:g}"


def _sized(numbers: Numbers) -> str:
    words = f"the throughput loop's bound is {numbers['throughput_lower_bound']:g}"
    if "predicted_replicas" in numbers:
        rps, engine = numbers["predicted_requests_per_second"], numbers["engine_capacity_requests_per_second"]
        needed = numbers["predicted_replicas"]
        words = f"{rps:.4g} requests/s are expected, a worker takes {engine:.4g}: {needed:g} needed; {words}"
    if numbers.get("sla_unreachable"):
        words += " (no batch keeps the target: sized for the fastest)"
    return words


def _gpus(numbers: Numbers) -> str:
    names = [name for name in ("max_gpu_budget", "min_gpu_budget") if name in numbers]
    budgets = [f"{name.replace('_', '-')} {numbers[name]:g}" for name in names]
    return ", ".join((f"{numbers['gpus_counted']:g} GPUs counted", *budgets))


def _workers(numbers: Numbers) -> str:
    return f"{numbers['workers_ready']:g} ready of {numbers['workers']:g}"


def _said(text: str) -> Callable[[Numbers], str]:
    return lambda numbers: text


_WORDS: dict[str, Callable[[Numbers], str]] = {
    "no_fpm_data": _said("its engines publish no forward-pass metrics"),
    "scaling_in_progress": lambda numbers: f"workers start or leave ({_workers(numbers)})",
    "worker_count_mismatch": lambda numbers: (
        f"metrics of {numbers['fpm_engines']:g} engines, where {numbers['fpm_engines_expected']:g} are ready"
    ),
    "insufficient_data": lambda numbers: (
        f"{numbers['samples']:g} samples of at least {numbers['samples_min']:g} that tell how its load acts, "
        "or its engines do not tell their limits"
        if "samples" in numbers
        else "how much waits in the prefill queue is not known"
    ),
    "partner_not_ready": _said("the other role cannot be judged"),
    "unset": _said("nothing was due"),
    "no_traffic_data": _said("how many requests came is not known"),
    "predict_failed": _said("the predictor failed"),
    "model_not_ready": _said("what a worker can take is not known yet, or what requests look like"),
    "scale_up": _up,
    "scale_down": _down,
    "scale_down_capped_by_throughput": lambda numbers: (
        f"{_down(numbers)}, but the throughput loop's bound is {numbers['throughput_lower_bound']:g}"
    ),
    "scale_down_refused_consolidation": _refused,
    "set_lower_bound": _sized,
    "scale": _sized,
    "gpu_budget_guard_hold": lambda numbers: f"{numbers['workers_wanted']:g} wanted, {_gpus(numbers)}",
    "gpu_budget_reconcile": lambda numbers: f"floor {numbers['workers_min']:g}, {_gpus(numbers)}",
    "override_by_user_plugin": lambda numbers: f"a plugin wants {numbers['workers_wanted']:g}",
}


# --- otherwise
# The nearest change of one number that would have decided otherwise, for one role.
#
# Candidates are the numbers that the load loop compared (to their limits), the predicted requests, the bound that kept
# a role up, and the budgets that cut a claim. Each is tried before it is reported: with `needed` the step is another
# one. *Nearest* is as for the load planner: the smallest change relative to the larger of both values.


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


def nearest(settled: Settled, claims: Sequence[tuple[Role, int]], options: PlannerConfig) -> Counterfactual | None:
    """None where no single number would have given another step."""
    changes = [*_by_load(settled), *_by_prediction(settled, options), *_by_bound(settled)]
    if settled.rule.value == LoadScaling.GPU_BUDGET_GUARD_HOLD.value:
        changes += _by_budget(settled, claims, options)
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


def _by_prediction(settled: Settled, options: PlannerConfig) -> Iterator[Counterfactual]:
    """To the edges of the present number of workers, in whole requests; where neither jump nor budget took part."""
    seen, role, capacity = settled.throughput, settled.role, settled.role.pool.capacity
    if seen is None or seen.engine_rps is None or seen.predicted_rps is None or seen.bound != seen.replicas:
        return
    engine_rps, value = seen.engine_rps, seen.predicted_rps * options.throughput_adjustment_interval_seconds
    if not any(settled.rule is rule for rule in _PREDICTED):
        return
    window_s = options.throughput_adjustment_interval_seconds
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
    settled: Settled, claims: Sequence[tuple[Role, int]], options: PlannerConfig
) -> Iterator[Counterfactual]:
    requested = [Claim(role.pool.capacity, wanted, role.floor, role.pool.gpus_per_worker) for role, wanted in claims]
    total = sum(max(one.wanted, one.floor) * one.gpus for one in requested)
    index = [role.name for role, _ in claims].index(settled.role.name)

    def step(gpus_max: float, gpus_min: int) -> int:
        return granted(requested, gpus_max=gpus_max, gpus_min=gpus_min)[index].replicas - requested[index].current

    if total > options.max_gpu_budget:
        yield Counterfactual("max_gpu_budget", options.max_gpu_budget, total, step(total, options.gpus_floor))
    elif total < options.gpus_floor:
        yield Counterfactual("min_gpu_budget", options.gpus_floor, total, step(options.max_gpu_budget, total))


LOAD_DECISION, THROUGHPUT_DECISION = "load_scaling_decision", "throughput_scaling_decision"
"""The names of Dynamo's enums: the keys of `Reason.decisions`."""


class Outcome(NamedTuple):
    """One role at the end of a tick. `wanted` was proposed, and `grant` is what floors and budget left of it.
    `busy`: something starts or leaves. `blind` says why the workers cannot be observed. `overridden`: plugins decided
    otherwise than the policy's own stages."""

    role: Role
    wanted: int
    grant: Granted
    busy: bool
    blind: str | None
    overridden: bool

    @property
    def replicas(self) -> int:
        """The workers that are to serve."""
        return self.grant.replicas

    @property
    def step(self) -> int:
        """The steps."""
        return self.grant.replicas - self.role.pool.capacity


def reason_of(outcome: Outcome, outcomes: Sequence[Outcome], state: ScalingState, options: PlannerConfig) -> Reason:
    """The reason of one of these outcomes."""
    name = outcome.role.name
    load, throughput = state.load.get(name), state.throughput.get(name)
    rule = _rule(outcome, load, throughput, options)
    settled = Settled(rule, outcome.role, outcome.step, load, throughput, state.bounds.get(name))
    numbers = _numbers(outcome, outcomes, state, options)
    held = outcome.busy or outcome.blind is not None
    return Reason(
        outcome.role.pool.component,
        outcome.step,
        rule.value,
        numbers,
        None if held else nearest(settled, [(one.role, one.wanted) for one in outcomes], options),
        why=why(rule.value, numbers) if outcome.blind is None else outcome.blind,
        decisions={
            LOAD_DECISION: _load_decision(rule, load, options),
            THROUGHPUT_DECISION: _throughput_decision(rule, throughput, options),
        },
    )


def _rule(
    outcome: Outcome,
    load: LoadVerdict | None,
    throughput: ThroughputVerdict | None,
    options: PlannerConfig,
) -> LoadScaling | ThroughputScaling:
    """The rules that decided, the last one first."""
    enum = LoadScaling if options.loads else ThroughputScaling
    if outcome.blind is not None:
        return LoadScaling.NO_FPM_DATA if options.loads else ThroughputScaling.NO_TRAFFIC_DATA
    if outcome.busy and not outcome.step:
        return LoadScaling.SCALING_IN_PROGRESS
    if outcome.grant.fit is Fit.RECONCILED:
        return enum.GPU_BUDGET_RECONCILE
    if outcome.grant.fit is Fit.GUARD_HOLD and not outcome.step:
        return enum.GPU_BUDGET_GUARD_HOLD
    if outcome.overridden:
        return enum.OVERRIDE_BY_USER_PLUGIN
    raised = load is None or load.wanted is None or load.wanted < outcome.replicas
    if outcome.step > 0 and raised:
        return ThroughputScaling.SET_LOWER_BOUND if options.loads else ThroughputScaling.SCALE
    if load is not None:
        return load.rule
    if outcome.step:
        return ThroughputScaling.SCALE
    return ThroughputScaling.NO_CHANGE if throughput is None else throughput.rule


_SETTLED = {"gpu_budget_guard_hold", "gpu_budget_reconcile", "override_by_user_plugin", "scaling_in_progress"}
"""The reasons after both loops."""


def _load_decision(rule: LoadScaling | ThroughputScaling, load: LoadVerdict | None, options: PlannerConfig) -> str:
    if not options.loads:
        return LoadScaling.DISABLED.value
    if rule.value in _SETTLED:
        return rule.value
    return (LoadScaling.UNSET if load is None else load.rule).value


def _throughput_decision(
    rule: LoadScaling | ThroughputScaling, throughput: ThroughputVerdict | None, options: PlannerConfig
) -> str:
    if not options.predicts:
        return ThroughputScaling.DISABLED.value
    if rule.value in _SETTLED and not options.loads:
        return rule.value
    return (ThroughputScaling.UNSET if throughput is None else throughput.rule).value


def _numbers(
    outcome: Outcome, outcomes: Sequence[Outcome], state: ScalingState, options: PlannerConfig
) -> dict[str, float]:
    role = outcome.role
    pool, name = role.pool, role.name
    numbers: dict[str, float] = {
        "workers": pool.capacity,
        "workers_ready": pool.ready,
        "workers_wanted": outcome.wanted,
        "workers_min": role.floor,
        "gpus_per_worker": pool.gpus_per_worker,
        "gpus_counted": sum(one.role.pool.capacity * one.role.pool.gpus_per_worker for one in outcomes),
    }
    numbers["max_gpu_budget"] = options.max_gpu_budget
    if options.gpus_floor:
        numbers["min_gpu_budget"] = options.gpus_floor
    if name in state.bounds:
        numbers["throughput_lower_bound"] = state.bounds[name]
    load, throughput = state.load.get(name), state.throughput.get(name)
    if load is not None:
        numbers.update(load.numbers)
        for compared in (*load.signals.up, *load.signals.low, *load.signals.down):
            numbers[compared.name], numbers[f"{compared.name}_limit"] = compared.value, compared.limit
    if throughput is not None:
        numbers.update(_of_throughput(throughput, state))
    return numbers


def _of_throughput(verdict: ThroughputVerdict, state: ScalingState) -> dict[str, float]:
    found = {
        "predicted_requests_per_second": verdict.predicted_rps,
        "engine_capacity_requests_per_second": verdict.engine_rps,
        "predicted_replicas": verdict.replicas,
        "sla_unreachable": None if verdict.within else 1.0,
    }
    if (seen := state.prediction) is not None:
        found |= {"predicted_num_req": seen.num_req, "predicted_isl": seen.isl, "predicted_osl": seen.osl}
        found |= {"kv_hit_rate": seen.kv_hit_rate, "accept_length": seen.accept_length}
    return {name: value for name, value in found.items() if value is not None}

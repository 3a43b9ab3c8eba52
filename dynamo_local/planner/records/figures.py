"""The figures of a logged decision, by the names of Dynamo's gauges (without their prefix), for `/metrics` and reports.

They are taken from the line as it is logged, so that lines of earlier versions are read, too. A value that a line does
not have, or says is missing, is absent: never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dynamo_local.core.types import Missing
from dynamo_local.planner.values import LoadScaling, Reading, Reason, Rule, ThroughputScaling, WorkerPools

Line = Mapping[str, Any]
Figures = dict[str, float]

LOAD, THROUGHPUT = "load_scaling_decision", "throughput_scaling_decision"
STATES: Mapping[str, tuple[str, ...]] = {
    LOAD: tuple(state.value for state in LoadScaling),
    THROUGHPUT: tuple(state.value for state in ThroughputScaling),
}
"""Dynamo's enums, and what they may be."""

OBSERVED = {
    "isl": "observed_input_sequence_tokens",
    "osl": "observed_output_sequence_tokens",
    "ttft_ms": "observed_ttft_ms",
    "itl_ms": "observed_itl_ms",
    "request_duration_s": "observed_request_duration_seconds",
    "kv_hit_rate": "observed_kv_hit_rate",
}
ENGINE_TOKENS = ("queued_prefill_tokens", "queued_decode_kv_tokens", "inflight_decode_kv_tokens")


def window_figures(line: Line) -> Figures | None:
    """The traffic, its forecast and the capacity of an engine; None if this decision was not about them."""
    inputs = line["inputs"]
    traffic, prediction = inputs.get("traffic"), inputs.get("prediction")
    if traffic is None and prediction is None:
        return None
    found: Figures = {}
    if isinstance(traffic, dict):
        _put(found, {name: traffic.get(key) for key, name in OBSERVED.items()})
        num_req, duration_s = number(traffic.get("num_req")), number(traffic.get("duration_s"))
        if num_req is not None and duration_s:
            found["observed_requests_per_second"] = num_req / duration_s
    if isinstance(prediction, dict):
        window_s, num_req = number(_aims(line).get("window_s")), number(prediction.get("num_req"))
        if num_req is not None and window_s:
            found["predicted_requests_per_second"] = num_req / window_s
        _put(found, {"predicted_input_sequence_tokens": prediction.get("isl")})
        _put(found, {"predicted_output_sequence_tokens": prediction.get("osl")})
    for role, reason in _by_role(line):
        capacity = _capacity_rps(role, reason["numbers"])
        _put(found, {f"engine_{role}_capacity_requests_per_second": capacity})
    return found


def latency_figures(line: Line) -> Figures | None:
    """The estimated latencies on the worst engine; None if this decision was not about them."""
    found: Figures = {}
    for role, reason in _by_role(line):
        numbers = reason["numbers"]
        names = {"ttft_ms": "prefill", "itl_ms": "decode"}
        for what, whose in names.items():
            # An aggregated engine has both. `expected_ms` is the calculator's: of one engine that takes what it can.
            value = numbers.get(f"estimated_{what}", numbers.get(f"estimated_{what}_max"))
            if value is None and role == whose:
                value = numbers.get("expected_ms")
            _put(found, {f"estimated_{what}": value})
    if found or line["inputs"].get("traffic") is not None:
        return found
    by_loads = any(state[LOAD] not in ("unset", "disabled") for state in scaling_decisions(line).values())
    return found if by_loads else None


def fleet_figures(line: Line) -> Figures:
    """Replicas, GPUs, bounds and targets."""
    found: Figures = {}
    targets, aims = line["decision"].get("targets", {}), _aims(line)
    for role, pool in _pools(line):
        ready, coming = number(pool.get("ready")), number(pool.get("coming")) or 0.0
        _put(found, {f"num_{role}_replicas": ready, f"predicted_num_{role}_replicas": targets.get(pool["component"])})
        if ready is not None:
            found[f"capacity_{role}_replicas"] = ready + coming
        gpus = number(pool.get("gpus_held"))
        if gpus is not None:
            found["gpus_held"] = found.get("gpus_held", 0.0) + gpus
    for role, reason in _by_role(line):
        numbers = reason["numbers"]
        _put(
            found,
            {
                f"needed_{role}_replicas": numbers.get("predicted_replicas", numbers.get("engines")),
                f"min_{role}_replicas": numbers.get("workers_min"),
                f"bound_{role}_replicas": numbers.get("throughput_lower_bound"),
            },
        )
    bounds = {name: aims.get(name) for name in ("min_gpu_budget", "max_gpu_budget")}
    _put(found, {**bounds, "sla_target_ttft_ms": aims.get("ttft_ms"), "sla_target_itl_ms": aims.get("itl_ms")})
    return found


def load_figures(line: Line) -> Figures:
    """How loaded the queue, the KV caches and the fullest engines were."""
    inputs = line["inputs"]
    found: Figures = {}
    _put(found, {name: inputs.get(name) for name in ("prefill_queue_size", "average_kv_load", "num_queued_request")})
    for loads in (inputs.get("engines") or {}).values():
        for name in ENGINE_TOKENS:
            value = number(loads.get(f"{name}_max"))
            if value is not None:
                found[name] = max(value, found.get(name, 0.0))
    return found


def target_figures(line: Line) -> Figures:
    """The share (0..1) of the last minute's requests that kept both targets."""
    minute = (line.get("targets") or {}).get("minute") or {}
    found: Figures = {}
    _put(found, {"kept_targets": minute.get("share")})
    return found


def all_figures(line: Line) -> Figures:
    """All of them together."""
    window, latency = window_figures(line) or {}, latency_figures(line) or {}
    return {**target_figures(line), **fleet_figures(line), **load_figures(line), **window, **latency}


def scaling_decisions(line: Line) -> dict[str, dict[str, str]]:
    """Dynamo's two enums, by component. A policy without those loops has its rules said in their words."""
    policy = line["inputs"].get("policy", "load")
    found = {}
    for reason in line["decision"]["reasons"]:
        reported = reason.get("decisions") or _in_dynamo_s_words(policy, str(reason["rule"]), reason["step"])
        found[reason["component"]] = {
            name: reported[name] if reported.get(name) in states else "unset" for name, states in STATES.items()
        }
    return found


_AS_LOAD: Mapping[str, LoadScaling] = {
    Rule.MISSING: LoadScaling.INSUFFICIENT_DATA,
    Rule.ADJUSTING: LoadScaling.SCALING_IN_PROGRESS,
    Rule.BUDGET: LoadScaling.GPU_BUDGET_GUARD_HOLD,
    Rule.OVERRIDDEN: LoadScaling.OVERRIDE_BY_USER_PLUGIN,
}
_AS_THROUGHPUT: Mapping[str, ThroughputScaling] = {
    "no_traffic_data": ThroughputScaling.NO_TRAFFIC_DATA,
    "predict_failed": ThroughputScaling.PREDICT_FAILED,
    "disaggregated_only": ThroughputScaling.DISABLED,
    "max_gpu_budget": ThroughputScaling.GPU_BUDGET_GUARD_HOLD,
    "overridden": ThroughputScaling.OVERRIDE_BY_USER_PLUGIN,
}


def _in_dynamo_s_words(policy: str, rule: str, step: int) -> dict[str, str]:
    """`load` moves by loads alone, `sla` and `slo` by traffic alone."""
    if policy in ("sla", "slo"):
        state = ThroughputScaling.SCALE if step else ThroughputScaling.NO_CHANGE
        return {LOAD: LoadScaling.DISABLED.value, THROUGHPUT: _AS_THROUGHPUT.get(rule, state).value}
    moved = LoadScaling.SCALE_UP if step > 0 else LoadScaling.SCALE_DOWN if step < 0 else LoadScaling.NO_CHANGE
    found = moved if step else _AS_LOAD.get(rule, moved)
    return {LOAD: found.value, THROUGHPUT: ThroughputScaling.DISABLED.value}


def number(value: Any) -> float | None:
    """The value, if it is a finite number; a logged `Missing` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _put(found: Figures, values: Mapping[str, Any]) -> None:
    found.update({name: known for name, value in values.items() if (known := number(value)) is not None})


def _aims(line: Line) -> Mapping[str, Any]:
    return line["inputs"].get("aims") or {}


def _pools(line: Line) -> Iterator[tuple[str, Mapping[str, Any]]]:
    fleet = line["inputs"].get("fleet") or {}
    for role in ("prefill", "decode"):
        if fleet.get(role):
            yield role, fleet[role]


def _by_role(line: Line) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each role's reason; of an aggregated graph decode's."""
    roles = {pool["component"]: role for role, pool in _pools(line)}
    for reason in line["decision"]["reasons"]:
        if reason["component"] in roles:
            yield roles[reason["component"]], reason


def _capacity_rps(role: str, numbers: Mapping[str, float]) -> float | None:
    """Requests per second that one engine takes within its target."""
    known = numbers.get("engine_capacity_requests_per_second")
    if known is not None or "engine_tokens_per_s" not in numbers:
        return known
    tokens = numbers.get("next_isl" if role == "prefill" else "next_osl")
    discount = min(1.0, numbers.get("p_correction", 1.0)) if role == "prefill" else 1.0
    return numbers["engine_tokens_per_s"] / (tokens * discount) if tokens and discount else None


# --- scalars
# The TensorBoard scalars of a planner, as values, under Dynamo's names.
#
# A value that is missing gives no point: a curve shows a gap instead of a wrong 0.

PREFILL_QUEUE_SIZE = "prefill_queue_size"
AVERAGE_KV_LOAD = "average_kv_load"
NUM_QUEUED_REQUEST = "num_queued_request"
NUM_PREFILL_WORKERS = "num_prefill_workers"
NUM_DECODE_WORKERS = "num_decode_workers"
NUM_GPU = "num_gpu"
PREFILL_SCALING_ACTION = "prefill_scaling_action"
DECODE_SCALING_ACTION = "decode_scaling_action"


def of_reading(reading: Reading, pools: WorkerPools) -> dict[str, float]:
    """Scalars of one observation: queue (requests), mean KV load (0..1), requests that wait in decode workers, the
    workers that serve, and the GPUs that both components hold, leaving workers included.

    The mean is over the workers that answered; the sum needs all of them.
    """
    points: dict[str, float] = {
        NUM_PREFILL_WORKERS: 0 if pools.prefill is None else pools.prefill.ready,
        NUM_DECODE_WORKERS: pools.decode.ready,
        NUM_GPU: pools.gpus_held,
    }
    if reading.queue is not None and not isinstance(reading.queue, Missing) and math.isfinite(reading.queue):
        points[PREFILL_QUEUE_SIZE] = reading.queue
    if reading.kv.count:
        points[AVERAGE_KV_LOAD] = float(reading.kv.usage / reading.kv.count)
        if reading.kv.count == len(reading.loads):
            points[NUM_QUEUED_REQUEST] = reading.kv.waiting
    return points


def of_decision(reasons: Iterable[Reason], pools: WorkerPools) -> dict[str, float]:
    """The steps that were decided, whether or not anything acts on them.

    An up that waits for a GPU is counted once, in the decision that planned it, not again when it is carried out.
    """
    names: Mapping[str, str] = {
        pools.decode.component: DECODE_SCALING_ACTION,
        **({pools.prefill.component: PREFILL_SCALING_ACTION} if pools.prefill is not None else {}),
    }
    return {names[reason.component]: reason.step for reason in reasons if reason.rule != Rule.GPU_FREED}

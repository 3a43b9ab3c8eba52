"""Lines of a decision log, made of numbers: a policy with targets in windows of 180 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo_local.core.types import Missing
from dynamo_local.planner.records.decision_log import (
    Aims,
    DecisionRecord,
    EngineLoads,
    Inputs,
    Outcome,
    StepOutcome,
    as_json,
)
from dynamo_local.planner.values import Decision, Pool, Prediction, Reason, Traffic, WorkerPools

PREFILL, DECODE = "PrefillWorker", "VllmWorker"
BEGAN_S, WINDOW_S = 1.8e9, 180.0
POOLS = WorkerPools(Pool(PREFILL, 1, ready=2, gpus_held=2), Pool(DECODE, 2, ready=3, coming=1, gpus_held=8))
TRAFFIC = Traffic(
    180.0, WINDOW_S, num_req=720.0, isl=3000.0, osl=300.0, ttft_ms=240.0, itl_ms=9.0, request_duration_s=3.0
)
AIMS = Aims(ttft_ms=300.0, itl_ms=10.0, max_gpu_budget=12, window_s=WINDOW_S)
PREDICTION = Prediction(num_req=900.0, isl=3100.0, osl=310.0, source="constant")
NUMBERS = {"workers_min": 1.0, "predicted_replicas": 3.0, "throughput_lower_bound": 2.0}
OF_PREFILL = {**NUMBERS, "engine_capacity_requests_per_second": 2.5, "estimated_ttft_ms": 250.0}
OF_DECODE = {**NUMBERS, "engine_capacity_requests_per_second": 1.5, "estimated_itl_ms": 9.5}


def reasons(
    step: int = 0, prefill: dict[str, float] = OF_PREFILL, decode: dict[str, float] = OF_DECODE, why: str = "so it is"
) -> tuple[Reason, ...]:
    """Prefill holds; decode makes the step."""
    both = {"load_scaling_decision": "no_change", "throughput_scaling_decision": "set_lower_bound"}
    moved = {**both, "load_scaling_decision": "scale_up"} if step > 0 else both
    return (
        Reason(PREFILL, 0, "no_change", prefill, why=why, decisions=both),
        Reason(DECODE, step, "scale_up" if step else "no_change", decode, why=why, decisions=moved),
    )


def record(
    number: int = 1,
    *,
    step: int = 0,
    traffic: Traffic | Missing | None = TRAFFIC,
    prediction: Prediction | None = PREDICTION,
    pools: WorkerPools = POOLS,
    told: tuple[Reason, ...] | None = None,
    policy: str = "throughput-load",
) -> DecisionRecord:
    """The decision at the end of that window."""
    at_s = number * WINDOW_S
    found = reasons(step) if told is None else told
    inputs = Inputs(at_s - WINDOW_S, 1, 2.0, 0.5, 1.0, pools, policy, traffic, prediction, AIMS)
    inputs = replace(inputs, engines={PREFILL: EngineLoads(2, 900, 500), DECODE: EngineLoads(3, 0, 0, 30, 20, 90, 50)})
    targets = {pool.component: pool.capacity for pool in pools.all}
    targets[DECODE] += step
    outcomes = {DECODE: StepOutcome(Outcome.COMMITTED, ("dynamo_VllmWorker_3",))} if step else {}
    decision = Decision(at_s, targets, found, at_s + WINDOW_S)
    return DecisionRecord(BEGAN_S + at_s, f"planner:{number}", inputs, decision, outcomes)


def line(number: int = 1, **options: Any) -> dict[str, Any]:
    """The same as it is logged."""
    return {"seq": number, **as_json(record(number, **options))}

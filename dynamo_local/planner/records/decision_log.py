"""The decision log: what the planner decided, from which numbers, and what came of it. It outlives the run."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.traffic import kept_words
from dynamo_local.core.types import Missing
from dynamo_local.errors import BadInput
from dynamo_local.planner.connectors import Committed, Refused, Written
from dynamo_local.planner.policies.explain import explain
from dynamo_local.planner.policies.load import exact_mean, mean_kv, queue_samples
from dynamo_local.planner.policies.protocol import steps_ahead
from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S
from dynamo_local.planner.records.figures import window_figures
from dynamo_local.planner.values import Decision, Engines, IntervalObservation, Prediction, Traffic, WorkerPools
from dynamo_local.system import json_lines as jsonl
from dynamo_local.system.json_lines import JsonLog, Record

# --- seen
# Sums of engines and options for a record: few numbers, so that a day of decisions fits into the log.


@dataclass(frozen=True, slots=True)
class EngineLoads:
    """The engines of one component that were heard of, by their last passes.

    Tokens of prompts that wait, KV tokens of decodes that wait and of those that run; each on all engines together, and
    (`_max`) on the one that has most.
    """

    engines: int
    queued_prefill_tokens: int = 0
    queued_prefill_tokens_max: int = 0
    queued_decode_kv_tokens: int = 0
    queued_decode_kv_tokens_max: int = 0
    inflight_decode_kv_tokens: int = 0
    inflight_decode_kv_tokens_max: int = 0


@dataclass(frozen=True, slots=True)
class Aims:
    """The aims of the options. Targets are in ms (None: the policy has none), bounds in GPUs (None: no bound).
    `window_s` is the forecast's window in seconds (None: no forecast), and it is the `ahead`th after the observed
    one."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    min_gpu_budget: int | None = None
    max_gpu_budget: int | None = None
    window_s: float | None = None
    ahead: int = 1


def engine_loads(engines: Engines) -> dict[str, EngineLoads]:
    """The loads by component. A component without a known engine is absent."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for seen in engines.values():
        if not isinstance(seen.last, Missing):
            queued, scheduled = seen.last.queued, seen.last.scheduled
            tokens = (queued.sum_prefill_tokens, queued.sum_decode_kv_tokens, scheduled.sum_decode_kv_tokens)
            found.setdefault(seen.component, []).append(tokens)
    return {component: _summed(rows) for component, rows in found.items()}


def _summed(rows: list[tuple[int, int, int]]) -> EngineLoads:
    prompts, waiting, running = zip(*rows, strict=True)
    return EngineLoads(len(rows), sum(prompts), max(prompts), sum(waiting), max(waiting), sum(running), max(running))


def aims_of(options: PlannerConfig, pools: WorkerPools) -> Aims:
    """The aims of these options, with these workers."""
    unset = options.policy == "throughput-load" and "min_gpu_budget" not in options.model_fields_set
    lowest, highest = None if unset or options.min_gpu_budget < 0 else options.min_gpu_budget, options.max_gpu_budget
    match options.policy:
        case "load":
            return Aims(min_gpu_budget=lowest, max_gpu_budget=highest)
        case "sla":
            window_s = options.throughput_adjustment_interval_seconds
            ahead = steps_ahead(window_s, pools) if options.adaptive_intervals else 1
            return Aims(options.ttft_ms, options.itl_ms, lowest, highest, window_s, ahead)
        case "slo":
            ahead = steps_ahead(INTERVAL_S, pools)
            return Aims(options.ttft_ms, options.itl_ms, lowest, highest, INTERVAL_S, ahead)
        case "throughput-load":
            window_s = options.throughput_adjustment_interval_seconds
            by_models = options.optimization_target == "sla"
            return Aims(
                options.ttft_ms if by_models else None,
                options.itl_ms if by_models else None,
                lowest,
                highest,
                window_s if options.predicts else None,
            )


# --- record
# One decision with its inputs and outcomes, as one line of the decision log.


class Outcome(enum.StrEnum):
    """The outcome of a step."""

    COMMITTED = "committed"
    REFUSED = "refused"
    NO_OPERATION = "no_operation"
    """`--no-operation`: it was not to be carried out."""
    DEFERRED = "deferred"
    """An up that waits for a GPU, or a down that takes such an up back; nothing is committed for it now."""
    WRITTEN = "written"
    """It was written to etcd, for another environment to carry out."""
    SKIPPED = "skipped"
    """It was in etcd already."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`workers` belong to a committed step: the intent stands in the statefile. `reason`, `code` and `retryable` belong
    to a refusal. `decision_id` and `acknowledged` (None: nobody waited for it) belong to a written decision."""

    outcome: Outcome
    workers: tuple[str, ...] = ()
    reason: str | None = None
    code: str | None = None
    retryable: bool = False
    decision_id: int | None = None
    acknowledged: bool | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The observation in sums. Means over all samples of the interval; None without one (never 0).

    `prefill_queue_size` counts requests nobody has pulled, `average_kv_load` is 0..1 (what waits is added by the
    option `decode_kv_per_waiting_request`), `num_queued_request` is the mean number of requests that wait in a
    decode worker. `readings` counts the pulls. `fleet` are the pools of both components; the decision log has always
    called them so. `policy` is who decided; `traffic` and `prediction` are the window it saw and the one it expects,
    where it asked for them. `aims` are what its options ask for, `engines` the loads of the engines by component, where
    their passes were looked at.
    """

    interval_began_s: float
    readings: int
    prefill_queue_size: float | None
    average_kv_load: float | None
    num_queued_request: float | None
    fleet: WorkerPools
    policy: str = "load"
    traffic: Traffic | Missing | None = None
    prediction: Prediction | None = None
    aims: Aims = field(default_factory=Aims)
    engines: Mapping[str, EngineLoads] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Inputs, decision and outcome. `wall_s` is Unix time; all other times are of the planner's own clock.

    `outcomes` has one entry for each component with a step. `stimulus_id` is the one under which the statefile and
    the event log name what the decision caused.
    """

    wall_s: float
    stimulus_id: str
    inputs: Inputs
    decision: Decision
    outcomes: Mapping[str, StepOutcome] = field(default_factory=dict)


def inputs_of(
    observation: IntervalObservation,
    options: PlannerConfig,
    *,
    traffic: Traffic | Missing | None = None,
    prediction: Prediction | None = None,
    engines: Engines | None = None,
) -> Inputs:
    """The inputs of a decision, as a record keeps them."""
    readings = observation.readings
    samples = sum(reading.kv.count for reading in readings)
    waiting = sum(reading.kv.waiting for reading in readings)
    per_waiting = options.decode_kv_per_waiting_request if options.policy == "load" else 0.0
    return Inputs(
        interval_began_s=observation.interval_began_s,
        readings=len(readings),
        prefill_queue_size=exact_mean(queue_samples(readings)),
        average_kv_load=mean_kv(readings, per_waiting),
        num_queued_request=waiting / samples if samples else None,
        fleet=observation.pools,
        policy=options.policy,
        traffic=traffic,
        prediction=prediction,
        aims=aims_of(options, observation.pools),
        engines=engine_loads(engines or {}),
    )


def outcome_of(result: Committed | Written | Refused, component: str | None = None) -> StepOutcome:
    """A connector's answer as it is recorded, of several components for one of them."""
    if isinstance(result, Written):
        outcome = Outcome.SKIPPED if result.decision_id is None else Outcome.WRITTEN
        return StepOutcome(outcome, decision_id=result.decision_id, acknowledged=result.acknowledged)
    if isinstance(result, Refused):
        return StepOutcome(Outcome.REFUSED, (), result.reason, result.code, result.retryable)
    return StepOutcome(Outcome.COMMITTED, result.by_component.get(component or "", result.workers))


@functools.cache
def _adapter() -> TypeAdapter[DecisionRecord]:
    """Made when the first record is written or read: a twentieth of an arbiter's imports, and most have no planner."""
    return TypeAdapter(DecisionRecord)


def prepare() -> None:
    """Make what writes records now. It takes 15 ms or more, so a planner has it done in a thread before it decides."""
    _adapter()


def to_line(record: DecisionRecord) -> str:
    """One line of JSON, without its newline."""
    return _adapter().dump_json(record).decode()


def from_line(line: str) -> DecisionRecord:
    """The record of a line. Raises `BadInput` for one that is none (a half-written last line, another program's)."""
    try:
        return _adapter().validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"not a line of the decision log: {where + ': ' if where else ''}{first['msg']}") from None


FILE_NAME = "decisions.jsonl"

KINDS: jsonl.Kinds = (
    ("seq", int),
    ("wall_s", (int, float)),
    ("stimulus_id", str),
    ("inputs", dict),
    ("decision", dict),
)


class DecisionLog(JsonLog):
    """The writing end. See `JsonLog`. Decision 17 caused the events whose `stimulus_id` is `planner:17`."""

    what = "decision"
    kinds = KINDS


def decision_log_path(logs: Path) -> Path:
    """Where the decisions of the namespace with that log folder are."""
    return logs / FILE_NAME


def as_json(record: DecisionRecord) -> dict[str, Any]:
    """A record as it is logged, without its `seq`, which `DecisionLog.append` gives."""
    logged: dict[str, Any] = json.loads(to_line(record))
    return logged


def read(path: Path, *, last: int | None = None) -> list[Record]:
    """The `last` decisions as logged, in order, rotated files included; empty if there was none."""
    return jsonl.read(path, KINDS, last=last)


def oldest_first(path: Path) -> Iterator[Record]:
    """All decisions as logged, in order, one at a time."""
    return jsonl.oldest_first(path, KINDS)


def of_run(logged: Iterable[Record], run: str) -> Iterator[Record]:
    """Those of the runs whose id begins so; `all`: of every run. Lines of earlier versions have no id."""
    return (record for record in logged if run == "all" or str(record.get("run_id") or "").startswith(run))


def parse(logged: Record) -> DecisionRecord:
    """A line of the log. Raises `BadInput` for one of another version, or edited."""
    return from_line(json.dumps(logged))


def describe(logged: Record) -> str:
    """The decision in words: what was seen and expected, a line for each component, and the outcome of each step.

    Raises `BadInput` as `parse` does.
    """
    record = parse(logged)
    became = (_became(name, step) for name, step in record.outcomes.items())
    return "\n".join([*_window(logged), *kept_words(logged.get("targets")), *explain(record.decision), *became])


_SEEN = (
    ("requests_per_second", "{:.4g} requests/s"),
    ("input_sequence_tokens", "prompts of {:,.0f}"),
    ("output_sequence_tokens", "answers of {:,.0f} tokens"),
    ("ttft_ms", "TTFT {:.4g} ms"),
    ("itl_ms", "ITL {:.3g} ms"),
)


def _window(logged: Record) -> Iterator[str]:
    """`seen: 4 requests/s, prompts of 3,000, …; expected: 5 requests/s, …; a worker takes: 2.5 requests/s (prefill), …`

    Nothing where the decision was not about that.
    """
    found = window_figures(logged) or {}
    reported = {}
    for what, prefix in (("seen", "observed"), ("expected", "predicted")):
        known = ((found.get(f"{prefix}_{name}"), form) for name, form in _SEEN)
        reported[what] = [form.format(value) for value, form in known if value is not None]
    capacity = ((role, found.get(f"engine_{role}_capacity_requests_per_second")) for role in ("prefill", "decode"))
    reported["a worker takes"] = [f"{value:.4g} requests/s ({role})" for role, value in capacity if value is not None]
    parts = [f"{what}: {', '.join(values)}" for what, values in reported.items() if values]
    if parts:
        yield "; ".join(parts)


def _became(component: str, step: StepOutcome) -> str:
    if step.outcome is Outcome.COMMITTED:
        return f"{component}: carried out{' on ' if step.workers else ''}{', '.join(step.workers)}"
    if step.outcome is Outcome.REFUSED:
        return f"{component}: refused ({step.reason}); it is decided again by the next interval"
    if step.outcome is Outcome.NO_OPERATION:
        return f"{component}: not carried out (no-operation)"
    if step.outcome is Outcome.WRITTEN:
        words: dict[bool | None, str] = {True: ", which was carried out", False: ", which nobody has acknowledged"}
        done = words.get(step.acknowledged, "")
        return f"{component}: written to etcd as decision {step.decision_id}{done}"
    if step.outcome is Outcome.SKIPPED:
        return f"{component}: nothing written, etcd says the same already"
    return f"{component}: put off until a GPU is free"

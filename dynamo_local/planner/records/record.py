"""One decision with its inputs and outcomes, as one line of the decision log."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from dynamo_local.core.types import Missing
from dynamo_local.errors import BadInput
from dynamo_local.planner.connectors.local_connector import Committed, Refused
from dynamo_local.planner.connectors.virtual_connector import Written
from dynamo_local.planner.policies.load import exact_mean, mean_kv, queue_samples
from dynamo_local.planner.policies.options import LoadOptions, PolicyOptions, name_of
from dynamo_local.planner.records.seen import Aims, EngineLoads, aims_of, engine_loads
from dynamo_local.planner.values.decisions import Decision, Observation
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.passes import Engines
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.planner.values.traffic import Traffic


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
    """`workers` are those of a committed step (the intent stands in the statefile); `reason`, `code` and `retryable`
    are a refusal's; `decision_id` and `acknowledged` (None: nobody waited for that) are those of a written one."""

    outcome: Outcome
    workers: tuple[str, ...] = ()
    reason: str | None = None
    code: str | None = None
    retryable: bool = False
    decision_id: int | None = None
    acknowledged: bool | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was observed, summed up. Means over all samples of the interval; None without one (never 0).

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
    observation: Observation,
    options: PolicyOptions,
    *,
    traffic: Traffic | Missing | None = None,
    prediction: Prediction | None = None,
    engines: Engines | None = None,
) -> Inputs:
    """What a record keeps of what a decision was made from."""
    readings = observation.readings
    samples = sum(reading.kv.count for reading in readings)
    waiting = sum(reading.kv.waiting for reading in readings)
    per_waiting = options.decode_kv_per_waiting_request if isinstance(options, LoadOptions) else 0.0
    return Inputs(
        interval_began_s=observation.interval_began_s,
        readings=len(readings),
        prefill_queue_size=exact_mean(queue_samples(readings)),
        average_kv_load=mean_kv(readings, per_waiting),
        num_queued_request=waiting / samples if samples else None,
        fleet=observation.pools,
        policy=name_of(options),
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

"""A plugin's side of the wire format: the context as values, and its answer as a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.plugins import codec
from dynamo_local.planner.stages import FIELDS, Answer, Fpm, Observations, PipelineContext, Predicted, Stage, Workers
from dynamo_local.planner.values import (
    Accept,
    ComponentTarget,
    Override,
    OverrideType,
    Prediction,
    Proposal,
    Reject,
    Traffic,
)
from dynamo_local.transport.fpm import decode_pass

_NOT_SENT = Missing("it was not sent")


def context(said: Any) -> PipelineContext:
    """A `PipelineContext`. Its tick's time is on the planner's clock, which is not sent: 0."""
    seen = said.observations
    return PipelineContext(
        request_id=said.request_id,
        at_s=0.0,
        decision_id=said.decision_id,
        observations=Observations(
            traffic=_traffic(seen.traffic) if seen.HasField("traffic") else None,
            fpm=Fpm(_passes(seen.fpm.prefill_engines), _passes(seen.fpm.decode_engines))
            if seen.HasField("fpm")
            else None,
            workers=_workers(seen.workers) if seen.HasField("workers") else None,
        ),
        predictions=_prediction(said.predictions) if said.HasField("predictions") else None,
        proposal=_targets(said.proposal.targets) if said.HasField("proposal") else None,
        constrained=_targets(said.constrained.targets) if said.HasField("constrained") else None,
    )


def _traffic(said: Any) -> Traffic:
    optional = {
        name: getattr(said, name) if said.HasField(name) else _NOT_SENT for name in ("kv_hit_rate", "accept_length")
    }
    return Traffic(0.0, said.duration_s, said.num_req, said.isl, said.osl, **optional)


def _workers(said: Any) -> Workers:
    return Workers(**{name: getattr(said, name) for name in codec.WORKER_FIELDS if said.HasField(name)})


def _prediction(said: Any) -> Prediction:
    values = {name: getattr(said, f"predicted_{name}") for name in FIELDS if said.HasField(f"predicted_{name}")}
    return Prediction(**values, source=said.source)


def _targets(said: Iterable[Any]) -> tuple[ComponentTarget, ...]:
    """Those that have replicas."""
    return tuple(
        ComponentTarget(target.sub_component_type, target.replicas, OverrideType(target.type))
        for target in said
        if target.HasField("replicas")
    )


def _passes(engines: Mapping[str, bytes]) -> dict[EngineId, ForwardPass]:
    """Those that can be read."""
    passes = (decode_pass(raw) for raw in engines.values())
    return {last.engine: last for last in passes if last is not None}


def proposals(said: Iterable[Any]) -> tuple[Proposal, ...]:
    """What PROPOSE brought, for RECONCILE. A result that is not set counts as an accept."""
    return tuple(Proposal(each.plugin_id, each.priority, _result(each)) for each in said)


def _result(said: Any) -> Accept | Override | Reject:
    match said.WhichOneof("result"):
        case "override":
            return Override(_targets(said.override.targets), said.override.reason)
        case "reject":
            return Reject(said.reject.reason)
    return Accept()


def response(stage: Stage, answer: Answer) -> bytes:
    """The answer of a plugin, as its stage's response."""
    made = codec.METHODS[stage][2]()
    if isinstance(answer, Predicted):
        made.final = answer.final
        if answer.prediction is not None:
            codec.fill_prediction(made.predictions, answer.prediction)
    else:
        codec.fill_result(made, answer)
        made.final = isinstance(answer, Override) and answer.final
    encoded: bytes = made.SerializeToString()
    return encoded

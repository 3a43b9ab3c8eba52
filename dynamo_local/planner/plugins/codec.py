"""The pipeline's values as messages of `dynamo.planner.plugin.v1`, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.plugins.registration import Registering
from dynamo_local.planner.stages import (
    FIELDS,
    TARGETS_MAX,
    Answer,
    Fpm,
    Nothing,
    Observations,
    PipelineContext,
    Predicted,
    Stage,
    Unusable,
    Workers,
    usable,
)
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
from dynamo_local.transport.fpm import decode_pass, encode_pass

# --- wire
# The messages of `plugin.proto`, made from its compiled descriptors.
#
# They are made when this module is imported. Generated code would demand the protobuf release of its generator, and it
# would clash with Dynamo's own copy in a plugin's process. Here the descriptors have a pool of their own.

PACKAGE = "dynamo.planner.plugin.v1"


def _pool() -> Any:
    compiled = files(__package__).joinpath("plugin.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message: `message("RegisterRequest")`. KeyError for one that is not in `plugin.proto`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def methods(service: str) -> dict[str, tuple[str, Any, Any]]:
    """The methods of a service, each with its path, and the classes of its request and response."""
    found = _POOL.FindServiceByName(f"{PACKAGE}.{service}")
    return {
        method.name: (
            f"/{PACKAGE}.{service}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
        )
        for method in found.methods
    }


METHODS = {stage: methods(f"{stage.title()}Plugin")[stage.title()] for stage in Stage}
"""For each stage: the path of its method, and the classes of its request and response."""

WORKER_FIELDS = (
    "ready_prefill",
    "ready_decode",
    "expected_prefill",
    "expected_decode",
    "prefill_scaling_in_progress",
    "decode_scaling_in_progress",
)


# --- what a plugin is shown ----------------------------------------------------------------------


def request(stage: Stage, context: PipelineContext, proposals: Sequence[Proposal] = ()) -> bytes:
    """The request of that stage. `proposals` are for RECONCILE."""
    _, made, _ = METHODS[stage]
    requested = made()
    _fill_context(requested.context, context)
    if stage is Stage.RECONCILE:
        for proposal in proposals:
            _fill_proposal(requested.proposals.add(), proposal)
    encoded: bytes = requested.SerializeToString()
    return encoded


def _fill_context(made: Any, context: PipelineContext) -> None:
    made.request_id, made.decision_id = context.request_id, context.decision_id
    made.observations.SetInParent()
    _fill_observations(made.observations, context.observations)
    if context.predictions is not None:
        fill_prediction(made.predictions, context.predictions)
    for field in ("proposal", "constrained"):
        targets = getattr(context, field)
        if targets is not None:
            getattr(made, field).SetInParent()
            _fill_targets(getattr(made, field), targets)


def fill_prediction(made: Any, prediction: Prediction) -> None:
    """Into a `PredictionData`."""
    made.SetInParent()
    made.source = prediction.source
    for name in FIELDS:
        if (value := getattr(prediction, name)) is not None:
            setattr(made, f"predicted_{name}", value)


def _fill_observations(made: Any, seen: Observations) -> None:
    if seen.traffic is not None:
        _fill_traffic(made.traffic, seen.traffic)
    if seen.fpm is not None:
        _fill_fpm(made.fpm, seen.fpm)
    if seen.workers is not None:
        made.workers.SetInParent()
        for name in WORKER_FIELDS:
            if (value := getattr(seen.workers, name)) is not None:
                setattr(made.workers, name, value)


def _fill_traffic(made: Any, traffic: Traffic) -> None:
    made.SetInParent()
    for name in ("duration_s", "num_req", "isl", "osl", "kv_hit_rate", "accept_length"):
        value = getattr(traffic, name)
        if not isinstance(value, Missing):
            setattr(made, name, value)


def _fill_fpm(made: Any, fpm: Fpm) -> None:
    made.SetInParent()
    for engines, target in ((fpm.prefill_engines, made.prefill_engines), (fpm.decode_engines, made.decode_engines)):
        for engine, last in engines.items():
            target[f"{engine.worker_id}/{engine.dp_rank}"] = encode_pass(last)


def _fill_targets(made: Any, targets: Iterable[ComponentTarget]) -> None:
    for target in targets:
        added = made.targets.add()
        added.sub_component_type, added.replicas, added.type = target.sub_component_type, target.replicas, target.type


def _fill_proposal(made: Any, proposal: Proposal) -> None:
    made.plugin_id, made.priority = proposal.plugin_id, proposal.priority
    fill_result(made, proposal.result)


def fill_result(made: Any, result: Answer) -> None:
    """Into the oneof of a `ProposeResult` or of a stage's response."""
    match result:
        case Accept():
            made.accept.SetInParent()
        case Reject(reason=reason):
            made.reject.SetInParent()
            made.reject.reason = reason
        case Override(targets=targets, reason=reason):
            made.override.SetInParent()
            made.override.reason = reason
            _fill_targets(made.override, targets)


# --- what it answers -----------------------------------------------------------------------------


def answer(stage: Stage, raw: bytes) -> Answer:
    """The answer of a plugin. Raises `Unusable`."""
    said = parsed(METHODS[stage][2], raw)
    return usable(stage, _predicted(said) if stage is Stage.PREDICT else _RESULTS[said.WhichOneof("result")](said))


def parsed(made: Any, raw: bytes) -> Any:
    """The message. Raises `Unusable` for bytes that are none."""
    try:
        return made.FromString(raw)
    except DecodeError:
        raise Unusable(f"its {len(raw)} bytes are no {made.DESCRIPTOR.name}") from None


def _predicted(said: Any) -> Predicted:
    if not said.HasField("predictions"):
        return Predicted(None, said.final)
    found = said.predictions
    values = {name: getattr(found, f"predicted_{name}") for name in FIELDS if found.HasField(f"predicted_{name}")}
    return Predicted(Prediction(**values, source=found.source), said.final)


def _override(said: Any) -> Override:
    """A target without replicas is no opinion."""
    targets = said.override.targets
    if len(targets) > TARGETS_MAX:
        raise Unusable(f"it has {len(targets)} targets, at most {TARGETS_MAX} are read")
    found = []
    for target in targets:
        if target.type not in list(OverrideType):
            raise Unusable(f"type is {target.type}, and must be SET, AT_LEAST or AT_MOST")
        if target.HasField("replicas"):
            found.append(ComponentTarget(target.sub_component_type, target.replicas, OverrideType(target.type)))
    return Override(tuple(found), said.override.reason, said.final)


_RESULTS: dict[str | None, Callable[[Any], Accept | Override | Reject | Nothing]] = {
    "accept": lambda _: Accept(),
    "override": _override,
    "reject": lambda said: Reject(said.reject.reason),
    None: lambda _: Nothing(),
}


def registering(said: Any) -> Registering:
    """A `RegisterRequest`, without its token."""
    return Registering(
        plugin_id=said.plugin_id,
        plugin_type=said.plugin_type,
        priority=said.priority,
        endpoint=said.endpoint,
        version=said.version,
        execution_interval_seconds=said.execution_interval_seconds,
        hold_policy=said.hold_policy,
        needs=tuple(said.needs),
        protocol_version=said.protocol_version,
        requires_produced_fields=tuple(said.requires_produced_fields),
        observation_window_seconds=said.observation_window_seconds,
    )


_NOT_SENT = Missing("it was not sent")


def context_of_message(said: Any) -> PipelineContext:
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
    return Workers(**{name: getattr(said, name) for name in WORKER_FIELDS if said.HasField(name)})


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


def proposals_of_message(said: Iterable[Any]) -> tuple[Proposal, ...]:
    """The proposals of PROPOSE, for RECONCILE. A result that is not set counts as an accept."""
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
    made = METHODS[stage][2]()
    if isinstance(answer, Predicted):
        made.final = answer.final
        if answer.prediction is not None:
            fill_prediction(made.predictions, answer.prediction)
    else:
        fill_result(made, answer)
        made.final = isinstance(answer, Override) and answer.final
    encoded: bytes = made.SerializeToString()
    return encoded

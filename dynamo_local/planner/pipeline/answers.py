"""Whether what a plugin answered can be used. A plugin is somebody else's code: anything may come back."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dynamo_local.planner.pipeline.predicting import FIELDS
from dynamo_local.planner.pipeline.stages import Answer, Nothing, Predicted, Stage
from dynamo_local.planner.values.forecasts import Prediction
from dynamo_local.planner.values.proposals import Accept, ComponentTarget, Override, OverrideType, Reject

TARGETS_MAX = 64
REPLICAS_MAX = 100_000
PREDICTED_MAX = 1e15
TEXT_MAX = 500


class Unusable(ValueError):
    """Why an answer cannot be used, in words that hold no more of it than fits a log line."""


def shown(text: object) -> str:
    """Text of a stranger, fit for a log line and a table: printable, at most `TEXT_MAX` characters."""
    line = str(text)
    cut = line if len(line) <= TEXT_MAX else f"{line[:TEXT_MAX]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def usable(stage: Stage, answer: object) -> Answer:
    """The answer with its texts cut, or `Unusable`. None is no opinion."""
    if stage is Stage.PREDICT:
        return _predicted(answer)
    match answer:
        case None:
            return Accept()
        case Accept() | Nothing():
            return answer
        case Reject():
            return Reject(shown(answer.reason))
        case Override():
            return Override(_targets(answer.targets), shown(answer.reason), bool(answer.final))
    raise Unusable(f"{_kind(answer)} is no answer of {stage}: it must be Accept, Override or Reject")


def _predicted(answer: object) -> Predicted:
    match answer:
        case None:
            return Predicted()
        case Predicted(prediction=None):
            return Predicted(None, bool(answer.final))
        case Predicted(prediction=prediction, final=final):
            return Predicted(_prediction(prediction), bool(final))
        case Prediction():
            return Predicted(_prediction(answer))
    raise Unusable(f"{_kind(answer)} is no answer of predict: it must be a Prediction, or Predicted")


def _prediction(said: object) -> Prediction:
    if not isinstance(said, Prediction):
        raise Unusable(f"{_kind(said)} is no Prediction")
    for name in FIELDS:
        value = getattr(said, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unusable(f"predicted_{name} is no number")
        if not math.isfinite(value) or not 0 <= value <= PREDICTED_MAX:
            raise Unusable(f"predicted_{name} is {value!r}, and must be 0 or more")
    return Prediction(**{name: getattr(said, name) for name in FIELDS}, source=shown(said.source))


def _targets(targets: object) -> tuple[ComponentTarget, ...]:
    if not isinstance(targets, Iterable):
        raise Unusable("targets must be a list of ComponentTarget")
    found: list[ComponentTarget] = []
    for target in targets:
        if len(found) == TARGETS_MAX:
            raise Unusable(f"it has more than {TARGETS_MAX} targets")
        found.append(_target(target))
    return tuple(found)


def _target(target: object) -> ComponentTarget:
    if not isinstance(target, ComponentTarget) or not isinstance(target.sub_component_type, str):
        raise Unusable(f"{_kind(target)} is no ComponentTarget")
    count = target.replicas
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= REPLICAS_MAX:
        raise Unusable(f"replicas is {shown(repr(count))}, and must be 0 to {REPLICAS_MAX}")
    if target.type not in list(OverrideType):
        raise Unusable(f"type is {shown(repr(target.type))}, and must be SET, AT_LEAST or AT_MOST")
    return ComponentTarget(shown(target.sub_component_type)[:64], count, OverrideType(target.type))


def _kind(value: object) -> str:
    return f"something of type {type(value).__name__[:64]}"

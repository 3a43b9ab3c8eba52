"""What a stage of the pipeline proposes, under the names of `dynamo.planner.plugin.v1`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OverrideType(enum.IntEnum):
    """How a target is meant. The numbers are those of the wire."""

    SET = 0
    AT_LEAST = 1
    AT_MOST = 2


@dataclass(frozen=True, slots=True)
class ComponentTarget:
    """So many replicas of a role ("prefill" or "decode"; an aggregated graph's workers are "decode")."""

    sub_component_type: str
    replicas: int
    type: OverrideType = OverrideType.SET


@dataclass(frozen=True, slots=True)
class Accept:
    """No opinion."""


@dataclass(frozen=True, slots=True)
class Override:
    """These targets. `final`: nobody with a higher number is heard after it."""

    targets: tuple[ComponentTarget, ...]
    reason: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Nothing is to be changed in this tick."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one plugin said in one stage. The smaller `priority` wins."""

    plugin_id: str
    priority: int
    result: Accept | Override | Reject

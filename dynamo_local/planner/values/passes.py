"""What a planner knows of the engines: their passes (`core.passes`), and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.passes import NONE, EngineId, ForwardPass, Requests
from dynamo_local.core.types import Missing

__all__ = ["NONE", "Capabilities", "EngineId", "EngineSeen", "Engines", "ForwardPass", "Requests"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of a component's engines, from their registration; None: unknown. `benchmark` are the passes that one of
    them measured of itself at its start, or why there are none."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_kv_tokens: int | None = None
    context_length: int | None = None
    dp_size: int = 1
    benchmark: tuple[ForwardPass, ...] | Missing | None = None


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine as the planner knows it: the passes that came since the last pull (oldest first, heartbeats left
    out), and the last of all (heartbeats included), or why nothing is known of it now."""

    component: str
    passes: tuple[ForwardPass, ...] = ()
    last: ForwardPass | Missing = field(default_factory=lambda: Missing("it has published no pass yet"))


Engines = Mapping[EngineId, EngineSeen]

"""Floors and GPU budgets of a planner, as Dynamo's control API has them: `/v1/min-endpoints`.

Which floors there are depends on the policy: `throughput-load` has one for each role that it moves (`min_endpoint` in
an aggregated graph), `sla` has one for both (`min_endpoint`), `load` has none beside `min_gpu_budget`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynamo_local.config import PlannerConfig, planned_components
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import BadInput

FLOORS = ("min_endpoint", "prefill_min_endpoint", "decode_min_endpoint")
BUDGETS = ("min_gpu_budget", "max_gpu_budget")
OFF = -1


class BadRequest(BadInput):
    """The body is no request: no JSON, or about nothing that there is."""

    code = "bad_request"


def mode_of(options: PlannerConfig, graph: GraphSpec) -> str:
    """What is moved: `disagg`, `agg`, `prefill` or `decode`. Raises `ConfigError` for a graph that nobody can plan."""
    prefill, _ = planned_components(graph)
    chosen = options.mode if options.policy == "throughput-load" else None
    return chosen or ("agg" if prefill is None else "disagg")


def floors_of(options: PlannerConfig, graph: GraphSpec) -> dict[str, int]:
    """The floors that count, by name."""
    mode = mode_of(options, graph)
    if options.policy == "load":
        return {}
    if options.policy in ("sla", "slo") or mode == "agg":
        return {"min_endpoint": options.min_endpoint}
    roles = ("prefill", "decode") if mode == "disagg" else (mode,)
    own = {role: getattr(options, f"{role}_min_endpoint") for role in roles}
    return {f"{role}_min_endpoint": options.min_endpoint if floor is None else floor for role, floor in own.items()}


def state_of(options: PlannerConfig, graph: GraphSpec) -> dict[str, Any]:
    """The mode, its floors, and both budgets (-1: off)."""
    given = options.policy != "throughput-load" or "min_gpu_budget" in options.model_fields_set
    budgets = {"min_gpu_budget": options.min_gpu_budget if given else OFF, "max_gpu_budget": options.max_gpu_budget}
    return {"mode": mode_of(options, graph), **floors_of(options, graph), **budgets}


def read_change(body: bytes) -> dict[str, Any]:
    """What is to be changed, by name. Raises `BadRequest`."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    known = (*FLOORS, *BUDGETS)
    if not isinstance(asked, dict) or not asked:
        raise BadRequest(f"say what to change: an object with any of {', '.join(known)}")
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise BadRequest(f"there is no {unknown[0][:100]!r}; there are: {', '.join(known)}")
    return asked


def checked(asked: Mapping[str, Any], options: PlannerConfig, graph: GraphSpec) -> dict[str, int]:
    """The same, if each is a number and counts now. Raises `BadInput`; ranges are checked with all other options."""
    floors, mode = floors_of(options, graph), mode_of(options, graph)
    for name, value in asked.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{name} must be a whole number, not {json.dumps(value)[:100]}")
        if name in FLOORS and name not in floors:
            there = ", ".join((*floors, *BUDGETS))
            raise BadInput(f"{name} has no effect with the policy {options.policy} in mode {mode}; there are: {there}")
    return dict(asked)

"""From a decision to what is written, or why nothing is. Pure.

* Components without an adapter stand in the graph itself: all of them change by one JSON patch, which holds only for
  the very document that it was made from (`test` of resourceVersion, name and number).
* A component with an adapter is changed through its `scale` alone: where the adapter is not there, nothing is changed.
* What takes away comes first, and the first write that fails ends the rest: no state in between holds more GPUs than
  the budget, or than before.
* Somebody else's number is not overwritten: the decision was made from another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.planner.connectors.kubernetes.values import Adapter, Component, Seen

BY_PERSON = "changed_by_person"


@dataclass(frozen=True, slots=True)
class PatchGraph:
    """A JSON patch of the graph; `targets` is what it asks for, by component."""

    operations: tuple[Mapping[str, Any], ...]
    targets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScaleAdapter:
    """A component's number, asked of its adapter."""

    component: str
    adapter: Adapter
    replicas: int

    @property
    def targets(self) -> Mapping[str, int]:
        """As those of a patch."""
        return {self.component: self.replicas}


Write = PatchGraph | ScaleAdapter


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing is to be written."""

    reason: str
    code: str
    retryable: bool = True


def change(
    seen: Seen, targets: Mapping[str, int], decided_from: Mapping[str, int], gpus: Mapping[str, int], max_gpus: int
) -> tuple[Write, ...] | Refusal:
    """The writes in their order; none where all numbers are as they should be. `decided_from` are the numbers that the
    decision was made from, `gpus` what a replica of each planned component holds."""
    if (why := seen.hindrance) is not None:
        return Refusal(why, "not_ready")
    planned = {one.name: one for one in seen.planned}
    for name in sorted(targets.keys() - planned.keys()):
        return Refusal(f"{seen.name} has no component {name} that a planner scales", "unknown_component", False)
    now = {name: seen.wanted(one) for name, one in planned.items()}
    for name in targets:
        if now[name] != decided_from.get(name, now[name]):
            why = f"somebody has set {name} to {now[name]} meanwhile; the planner goes on from there"
            return Refusal(why, BY_PERSON)
    steps = {name: target - now[name] for name, target in targets.items() if target != now[name]}
    if any(step > 0 for step in steps.values()) and (why := seen.not_ready) is not None:
        return Refusal(f"{why}; nothing is added until it is ready", "not_ready")
    if (refusal := _over_budget(now, {**now, **targets}, gpus, max_gpus)) is not None:
        return refusal
    return _ordered(seen, [planned[name] for name in steps], targets, steps)


def _over_budget(
    now: Mapping[str, int], then: Mapping[str, int], gpus: Mapping[str, int], max_gpus: int
) -> Refusal | None:
    held, wanted = (sum(gpus[name] * many for name, many in counts.items()) for counts in (now, then))
    if wanted <= max(max_gpus, held):
        return None
    told = ", ".join(f"{many} × {gpus[name]} of {name}" for name, many in then.items())
    return Refusal(f"{told} are {wanted} GPUs, and max_gpu_budget is {max_gpus}", "over_budget", False)


def _ordered(
    seen: Seen, changed: list[Component], targets: Mapping[str, int], steps: Mapping[str, int]
) -> tuple[Write, ...] | Refusal:
    for one in changed:
        if one.by_adapter and one.name not in seen.adapters:
            why = (
                f"{one.name} of {seen.name} says that a scaling adapter scales it, and there is none; its number in "
                "the graph is the operator's, so nothing was changed"
            )
            return Refusal(why, "adapter_missing")
    scaled = [ScaleAdapter(one.name, seen.adapters[one.name], targets[one.name]) for one in changed if one.by_adapter]
    own = [one for one in changed if not one.by_adapter]
    patch = [PatchGraph(_operations(seen, own, targets), {one.name: targets[one.name] for one in own})] if own else []
    downs = [write for write in scaled if steps[write.component] < 0]
    ups = [write for write in scaled if steps[write.component] > 0]
    return (*downs, *patch, *ups)


def _operations(seen: Seen, components: list[Component], targets: Mapping[str, int]) -> tuple[Mapping[str, Any], ...]:
    tests: list[Mapping[str, Any]] = [_test("/metadata/resourceVersion", seen.resource_version)]
    changes: list[Mapping[str, Any]] = []
    for one in components:
        if one.listed:
            tests.append(_test(f"{one.pointer}/name", one.name))
        if one.replicas is not None:
            tests.append(_test(f"{one.pointer}/replicas", one.replicas))
        op = "add" if one.replicas is None else "replace"
        changes.append({"op": op, "path": f"{one.pointer}/replicas", "value": targets[one.name]})
    return (*tests, *changes)


def _test(path: str, value: Any) -> Mapping[str, Any]:
    return {"op": "test", "path": path, "value": value}

"""From a decision to what is written, or why nothing is. Pure.

* Components without an adapter stand in the graph itself: all of them change by one JSON patch, which holds only for
  the very document that it was made from (`test` of resourceVersion, name and number).
* A component with an adapter is changed through its `scale` alone: where the adapter is not there, nothing is changed.
* What takes away comes first, and the first write that fails ends the rest: no state in between holds more GPUs than
  the budget, or than before.
* Somebody else's number is not overwritten: the decision was made from another one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.types import Role
from dynamo_local.kubernetes.graph import Adapter, GraphComponent, Seen, given_for

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
    seen: Seen, changed: list[GraphComponent], targets: Mapping[str, int], steps: Mapping[str, int]
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


def _operations(
    seen: Seen, components: list[GraphComponent], targets: Mapping[str, int]
) -> tuple[Mapping[str, Any], ...]:
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


# --- checking
# What is wrong with a graph for a planner, all at once, before it starts. Pure.


class FaultCode(enum.StrEnum):
    """What kind of fault."""

    ROLE_MISSING = "role_missing"
    ROLE_TWICE = "role_twice"
    NOT_AGGREGATED = "not_aggregated"
    NOT_FOUND_AS_PREFILL = "not_found_as_prefill"
    MODELS_DIFFER = "models_differ"
    GPUS_UNKNOWN = "gpus_unknown"
    GPUS_DIFFER = "gpus_differ"
    ADAPTER_MISSING = "adapter_missing"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them, in words for a person."""

    code: FaultCode
    text: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What the planner's options say. `prefill`: whether they are for a graph with prefill workers of its own (None:
    for either). `only`: the one role that is planned."""

    max_gpus: int
    floors: Mapping[Role, int]
    model: str | None = None
    gpus: Mapping[Role, int | None] | None = None
    prefill: bool | None = None
    only: Role | None = None


def faults(seen: Seen, expected: Expected) -> tuple[Fault, ...]:
    """Every fault; none where a planner can begin."""
    found = list(_of_roles(seen, expected))
    if not seen.planned or (expected.only is None and not seen.of_role(Role.DECODE, Role.AGGREGATED)):
        return tuple(found)
    found += [*_of_models(seen, expected), *_of_gpus(seen, expected)]
    for one in seen.planned:
        if one.by_adapter and one.name not in seen.adapters:
            why = f"{one.name} says that a scaling adapter scales it, but there is none: does the operator run?"
            found.append(Fault(FaultCode.ADAPTER_MISSING, why))
    return (*found, *_of_budget(seen, expected))


def _of_roles(seen: Seen, expected: Expected) -> Iterator[Fault]:
    there = ", ".join(f"{one.name} ({one.kind or 'no type'})" for one in seen.components) or "nothing"
    roles = {Role.PREFILL: ("prefill", (Role.PREFILL,)), Role.DECODE: ("decode", (Role.DECODE, Role.AGGREGATED))}
    needed = {Role.DECODE, *([Role.PREFILL] if expected.prefill else [])} if expected.only is None else {expected.only}
    for role, (words, any_of) in roles.items():
        if expected.only not in (None, role):
            continue
        found = seen.of_role(*any_of)
        if not found and role in needed:
            yield Fault(FaultCode.ROLE_MISSING, f"{seen.name} has no {words} component; it has {there}")
        if len(found) > 1:
            names = ", ".join(one.name for one in found)
            why = f"{seen.name} has several {words} components ({names}); a planner scales one of each role"
            yield Fault(FaultCode.ROLE_TWICE, why)
    if expected.prefill is False and (prefills := seen.of_role(Role.PREFILL)):
        why = f"the mode is agg, but {prefills[0].name} of {seen.name} prefills: leave mode out to have what it is"
        yield Fault(FaultCode.NOT_AGGREGATED, why)
    for one in seen.of_role(Role.PREFILL):
        if one.vllm and one.disaggregation != "prefill":
            why = (
                f"{one.name} prefills by its type, but its command does not say --disaggregation-mode prefill: it "
                "registers as a decode worker, and nobody finds it as a prefill one"
            )
            yield Fault(FaultCode.NOT_FOUND_AS_PREFILL, why)


def _of_models(seen: Seen, expected: Expected) -> Iterator[Fault]:
    named = {one.name: one.model for one in seen.planned if one.model is not None}
    if len(set(named.values())) > 1:
        told = ", ".join(f"{name} serves {model}" for name, model in named.items())
        yield Fault(FaultCode.MODELS_DIFFER, f"both roles must serve one model: {told}")
    elif expected.model is not None and named and expected.model.lower() not in {m.lower() for m in named.values()}:
        model = next(iter(named.values()))
        yield Fault(FaultCode.MODELS_DIFFER, f"served_model_name is {expected.model}, but {seen.name} serves {model}")


def _of_gpus(seen: Seen, expected: Expected) -> Iterator[Fault]:
    given = expected.gpus or {}
    for one in seen.planned:
        option = f"{'prefill' if one.role is Role.PREFILL else 'decode'}_engine_num_gpu"
        said = given_for(one, given)
        if one.gpus is None and said is None:
            by = " (its devices come by resource claims)" if one.claims else ""
            why = f"how many GPUs a replica of {one.name} holds is not known{by}: say {option}"
            yield Fault(FaultCode.GPUS_UNKNOWN, why)
        elif one.gpus is not None and said is not None and one.gpus != said:
            why = f"{option} is {said}, but a replica of {one.name} holds {one.gpus}; leave it out, or make them agree"
            yield Fault(FaultCode.GPUS_DIFFER, why)


def _of_budget(seen: Seen, expected: Expected) -> Iterator[Fault]:
    least: list[tuple[GraphComponent, int, int]] = []
    for one in seen.planned:
        gpus = one.gpus if one.gpus is not None else given_for(one, expected.gpus or {})
        if gpus is None:
            return
        floor = expected.floors.get(Role.PREFILL if one.role is Role.PREFILL else Role.DECODE, 1)
        least.append((one, gpus, max(1, floor)))
    needed = sum(gpus * floor for _, gpus, floor in least)
    if needed > expected.max_gpus:
        told = ", ".join(f"{floor} × {gpus} of {one.name}" for one, gpus, floor in least)
        why = f"max_gpu_budget is {expected.max_gpus}, but the least numbers of workers need {needed} GPUs: {told}"
        yield Fault(FaultCode.BUDGET, why)

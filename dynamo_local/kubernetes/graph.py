"""A graph on Kubernetes as a planner sees it: values, counts, writes and faults. Pure."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dynamo_local.core.types import Role
from dynamo_local.planner.values import Pool, WorkerPools

DOING = frozenset({"pending", "initializing"})
"""`status.state` while pods start. It is `successful` when all are ready."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The operator's counts of a component's pods. `ready` is None if this kind of workload does not say."""

    replicas: int = 0
    updated: int = 0
    ready: int | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A component's scaling adapter: its number, and the version that a write must still find."""

    name: str
    replicas: int
    resource_version: str


@dataclass(frozen=True, slots=True)
class GraphComponent:
    """One component of the graph.

    `pointer` is its place in the document (RFC 6901). A `listed` component is in a list, so a patch must test its name.
    `replicas` None means one. `by_adapter` says that an adapter scales it. `gpus` is None if the document does not say
    how many a replica holds, and `claims` says that it asks for devices by resource claims. `disaggregation` is the
    mode in its command.
    """

    name: str
    pointer: str
    listed: bool
    kind: str
    role: Role | None
    replicas: int | None = None
    by_adapter: bool = False
    gpus: int | None = None
    claims: bool = False
    model: str | None = None
    vllm: bool = False
    disaggregation: str | None = None
    counts: Counts | None = None

    @property
    def wanted(self) -> int:
        """Replicas that the graph asks for."""
        return 1 if self.replicas is None else self.replicas


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """The graph at one moment. `adapters` are by component."""

    name: str
    api_version: str
    resource_version: str
    generation: int
    observed: int | None
    state: str
    components: tuple[GraphComponent, ...]
    rolling: bool = False
    deleting: bool = False
    trouble: str = ""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    only: Role | None = None
    """The one role that this planner scales (PREFILL or DECODE). None for all roles."""

    def of_role(self, *roles: Role) -> tuple[GraphComponent, ...]:
        """Its components with one of these roles."""
        return tuple(one for one in self.components if one.role in roles)

    @property
    def prefill(self) -> GraphComponent | None:
        """The component that prefills. None in an aggregated graph."""
        return next(iter(self.of_role(Role.PREFILL)), None)

    @property
    def decode(self) -> GraphComponent:
        """The component that decodes.

        `checking` has refused a graph without one, unless only its prefill workers are planned.
        """
        return self.of_role(Role.DECODE, Role.AGGREGATED)[0]

    @property
    def workers(self) -> tuple[GraphComponent, ...]:
        """One component of each role; prefill first."""
        prefill, decode = self.of_role(Role.PREFILL), self.of_role(Role.DECODE, Role.AGGREGATED)
        return (*prefill[:1], *decode[:1])

    @property
    def planned(self) -> tuple[GraphComponent, ...]:
        """The planned components, prefill first."""
        if self.only is None:
            return self.workers
        return tuple(one for one in self.workers if (one.role is Role.PREFILL) == (self.only is Role.PREFILL))

    def wanted(self, component: GraphComponent) -> int:
        """Requested replicas, by its adapter if it has one."""
        adapter = self.adapters.get(component.name)
        return component.wanted if adapter is None else adapter.replicas

    @property
    def hindrance(self) -> str | None:
        """Why nothing at all may change now, or None."""
        if self.deleting:
            return f"the graph {self.name} is being deleted"
        if self.observed is None or self.observed < self.generation:
            return f"Dynamo's operator has not taken up the last change of {self.name} (generation {self.generation})"
        if self.rolling:
            return f"a rolling update of {self.name} is under way"
        if self.state == "failed":
            return f"the operator says that {self.name} has failed{': ' if self.trouble else ''}{self.trouble}"
        return None

    @property
    def not_ready(self) -> str | None:
        """Why no worker may be added now, or None. One may still be removed."""
        if (hindrance := self.hindrance) is not None:
            return hindrance
        if self.state in DOING:
            return f"{self.name} is {self.state}{': ' if self.trouble else ''}{self.trouble}"
        return None


# The operator counts the workers. No pods are read.

NO_DECODE = Pool("(no decode component)", gpus_per_worker=0, ready=0)
"""Stands for decode in a graph with prefill workers only."""

PENDING_AFTER_S = 120.0
SLOW_START = 2.0
"""A start that takes so many times what starts take pends."""
KEPT = 5


@dataclass(slots=True)
class _Times:
    added_at_s: float | None = None
    coming_since_s: float | None = None
    leaving_since_s: float | None = None
    ready: int = 0
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class WorkerCounter:
    """Remembers since when what is on its way, or leaves, does so. Times are the planner's."""

    def __init__(self, pending_after_s: float = PENDING_AFTER_S) -> None:
        self._pending_after_s = pending_after_s
        self._times: dict[str, _Times] = {}

    def saw(self, seen: ObservedGraph, now_s: float) -> None:
        """The graph, looked at now."""
        for one in seen.workers:
            times, counts, wanted = self._of(one), one.counts or Counts(), seen.wanted(one)
            ready = min(counts.ready or 0, wanted)
            if ready > times.ready:
                times.added_at_s = now_s
                if times.coming_since_s is not None:
                    times.starts.append(now_s - times.coming_since_s)
                times.coming_since_s = now_s if ready < wanted else None
            elif ready < wanted:
                times.coming_since_s = now_s if times.coming_since_s is None else times.coming_since_s
            else:
                times.coming_since_s = None
            leaves = counts.replicas > wanted
            times.leaving_since_s = (times.leaving_since_s or now_s) if leaves else None
            times.ready = ready

    def pools(self, seen: ObservedGraph, gpus: Mapping[str, int], now_s: float) -> WorkerPools:
        """As last seen. `gpus` is what a replica of each component holds."""
        prefill = None if seen.prefill is None else self._pool(seen, seen.prefill, gpus, now_s)
        decodes = any(one.role is not Role.PREFILL for one in seen.workers)
        decode = self._pool(seen, seen.decode, gpus, now_s) if decodes else NO_DECODE
        return WorkerPools(prefill, decode, pending=seen.hindrance is not None)

    def _of(self, one: GraphComponent) -> _Times:
        return self._times.setdefault(one.name, _Times())

    def _pool(self, seen: ObservedGraph, one: GraphComponent, gpus: Mapping[str, int], now_s: float) -> Pool:
        times, counts, wanted, size = self._of(one), one.counts or Counts(), seen.wanted(one), gpus[one.name]
        ready = min(counts.ready or 0, wanted)
        coming, leaving = wanted - ready, max(0, counts.replicas - wanted)
        start_s = median(times.starts) if times.starts else None
        patience_s = self._pending_after_s if start_s is None else max(SLOW_START * start_s, 10.0)
        since_s = times.coming_since_s
        stuck = since_s is not None and now_s - since_s > patience_s
        return Pool(
            component=one.name,
            gpus_per_worker=size,
            ready=ready,
            coming=coming,
            waiting=coming if stuck else 0,
            leaving=leaving,
            gpus_held=size * max(counts.replicas, ready),
            gpus_leaving=size * leaving,
            gpus_lacking=size * max(0, wanted - max(counts.replicas, ready)),
            added_at_s=times.added_at_s if ready else None,
            coming_since_s=since_s if coming else None,
            leaving_since_s=times.leaving_since_s,
            start_up_s=start_s,
        )


def drifted(seen: ObservedGraph) -> tuple[str, ...]:
    """Components whose workload somebody scaled under the operator (#4420), in words."""
    if seen.not_ready is not None or seen.state != "successful":
        return ()
    return tuple(
        f"{one.name} has {one.counts.replicas} replicas, and {seen.name} asks for {seen.wanted(one)}: somebody has "
        f"changed the workload itself, which the operator does not take back; change {seen.name} instead"
        for one in seen.planned
        if one.counts is not None and one.counts.replicas != seen.wanted(one)
    )


def gpus_of(seen: ObservedGraph, given: Mapping[Role, int | None]) -> dict[str, int]:
    """GPUs of one replica of each component of workers, from the graph, else from the options (`given`)."""
    return {one.name: one.gpus if one.gpus is not None else given_for(one, given) or 0 for one in seen.workers}


def given_for(one: GraphComponent, given: Mapping[Role, int | None]) -> int | None:
    """The option for its role."""
    return given.get(Role.PREFILL if one.role is Role.PREFILL else Role.DECODE)


BY_PERSON = "changed_by_person"


@dataclass(frozen=True, slots=True)
class PatchGraph:
    """A JSON patch of the graph. `targets` has the requested numbers by component."""

    operations: tuple[Mapping[str, Any], ...]
    targets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScaleAdapter:
    """A component's number, written to its adapter."""

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
    """Nothing is written."""

    reason: str
    code: str
    retryable: bool = True


def change(
    seen: ObservedGraph,
    targets: Mapping[str, int],
    decided_from: Mapping[str, int],
    gpus: Mapping[str, int],
    max_gpus: int,
) -> tuple[Write, ...] | Refusal:
    """The writes in their order. Empty if all numbers are right.

    `decided_from` has the numbers on which the decision is based, `gpus` those that a replica of each planned component
    holds.
    """
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
    listed = ", ".join(f"{many} × {gpus[name]} of {name}" for name, many in then.items())
    return Refusal(f"{listed} are {wanted} GPUs, and max_gpu_budget is {max_gpus}", "over_budget", False)


def _ordered(
    seen: ObservedGraph, changed: list[GraphComponent], targets: Mapping[str, int], steps: Mapping[str, int]
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
    seen: ObservedGraph, components: list[GraphComponent], targets: Mapping[str, int]
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


class FaultCode(enum.StrEnum):
    """The kind of a fault."""

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
    """One fault, in words."""

    code: FaultCode
    text: str


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of the planner's options.

    `prefill` says whether the graph must have prefill workers of its own (None: either). `only` is the one planned
    role.
    """

    max_gpus: int
    floors: Mapping[Role, int]
    model: str | None = None
    gpus: Mapping[Role, int | None] | None = None
    prefill: bool | None = None
    only: Role | None = None


def faults(seen: ObservedGraph, expected: Requirements) -> tuple[Fault, ...]:
    """Every fault. Empty if a planner can begin."""
    found = list(_of_roles(seen, expected))
    if not seen.planned or (expected.only is None and not seen.of_role(Role.DECODE, Role.AGGREGATED)):
        return tuple(found)
    found += [*_of_models(seen, expected), *_of_gpus(seen, expected)]
    for one in seen.planned:
        if one.by_adapter and one.name not in seen.adapters:
            why = f"{one.name} says that a scaling adapter scales it, but there is none: does the operator run?"
            found.append(Fault(FaultCode.ADAPTER_MISSING, why))
    return (*found, *_of_budget(seen, expected))


def _of_roles(seen: ObservedGraph, expected: Requirements) -> Iterator[Fault]:
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


def _of_models(seen: ObservedGraph, expected: Requirements) -> Iterator[Fault]:
    named = {one.name: one.model for one in seen.planned if one.model is not None}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} serves {model}" for name, model in named.items())
        yield Fault(FaultCode.MODELS_DIFFER, f"both roles must serve one model: {listed}")
    elif expected.model is not None and named and expected.model.lower() not in {m.lower() for m in named.values()}:
        model = next(iter(named.values()))
        yield Fault(FaultCode.MODELS_DIFFER, f"served_model_name is {expected.model}, but {seen.name} serves {model}")


def _of_gpus(seen: ObservedGraph, expected: Requirements) -> Iterator[Fault]:
    given = expected.gpus or {}
    for one in seen.planned:
        option = f"{'prefill' if one.role is Role.PREFILL else 'decode'}_engine_num_gpu"
        configured = given_for(one, given)
        if one.gpus is None and configured is None:
            by = " (its devices come by resource claims)" if one.claims else ""
            why = f"how many GPUs a replica of {one.name} holds is not known{by}: say {option}"
            yield Fault(FaultCode.GPUS_UNKNOWN, why)
        elif one.gpus is not None and configured is not None and one.gpus != configured:
            why = (
                f"{option} is {configured}, but a replica of {one.name} holds {one.gpus}; "
                "leave it out, or make them agree"
            )
            yield Fault(FaultCode.GPUS_DIFFER, why)


def _of_budget(seen: ObservedGraph, expected: Requirements) -> Iterator[Fault]:
    least: list[tuple[GraphComponent, int, int]] = []
    for one in seen.planned:
        gpus = one.gpus if one.gpus is not None else given_for(one, expected.gpus or {})
        if gpus is None:
            return
        floor = expected.floors.get(Role.PREFILL if one.role is Role.PREFILL else Role.DECODE, 1)
        least.append((one, gpus, max(1, floor)))
    needed = sum(gpus * floor for _, gpus, floor in least)
    if needed > expected.max_gpus:
        listed = ", ".join(f"{floor} × {gpus} of {one.name}" for one, gpus, floor in least)
        why = f"max_gpu_budget is {expected.max_gpus}, but the least numbers of workers need {needed} GPUs: {listed}"
        yield Fault(FaultCode.BUDGET, why)

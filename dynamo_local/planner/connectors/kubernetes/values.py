"""What a graph on Kubernetes looks like to a planner. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.types import Role

DOING = frozenset({"pending", "initializing"})
"""`status.state` while pods are on their way; `successful` when all are ready."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the operator reports of a component's pods. `ready` None: this kind of workload does not say."""

    replicas: int = 0
    updated: int = 0
    ready: int | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A component's scaling adapter: what it asks for, and the version that a write must still find."""

    name: str
    replicas: int
    resource_version: str


@dataclass(frozen=True, slots=True)
class Component:
    """One component of the graph. `pointer` is where it stands in the document (RFC 6901); `listed`: in a list, so
    that its name there must be tested. `replicas` None: not written, which is one. `by_adapter`: it says that an
    adapter scales it. `gpus` is what a replica holds, None where the document does not say (`claims`: it asks for
    devices by resource claims). `disaggregation` is the mode that its command asks for.
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
class Seen:
    """The graph at one moment. `adapters` are by component, of those that say they have one."""

    name: str
    api_version: str
    resource_version: str
    generation: int
    observed: int | None
    state: str
    components: tuple[Component, ...]
    rolling: bool = False
    deleting: bool = False
    trouble: str = ""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    only: Role | None = None
    """The one role that this planner scales (PREFILL or DECODE); None: all that are there."""

    def of_role(self, *roles: Role) -> tuple[Component, ...]:
        """Its components with one of these roles."""
        return tuple(one for one in self.components if one.role in roles)

    @property
    def prefill(self) -> Component | None:
        """The component that prefills; None in an aggregated graph."""
        return next(iter(self.of_role(Role.PREFILL)), None)

    @property
    def decode(self) -> Component:
        """The component that decodes. `checking` has refused a graph without one, unless only its prefill workers are
        planned."""
        return self.of_role(Role.DECODE, Role.AGGREGATED)[0]

    @property
    def workers(self) -> tuple[Component, ...]:
        """One component of each role; prefill first."""
        prefill, decode = self.of_role(Role.PREFILL), self.of_role(Role.DECODE, Role.AGGREGATED)
        return (*prefill[:1], *decode[:1])

    @property
    def planned(self) -> tuple[Component, ...]:
        """What a planner scales; prefill first."""
        if self.only is None:
            return self.workers
        return tuple(one for one in self.workers if (one.role is Role.PREFILL) == (self.only is Role.PREFILL))

    def wanted(self, component: Component) -> int:
        """Replicas asked for: by its adapter, where it has one."""
        adapter = self.adapters.get(component.name)
        return component.wanted if adapter is None else adapter.replicas

    @property
    def hindrance(self) -> str | None:
        """Why nothing at all may be changed now; None while something may."""
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
        """Why no worker may be added now, though one may be taken away; None where the graph is ready."""
        if (hindrance := self.hindrance) is not None:
            return hindrance
        if self.state in DOING:
            return f"{self.name} is {self.state}{': ' if self.trouble else ''}{self.trouble}"
        return None

"""What a graph on Kubernetes looks like to a planner. Values only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from dynamo_local.core.types import Role
from dynamo_local.planner.values import Pool, WorkerPools

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
class GraphComponent:
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
    components: tuple[GraphComponent, ...]
    rolling: bool = False
    deleting: bool = False
    trouble: str = ""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    only: Role | None = None
    """The one role that this planner scales (PREFILL or DECODE); None: all that are there."""

    def of_role(self, *roles: Role) -> tuple[GraphComponent, ...]:
        """Its components with one of these roles."""
        return tuple(one for one in self.components if one.role in roles)

    @property
    def prefill(self) -> GraphComponent | None:
        """The component that prefills; None in an aggregated graph."""
        return next(iter(self.of_role(Role.PREFILL)), None)

    @property
    def decode(self) -> GraphComponent:
        """The component that decodes. `checking` has refused a graph without one, unless only its prefill workers are
        planned."""
        return self.of_role(Role.DECODE, Role.AGGREGATED)[0]

    @property
    def workers(self) -> tuple[GraphComponent, ...]:
        """One component of each role; prefill first."""
        prefill, decode = self.of_role(Role.PREFILL), self.of_role(Role.DECODE, Role.AGGREGATED)
        return (*prefill[:1], *decode[:1])

    @property
    def planned(self) -> tuple[GraphComponent, ...]:
        """What a planner scales; prefill first."""
        if self.only is None:
            return self.workers
        return tuple(one for one in self.workers if (one.role is Role.PREFILL) == (self.only is Role.PREFILL))

    def wanted(self, component: GraphComponent) -> int:
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


# --- counting
# The workers of a graph on Kubernetes, counted for a planner. No pods are looked at: the operator counts them.
#
# A replica that is not ready starts, or pends for want of a device; the operator does not say which. One that is on
# its
# way for longer than starts take, or than `PENDING_AFTER_S` where none was seen yet, counts as waiting: it holds
# nothing
# up, and above all no scale-down.

NO_DECODE = Pool("(no decode component)", gpus_per_worker=0, ready=0)
"""Of a graph whose prefill workers alone are planned, and which has no others."""

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


class Counting:
    """Remembers since when what is on its way, or leaves, does so. Times are the planner's."""

    def __init__(self, pending_after_s: float = PENDING_AFTER_S) -> None:
        self._pending_after_s = pending_after_s
        self._times: dict[str, _Times] = {}

    def saw(self, seen: Seen, now_s: float) -> None:
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

    def pools(self, seen: Seen, gpus: Mapping[str, int], now_s: float) -> WorkerPools:
        """As last seen. `gpus` is what a replica of each component holds."""
        prefill = None if seen.prefill is None else self._pool(seen, seen.prefill, gpus, now_s)
        decodes = any(one.role is not Role.PREFILL for one in seen.workers)
        decode = self._pool(seen, seen.decode, gpus, now_s) if decodes else NO_DECODE
        return WorkerPools(prefill, decode, pending=seen.hindrance is not None)

    def _of(self, one: GraphComponent) -> _Times:
        return self._times.setdefault(one.name, _Times())

    def _pool(self, seen: Seen, one: GraphComponent, gpus: Mapping[str, int], now_s: float) -> Pool:
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


def drifted(seen: Seen) -> tuple[str, ...]:
    """Components whose workload somebody scaled under the operator (#4420), in words."""
    if seen.not_ready is not None or seen.state != "successful":
        return ()
    return tuple(
        f"{one.name} has {one.counts.replicas} replicas, and {seen.name} asks for {seen.wanted(one)}: somebody has "
        f"changed the workload itself, which the operator does not take back; change {seen.name} instead"
        for one in seen.planned
        if one.counts is not None and one.counts.replicas != seen.wanted(one)
    )


def gpus_of(seen: Seen, given: Mapping[Role, int | None]) -> dict[str, int]:
    """What a replica of each component of workers holds: as the graph says, else as the options do (`given`)."""
    return {one.name: one.gpus if one.gpus is not None else given_for(one, given) or 0 for one in seen.workers}


def given_for(one: GraphComponent, given: Mapping[Role, int | None]) -> int | None:
    """The option for its role."""
    return given.get(Role.PREFILL if one.role is Role.PREFILL else Role.DECODE)

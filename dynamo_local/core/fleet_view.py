"""The fleet at one moment, as a value: what every decision about workers is made from.

Three kinds of worker matter to a count:

* *ready*: it serves;
* *on its way*: it does not serve now but will without anybody asking again: pending, starting, crashed or backing off
  (it is restarted), drained only to be restarted, or called back from a drain. Capacity on its way counts,
  or a slow load is answered by more and more workers (lesson 16);
* *leaving* or *faulted*: no capacity. What leaves still holds its GPUs (a GPU goes with the process).

Everything is counted by component. A component has one role, and requests are addressed to a component's endpoints:
another component of the same role cannot stand in for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from dynamo_local.core.gpus import GpuSnapshot
from dynamo_local.core.types import Load, Missing, Role, WorkerState, watcher_name
from dynamo_local.errors import UnknownWorker


class Course(enum.StrEnum):
    """What was decided about a worker that its state alone does not say."""

    STEADY = "steady"
    RESTARTING = "restarting"
    """It drains, or is gone, only to be started again under the same name."""
    RETURNING = "returning"
    """Its drain is being taken back; it has not registered again yet. If it exits first, it is started again."""
    LEAVING = "leaving"
    """It crashed or timed out and is not started again: only the end of its process is waited for."""


_COMES_UP = frozenset(
    {
        WorkerState.PENDING,
        WorkerState.STARTING,
        WorkerState.CRASHED,
        WorkerState.START_TIMED_OUT,
        WorkerState.BACKING_OFF,
    }
)

_LEAVES = frozenset({WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT, WorkerState.EXITED})


@dataclass(frozen=True, slots=True)
class Template:
    """How one more worker of a component is made. `max_workers` is None where the class sets no bound."""

    component: str
    role: Role
    gpus_per_worker: int = 0
    max_workers: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One entry. `n` is its suffix, 0 for the bare name; `gpus` are the UUIDs that the ledger says it holds.

    `since_s` is when it entered its state. `served` says that its present process has been ready once.
    `starts` counts the spawns that were committed under this name (`SpawnRequested`, `BackoffElapsed`), failed ones
    included: a restart is done when it has grown.
    """

    name: str
    component: str
    role: Role
    n: int
    state: WorkerState
    since_s: float = 0.0
    gpus: tuple[str, ...] = ()
    load: Load | Missing = Missing("not sampled")  # noqa: RUF009 - frozen
    course: Course = Course.STEADY
    served: bool = False
    starts: int = 0
    reason: str | None = None

    @property
    def ready(self) -> bool:
        """It serves."""
        return self.state is WorkerState.READY

    @property
    def on_its_way(self) -> bool:
        """It will serve without anybody asking again."""
        if self.state in _COMES_UP:
            return self.course is not Course.LEAVING
        return self.state in _LEAVES and self.course in (Course.RESTARTING, Course.RETURNING)

    @property
    def counts(self) -> bool:
        """It is capacity, now or soon."""
        return self.ready or self.on_its_way

    @property
    def cancellable(self) -> bool:
        """It is in a drain that can be taken back: it has served, its process lives, and it leaves for good."""
        return self.state is WorkerState.DRAINING and self.served and self.course is Course.STEADY


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers of a namespace, the components that they may belong to, and the GPUs."""

    namespace: str
    templates: tuple[Template, ...]
    workers: tuple[WorkerView, ...]
    gpus: GpuSnapshot

    def template(self, component: str) -> Template:
        """Raises `UnknownWorker` that lists the components there are."""
        for template in self.templates:
            if template.component == component:
                return template
        known = ", ".join(sorted(template.component for template in self.templates)) or "none"
        raise UnknownWorker(f"there is no component {component!r} in namespace {self.namespace}; there are: {known}")

    def find(self, name: str) -> WorkerView | None:
        """The entry of that watcher name, if there is one; `VllmWorker_1` without the namespace will do.

        Not so for the bare worker: `VllmWorker` is the component, and who says that may mean all of it.
        """
        entries = {worker.name: worker for worker in self.workers}
        if any(template.component == name for template in self.templates):
            return entries.get(name)
        return entries.get(name) or entries.get(f"{self.namespace}_{name}")

    def worker(self, name: str) -> WorkerView:
        """As `find`. Raises `UnknownWorker` that lists those there are."""
        worker = self.find(name)
        if worker is None:
            known = ", ".join(worker.name for worker in self.workers) or "none"
            raise UnknownWorker(f"there is no worker {name!r} in namespace {self.namespace}; there are: {known}")
        return worker

    def of(self, component: str) -> tuple[WorkerView, ...]:
        """A component's entries, the bare one first."""
        return tuple(sorted((w for w in self.workers if w.component == component), key=lambda w: w.n))

    def ready(self, component: str) -> tuple[WorkerView, ...]:
        """Those that serve."""
        return tuple(worker for worker in self.of(component) if worker.ready)

    def on_their_way(self, component: str) -> tuple[WorkerView, ...]:
        """Those that will serve."""
        return tuple(worker for worker in self.of(component) if worker.on_its_way)

    def capacity(self, component: str) -> int:
        """How many serve, or will."""
        return sum(worker.counts for worker in self.of(component))

    def names_from_lowest(self, component: str) -> Iterator[tuple[str, int, WorkerView | None]]:
        """`(watcher name, suffix, entry or None)` from the bare name up, without end."""
        entries = {worker.n: worker for worker in self.of(component)}
        for n in count():
            yield watcher_name(self.namespace, component, n), n, entries.get(n)

    def promised(self) -> dict[str, int]:
        """Free devices that are kept for workers on their way that hold too few, by watcher name.

        A worker that backs off has given its GPUs back and will need them again.
        """
        needs = {template.component: template.gpus_per_worker for template in self.templates}
        lacking = {w.name: needs.get(w.component, 0) - len(w.gpus) for w in self.workers if w.on_its_way}
        return {name: lack for name, lack in lacking.items() if lack > 0}

    def gpus_coming_back(self) -> int:
        """Devices held by workers that leave for good."""
        return sum(len(worker.gpus) for worker in self.workers if not worker.counts)

"""What the arbiter knows of its workers, and the one place where that changes.

A change is an event, applied to the lifecycle table, committed to the statefile *before* anything acts on it
(lesson: intent first), and told to whoever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_local.clock import Clock
from dynamo_local.core.lifecycle import WITHOUT_PROCESS, Event, apply
from dynamo_local.core.types import Load, WorkerState
from dynamo_local.serve.plan import WatcherPlan
from dynamo_local.state import ComponentEntry, EntryResources, State, StateStore

log = logging.getLogger(__name__)

RUNNING = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING})


@dataclass(slots=True)
class Worker:
    """One managed worker. `_s` times are of the arbiter's monotonic clock, `started_at` is seconds since 1970."""

    plan: WatcherPlan
    state: WorkerState
    since_s: float
    pid: int | None = None
    pid_start_time: float | None = None
    started_s: float | None = None
    started_at: float | None = None
    lease: str | None = None
    endpoints: tuple[str, ...] = ()
    reason: str | None = None
    exit_code: int | None = None
    load: Load | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def runs(self) -> bool:
        return self.pid is not None


@dataclass(slots=True)
class Fleet:
    """All workers of a namespace, by watcher name, in the order of the plan."""

    store: StateStore
    clock: Clock
    workers: dict[str, Worker] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, plan: WatcherPlan) -> Worker:
        """A worker to be; pending, not yet in the statefile."""
        worker = Worker(plan=plan, state=WorkerState.PENDING, since_s=self.clock.now_s())
        self.workers[plan.name] = worker
        return worker

    async def apply(self, events: Mapping[str, Event]) -> None:
        """Apply one event to each named worker and commit all of them in one transaction.

        Raises `IllegalTransition`, with nothing changed, if any of them is illegal.
        """
        after = {name: apply(self.workers[name].state, event) for name, event in events.items()}
        for name, state in after.items():
            worker = self.workers[name]
            worker.state, worker.since_s = state, self.clock.now_s()
        await self.commit(after)
        self.notify()

    async def commit(self, names: Iterable[str]) -> None:
        """Write these workers' entries: only the arbiter's fields; lease and endpoints are the worker's own."""
        chosen = [self.workers[name] for name in names]

        def write(state: State) -> None:
            for worker in chosen:
                _write_entry(state, worker)

        await self.store.aupdate(write)

    def notify(self) -> None:
        """Wake everybody who waits in `until`."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    async def until(self, done: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Wait for a condition on the fleet. True when it holds, False at the deadline (of the fleet's clock)."""
        while not done():
            changed = self._changed
            left_s = None if deadline_s is None else deadline_s - self.clock.now_s()
            if left_s is not None and left_s <= 0:
                return False
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                return done()
        return True

    def by_pid(self, pid: int) -> Worker | None:
        """The worker whose process that is."""
        return next((worker for worker in self.workers.values() if worker.pid == pid), None)

    def running(self) -> list[Worker]:
        """Those that have a process."""
        return [worker for worker in self.workers.values() if worker.runs]


def _write_entry(state: State, worker: Worker) -> None:
    plan = worker.plan
    entry = state.components.get(plan.name)
    if entry is None:
        entry = state.components[plan.name] = ComponentEntry(watcher_name=plan.name, component=plan.component)
    entry.cwd, entry.cmd = plan.cwd, shlex.join(plan.argv)
    entry.role, entry.gpus_per_worker = plan.role, len(plan.gpus)
    entry.state, entry.reason = worker.state, worker.reason
    entry.pid, entry.pid_start_time = worker.pid, worker.pid_start_time
    entry.started_at = worker.started_at
    entry.log_file = str(plan.log_file)
    entry.start_deadline_s, entry.drain_deadline_s = plan.start_deadline_s, plan.drain_deadline_s
    entry.resources = _resources(worker)
    if worker.pid is None:
        entry.lease, entry.endpoints = None, []


def _resources(worker: Worker) -> EntryResources:
    """The GPUs that it holds: from before its process is made until the process is gone (lesson 4)."""
    if not worker.plan.gpus or (worker.pid is None and worker.state in WITHOUT_PROCESS - {WorkerState.PENDING}):
        return EntryResources()
    return EntryResources(
        allocated_gpus=[str(device.index) for device in worker.plan.gpus],
        gpu_uuids=[device.uuid for device in worker.plan.gpus],
    )

"""What the arbiter knows of its workers, and the one place where that changes.

A change is an event, applied to the lifecycle table, committed to the statefile *before* anything acts on it,
appended to the event log, and told to whoever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.fleet_view import Course
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.lifecycle import STARTS, Event, apply
from dynamo_local.core.restarts import RestartHistory
from dynamo_local.core.types import Load, WorkerState
from dynamo_local.errors import StateError
from dynamo_local.serve.events import EventLog, record_of
from dynamo_local.serve.plan import WatcherPlan
from dynamo_local.state import ComponentEntry, EntryResources, State, StateStore

log = logging.getLogger(__name__)

HEAD_FIELDS = (
    "arbiter_pid",
    "arbiter_start_time",
    "circus_endpoint",
    "servers",
    "on_arbiter_death",
    "planner",
    "follow",
    "restarts",
)
"""Of the statefile as a whole, what changes in the life of a run."""


@dataclass(slots=True)
class Worker:
    """One managed worker. `_s` times are of the arbiter's monotonic clock, `started_at` is seconds since 1970.

    `gpus` is what it holds now; `heard_s` is when it last answered the load request, or became ready (None: neither
    yet); `asked_s` is when we (or a person) asked it to leave, None where its lease went away by itself; `lease_gone`
    says that it did, unasked; `told`, that it was given the sign to leave; `served`, that this process has been ready;
    `starts` counts the processes made, or about to be made, under this name; `other_leases` (hex) are those of what
    runs behind it (a command registers itself), to be revoked with its own. `failed`: it has said that it is about to
    end because its engine has.
    """

    plan: WatcherPlan
    state: WorkerState
    since_s: float
    gpus: tuple[GpuDevice, ...] = ()
    pid: int | None = None
    pid_start_time: float | None = None
    started_s: float | None = None
    started_at: float | None = None
    lease: str | None = None
    endpoints: tuple[str, ...] = ()
    other_leases: tuple[str, ...] = ()
    reason: str | None = None
    exit_code: int | None = None
    load: Load | None = None
    heard_s: float | None = None
    asked_s: float | None = None
    lease_gone: bool = False
    failed: bool = False
    told: bool = False
    course: Course = Course.STEADY
    served: bool = False
    ready_s: float | None = None
    starts: int = 0
    history: RestartHistory = field(default_factory=RestartHistory)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def runs(self) -> bool:
        return self.pid is not None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.starts - 1)

    def process_began(self, pid: int, start_time: float | None, clock: Clock) -> None:
        """Note what belongs to a new process."""
        self.pid, self.pid_start_time = pid, start_time
        self.started_s = clock.now_s()
        self.started_at = clock.wall_s()
        self.reason = self.asked_s = self.ready_s = self.heard_s = None
        self.served = self.lease_gone = self.failed = self.told = False

    def process_ended(self, code: int | None) -> None:
        """Forget what belonged to the process."""
        self.pid = self.pid_start_time = self.started_s = self.started_at = None
        self.lease = self.load = self.ready_s = None
        self.endpoints, self.other_leases, self.exit_code = (), (), code


class Fleet:
    """All workers of a namespace, by watcher name, in the order of the plan. `head` is the statefile without them."""

    def __init__(self, head: State, store: StateStore, events: EventLog, clock: Clock) -> None:
        self.head = head
        self.store = store
        self.events = events
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.on_trouble: Callable[[str], None] = log.warning
        self.on_event: Callable[[Worker, WorkerState, Event], None] = lambda worker, before, event: None
        """Called with every event that was applied, and the state of before."""
        self.on_change: Callable[[], None] = lambda: None
        """Called at every change of any worker, its GPUs included."""
        self.unwritten = False
        self._seen: object = ()
        self._other_lease: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    async def create(self) -> None:
        """Write the statefile of a new run. Raises `StateError` if there is one."""
        await asyncio.to_thread(self.store.create, self.head)

    def add(self, plan: WatcherPlan) -> Worker:
        """A worker to be, pending, with the plan's GPUs; in the statefile with its first event or `commit`."""
        worker = Worker(plan=plan, state=WorkerState.PENDING, since_s=self.clock.now_s(), gpus=plan.gpus)
        self.workers[plan.name] = worker
        return worker

    async def apply(self, events: Mapping[str, Event]) -> None:
        """Apply one event to each named worker and commit all of them in one transaction.

        Raises `IllegalTransition`, with nothing changed, if any of them is illegal.
        """
        if not events:
            return
        after = {name: apply(self.workers[name].state, event) for name, event in events.items()}
        records = []
        for name, event in events.items():
            worker, before = self.workers[name], self.workers[name].state
            worker.starts += isinstance(event, STARTS)
            if after[name] is not before:
                worker.state, worker.since_s = after[name], self.clock.now_s()
            if worker.state is WorkerState.READY and not worker.served:
                worker.served, worker.ready_s = True, self.clock.now_s()
                worker.heard_s = worker.heard_s or worker.ready_s  # from now on its silence counts
            record = record_of(
                event,
                watcher_name=name,
                component=worker.plan.component,
                before=before,
                after=after[name],
                time_s=self.clock.wall_s(),
            )
            records.append(record)
            self.on_event(worker, before, event)
        async with self._writing:  # first come, first written: the log is in the order of the events
            await self.commit(after)
            await self._log(records)
        self.notify()

    async def record(self, record: dict[str, Any]) -> None:
        """Append to the event log what is no worker's event, in its place among those."""
        async with self._writing:
            await self._log([record])

    async def _log(self, records: list[dict[str, Any]]) -> None:
        try:
            await asyncio.to_thread(self.events.append, records)
        except StateError as error:
            self.on_trouble(str(error))

    async def commit(self, names: Iterable[str]) -> None:
        """Write these workers' entries: only the arbiter's fields; lease and endpoints are the worker's own.

        A statefile that somebody broke is kept aside and written anew from memory; a full disk is told and tried
        again with the next commit. Neither stops the arbiter.
        """
        chosen = list(names)
        if not chosen and not self.unwritten:
            return

        def write(state: State) -> None:
            if self.unwritten:
                self._write_all(state)
            for name in chosen:
                worker = self.workers.get(name)
                if worker is None:
                    state.components.pop(name, None)
                else:
                    _write_entry(state, worker)

        await self._write(write)

    async def commit_head(self) -> None:
        """Write what `head` says of the run as a whole."""

        def write(state: State) -> None:
            for key in HEAD_FIELDS:
                setattr(state, key, getattr(self.head, key))
            for worker in self.workers.values() if self.unwritten else ():
                _write_entry(state, worker)

        await self._write(write)

    async def _write(self, write: Callable[[State], None]) -> None:
        try:
            await self.store.aupdate(write)
            self.unwritten = False
        except StateError as error:
            await self._rewrite(error)

    async def heal(self) -> None:
        """Bring the statefile back where somebody broke, edited or removed it, or where it could not be written.

        Called every few seconds: while nobody touched the file it costs one `stat`.
        """
        stamp = await asyncio.to_thread(self.store.stamp)
        if not self.unwritten and not self._other_lease and stamp == self._seen:
            return
        self._seen = stamp  # of before: what comes meanwhile, our own commit included, is looked at once more
        try:
            await self.store.aupdate(self._write_all)
            self.unwritten = False
        except StateError as error:
            await self._rewrite(error)

    def _write_all(self, state: State) -> None:
        """All entries as they should be, and no other; raises `StateError` for a file that is not of this run."""
        for key in ("namespace", "run_id"):
            if getattr(state, key) != getattr(self.head, key):
                raise StateError(f"it was edited: its {key} is {getattr(state, key)}, not {getattr(self.head, key)}")
        for name in state.components.keys() - self.workers.keys():
            del state.components[name]
        other: dict[str, str] = {}
        for name, worker in list(self.workers.items()):
            _write_entry(state, worker)
            written = state.components[name].lease
            if worker.state is not WorkerState.READY or worker.lease in (None, written):
                continue
            if written is None or self._other_lease.get(name) == written:
                _write_lease(state, worker)  # the worker wrote it into a file that is lost, or somebody edited it
            else:
                other[name] = written  # a new one of which we have not heard yet: looked at once more
        self._other_lease = other

    async def _rewrite(self, why: StateError) -> None:
        try:
            # The whole is taken in the thread: what changed since the failed commit is in it.
            aside = await asyncio.to_thread(lambda: self.store.rewrite(self.whole()))
        except StateError as error:
            self.unwritten = True
            self.on_trouble(f"the statefile cannot be written; it is tried again: {error}")
        else:
            self.unwritten = False
            kept = f", kept as {aside}" if aside is not None else ""
            self.on_trouble(f"the statefile was broken{kept}; written anew: {why}")

    def whole(self) -> State:
        """The statefile as it should be, from memory alone."""
        state = self.head.model_copy(deep=True)
        for worker in self.workers.values():
            _write_entry(state, worker)
            _write_lease(state, worker)
        return state

    async def drop(self, name: str) -> None:
        """Forget a worker, in memory and in the statefile."""
        self.workers.pop(name, None)
        await self.commit([name])
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits in `until`."""
        self.on_change()
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next change of any worker."""
        await self._changed.wait()

    async def until(self, done: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Wait for a condition on the fleet. True when it holds, False at the deadline (of the fleet's clock)."""
        while not done():
            changed = self._changed
            left_s = None if deadline_s is None else deadline_s - self.clock.now_s()
            if left_s is not None and left_s <= 0:
                return False
            try:
                # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the change.
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return done()
        return True

    def running(self) -> list[Worker]:
        """Those that have a process."""
        return [worker for worker in self.workers.values() if worker.runs]


def _write_entry(state: State, worker: Worker) -> None:
    plan = worker.plan
    entry = state.components.get(plan.name)
    if entry is None:
        entry = state.components[plan.name] = ComponentEntry(watcher_name=plan.name, component=plan.component)
    entry.cwd, entry.cmd = plan.cwd, shlex.join(plan.argv)
    entry.role, entry.gpus_per_worker = plan.role, plan.gpus_per_worker
    entry.state, entry.reason = _state_in_file(worker, entry.state), worker.reason
    entry.pid, entry.pid_start_time = worker.pid, worker.pid_start_time
    entry.started_at, entry.restarts = worker.started_at, worker.restarts
    entry.log_file = str(plan.log_file)
    entry.start_deadline_s, entry.drain_deadline_s = plan.start_deadline_s, plan.drain_deadline_s
    entry.resources = _resources(worker)
    entry.course = None if worker.course is Course.STEADY else str(worker.course)
    entry.asked_s = worker.asked_s
    entry.failures_s, entry.failures_streak = list(worker.history.failures_s) or None, worker.history.streak or None
    entry.other_leases = list(worker.other_leases) or None
    if worker.pid is None:
        entry.lease, entry.endpoints = None, []


def _write_lease(state: State, worker: Worker) -> None:
    """What is the worker's own to write, as far as we know it."""
    entry = state.components[worker.name]
    entry.endpoints = []  # before the lease: they must be under it
    entry.lease, entry.endpoints = worker.lease, list(worker.endpoints)


def _state_in_file(worker: Worker, written: WorkerState) -> WorkerState:
    """As it is, but `draining` only where that is somebody's intent: ours, or what the worker itself has written.

    The worker reads it there to tell a revoked lease from one that expired while it was stopped: our guess, made
    from nothing but the missing key, would be taken for an order, and the worker would leave instead of coming back.
    """
    guessed = worker.lease_gone and worker.asked_s is None and worker.state is WorkerState.DRAINING
    if guessed:
        return WorkerState.DRAINING if written is WorkerState.DRAINING else WorkerState.READY
    return worker.state


def _resources(worker: Worker) -> EntryResources:
    if not worker.gpus:
        return EntryResources()
    return EntryResources(
        allocated_gpus=[str(device.index) for device in worker.gpus],
        gpu_uuids=[device.uuid for device in worker.gpus],
    )

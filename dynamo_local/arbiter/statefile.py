"""The arbiter's side of the statefile: the entries of a fleet, written and kept right.

Each worker writes its own lease and endpoints; the rest of an entry is the arbiter's. A file that somebody broke,
edited or removed is written again from memory. A full disk is reported, and tried again with the next write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal

from dynamo_local.arbiter.deployment import Deployment
from dynamo_local.core.fleet.fleet import Fleet, Intent, RestartPlan, Standby, StandbyFacts, Worker
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuLedger, Sleeper
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.errors import StateError
from dynamo_local.state.schema import (
    ComponentEntry,
    EntryResources,
    Environment,
    FlipEntry,
    RestartEntry,
    StandbyEntry,
    State,
    SystemResources,
)
from dynamo_local.state.store import StateStore
from dynamo_local.system.process_host import LaunchSpec
from dynamo_local.system.processes import start_time_s

# --- standby
# Standby, as it travels: what workers say in their ready keys, and what the statefile keeps of it.

log = logging.getLogger(__name__)

UNKNOWN = Missing("the worker could not measure it")


def facts_of(said: Any) -> StandbyFacts | None:
    """`standby` of a ready key; None where the worker says nothing, or nothing that can be understood."""
    if not isinstance(said, dict):
        return None
    try:
        return StandbyFacts(
            order=int(said.get("order", 0)),
            asleep=bool(said.get("asleep")),
            level=int(said.get("level", 1)),
            cannot=_text(said.get("cannot")),
            vram_bytes=_bytes(said.get("vram_bytes")),
            host_bytes=_bytes(said.get("host_bytes")),
            rehearsed_bytes=_bytes(said.get("rehearsed_bytes")),
            pids=frozenset(int(pid) for pid in said.get("pids", ())),
            recycle=_text(said.get("recycle")),
        )
    except (TypeError, ValueError) as error:
        log.warning("what a worker says of its standby cannot be understood: %s", error)
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _bytes(value: Any) -> int | Missing:
    return UNKNOWN if value is None else int(value)


def _or_none(value: int | Missing) -> int | None:
    return None if isinstance(value, Missing) else value


def entry_of_standby(worker: Worker, fleet: Fleet) -> StandbyEntry | None:
    """The statefile's part about standby; None for a worker that has nothing to do with it."""
    standby, sleeper = worker.standby, fleet.gpus.sleepers.get(worker.name)
    if sleeper is None and not standby.wanted and not standby.order:
        return None
    entry = StandbyEntry(wanted=standby.wanted, order=standby.order, level=standby.level, drained=standby.drained)
    if sleeper is not None:
        entry.gpu_uuids, entry.pids = list(sleeper.uuids), sorted(sleeper.pids)
        entry.vram_bytes, entry.host_bytes = _or_none(sleeper.vram_bytes), _or_none(sleeper.host_bytes)
    return entry


def standby_of_entry(entry: StandbyEntry | None) -> Standby:
    """The worker's record, from `entry_of_standby`."""
    if entry is None:
        return Standby()
    return Standby(wanted=entry.wanted, order=entry.order, level=entry.level, drained=entry.drained)


def sleeper_of_entry(entry: StandbyEntry | None) -> Sleeper | None:
    """The ledger's record, from `entry_of_standby`; None for a worker that did not sleep."""
    if entry is None or entry.gpu_uuids is None:
        return None
    vram, host = _bytes(entry.vram_bytes), _bytes(entry.host_bytes)
    return Sleeper(tuple(entry.gpu_uuids), vram, host, frozenset(entry.pids))


def with_sleepers(ledger: GpuLedger, state: State, running: Container[str]) -> GpuLedger:
    """The ledger that knows what those of a run keep that sleep, and still run; they hold their devices' locks."""
    for name, entry in state.components.items():
        sleeper = sleeper_of_entry(entry.standby)
        if sleeper is not None and name in running:
            ledger = ledger.fall_asleep(name, sleeper)
    return ledger


UNWRITABLE = Trouble("the statefile")

HEAD_FIELDS = (
    "arbiter_pid",
    "arbiter_start_time",
    "circus_endpoint",
    "servers",
    "on_arbiter_death",
    "planner",
    "follow",
    "restarts",
    "retired",
    "target",
    "environment",
    "command_line",
    "revoked",
    "spares",
)
"""Fields of the statefile's head that change in the life of a run."""


class Statefile:
    """Writes entries. `head` is the statefile without workers; `launch_of` says how a worker is started."""

    def __init__(self, head: State, store: StateStore, launch_of: Callable[[Worker], LaunchSpec], tell: Tell) -> None:
        self.head = head
        self.store = store
        self._launch_of = launch_of
        self._tell = tell
        self.unwritten = False
        """The last write failed: the file is behind."""
        self._seen: object = ()
        self._writing = asyncio.Lock()
        self._other_lease: dict[str, str] = {}

    async def create(self) -> None:
        """Write the statefile of a new run. Raises `StateError` if there is one."""
        await asyncio.to_thread(self.store.create, self.head)

    async def write(self, names: Iterable[str], fleet: Callable[[], Fleet], *, head: bool = False) -> None:
        """The entries of these workers as they are when it is their turn; those that are not there are removed.

        One write at a time: none may bring back what a later one has changed.
        """
        chosen = list(names)
        async with self._writing:
            now = fleet()
            self._note_head(now)

            def change(state: State) -> None:
                if self.unwritten:
                    self._write_all(state, now)
                for name in chosen:
                    worker = now.workers.get(name)
                    if worker is None:
                        state.components.pop(name, None)
                    else:
                        self._write_entry(state, worker, now)
                if head or self.unwritten:
                    self._write_head(state)

            await self._update(change, now)

    async def write_head(self, fleet: Callable[[], Fleet]) -> None:
        """Write the facts of the run as a whole."""
        await self.write((), fleet, head=True)

    async def heal(self, fleet: Callable[[], Fleet]) -> None:
        """Bring the statefile back where somebody broke, edited or removed it, or where it could not be written.

        Called every few seconds: while nobody touched the file it costs one `stat`.
        """
        async with self._writing:
            stamp = await asyncio.to_thread(self.store.stamp)
            if not self.unwritten and not self._other_lease and stamp == self._seen:
                return
            # The stamp from before the write: what is written meanwhile, by a worker too, is looked at once more.
            self._seen, now = stamp, fleet()
            await self._update(lambda state: self._write_all(state, now), now)

    def whole(self, fleet: Fleet) -> State:
        """The statefile as it should be, from memory alone."""
        state = self.head.model_copy(deep=True)
        for worker in fleet.workers.values():
            self._write_entry(state, worker, fleet)
            _write_lease(state, worker)
        return state

    async def _update(self, change: Callable[[State], None], fleet: Fleet) -> None:
        try:
            await self.store.aupdate(change)
            self._is_written()
        except StateError as error:
            await self._rewrite(error, fleet)

    async def _rewrite(self, why: StateError, fleet: Fleet) -> None:
        try:
            aside = await asyncio.to_thread(lambda: self.store.rewrite(self.whole(fleet)))
        except StateError as error:
            self.unwritten = True
            self._tell(f"the statefile cannot be written; it is tried again: {error}", UNWRITABLE)
        else:
            self._is_written()
            kept = f", kept as {aside}" if aside is not None else ""
            self._tell(f"the statefile was broken{kept}; written anew: {why}")

    def _is_written(self) -> None:
        if self.unwritten:
            self._tell("the statefile is written again", Over(UNWRITABLE.name))
        self.unwritten = False

    def _note_head(self, fleet: Fleet) -> None:
        self.head.revoked = dict(fleet.revoked) or None
        self.head.restarts = [entry_of_restart(plan) for plan in fleet.restarts] or None
        self.head.retired = [each.component for each in fleet.templates if each.retired] or None

    def _write_head(self, state: State) -> None:
        for key in HEAD_FIELDS:
            setattr(state, key, getattr(self.head, key))

    def _write_all(self, state: State, fleet: Fleet) -> None:
        """All entries as they should be, and no other; raises `StateError` for a file that is not of this run."""
        for key in ("namespace", "run_id"):
            if getattr(state, key) != getattr(self.head, key):
                raise StateError(f"it was edited: its {key} is {getattr(state, key)}, not {getattr(self.head, key)}")
        for name in state.components.keys() - fleet.workers.keys():
            del state.components[name]
        other: dict[str, str] = {}
        for name, worker in fleet.workers.items():
            self._write_entry(state, worker, fleet)
            written = state.components[name].lease
            traits = TRAITS[worker.state]
            if not (traits.serves or traits.asleep) or worker.lease in (None, written):
                continue
            if written is None or self._other_lease.get(name) == written:
                _write_lease(state, worker)  # the worker wrote it into a file that is lost, or somebody edited it
            else:
                other[name] = written  # a new one of which we have not heard yet: looked at once more
        self._other_lease = other

    def _write_entry(self, state: State, worker: Worker, fleet: Fleet) -> None:
        entry = state.components.get(worker.name)
        if entry is None:
            entry = ComponentEntry(watcher_name=worker.name, component=worker.component)
            state.components[worker.name] = entry
        launch = self._launch_of(worker)
        entry.cwd, entry.cmd, entry.log_file = launch.cwd, shlex.join(launch.argv), str(launch.log_file)
        entry.start_deadline_s, entry.drain_deadline_s = launch.start_deadline_s, launch.graceful_timeout_s
        entry.role, entry.gpus_per_worker = worker.role, launch.gpus_per_worker
        entry.state, entry.reason = _state_in_file(worker, entry.state), worker.reason
        process = worker.process
        if process is not None and entry.pid != process.pid and worker.start.spawned_as is not None:
            _write_lease(state, worker)  # it was made under another name, and has written them there
        entry.flip = None
        if worker.flip is not None:
            entry.flip = FlipEntry(watcher_name=worker.flip.name, component=worker.flip.component)
        entry.born = worker.start.spawned_as
        entry.pid = None if process is None else process.pid
        entry.pid_start_time = None if process is None else process.start_time
        entry.started_at = None if process is None else process.started_at
        entry.launched = worker.start.launched or None
        entry.restarts, entry.resources = worker.restarts, _resources(worker, fleet)
        entry.course = None if worker.intent is Intent.STEADY else str(worker.intent)
        entry.asked_s = worker.leave.requested_at_s
        entry.standby = entry_of_standby(worker, fleet)
        entry.failures_s = list(worker.history.failures_s) or None
        entry.failures_streak = worker.history.streak or None
        entry.other_leases = list(worker.other_leases) or None
        if process is None:
            entry.lease, entry.endpoints = None, []


def entry_of_restart(plan: RestartPlan) -> RestartEntry:
    """As the statefile keeps it."""
    return RestartEntry(
        stimulus_id=plan.stimulus_id,
        todo=dict(plan.todo),
        begun=sorted(plan.begun),
        bring_back=sorted(plan.bring_back),
        in_place=sorted(plan.in_place),
        substitutes=dict(plan.substitutes),
        awaited=list(plan.awaited),
        removed=list(plan.removed),
        late=sorted(plan.late),
    )


def restart_of_entry(entry: RestartEntry) -> RestartPlan:
    """The plan, from `entry_of_restart`."""
    return RestartPlan(
        entry.stimulus_id,
        tuple(entry.todo.items()),
        begun=frozenset(entry.begun),
        bring_back=frozenset(entry.bring_back),
        in_place=frozenset(entry.todo if entry.force else entry.in_place),
        substitutes=dict(entry.substitutes),
        awaited=tuple(entry.awaited),
        removed=tuple(entry.removed),
        late=frozenset(entry.late),
    )


def _write_lease(state: State, worker: Worker) -> None:
    """Write the fields that the worker owns, as far as we know them."""
    entry = state.components[worker.name]
    entry.endpoints = []  # before the lease: they must be under it
    entry.lease, entry.endpoints = worker.lease, list(worker.endpoints)


def _state_in_file(worker: Worker, written: WorkerState) -> WorkerState:
    """As it is, but `draining` only where that is somebody's intent: ours, or what the worker itself has written.

    The worker reads it there to tell a revoked lease from one that expired while it was stopped. Where all that we have
    is the missing key, `draining` is a guess of ours; the worker would take it for an order, and leave.
    """
    guessed = worker.leave.lease_gone and worker.leave.requested_at_s is None and worker.state is WorkerState.DRAINING
    if guessed:
        return WorkerState.DRAINING if written is WorkerState.DRAINING else WorkerState.READY
    return worker.state


def _resources(worker: Worker, fleet: Fleet) -> EntryResources:
    if not worker.gpus:
        return EntryResources()
    devices = [fleet.gpus.by_uuid[uuid] for uuid in worker.gpus]
    return EntryResources(
        allocated_gpus=[str(device.index) for device in devices], gpu_uuids=[device.uuid for device in devices]
    )


# --- head
# The statefile's facts of a run as a whole: who its arbiter is, what it serves, on what.


def arbiter_facts(deployment: Deployment) -> dict[str, Any]:
    """The head's facts of this very arbiter: a successor's differ."""
    return {
        "circus_endpoint": deployment.paths.circus_endpoint,
        "arbiter_pid": os.getpid(),
        "arbiter_start_time": start_time_s(os.getpid()),
    }


def policy(deployment: Deployment) -> Literal["end", "keep"]:
    """The fate of the workers if the arbiter is killed, as the statefile says it."""
    return "keep" if deployment.settings.keep_on_arbiter_death else "end"


def head_of(deployment: Deployment) -> State:
    """The statefile of a new run, before there is a worker in it."""
    return State(
        namespace=deployment.graph.namespace,
        run_id=deployment.run_id,
        **arbiter_facts(deployment),
        on_arbiter_death=policy(deployment),
        runtime_dir=str(deployment.paths.runtime),
        log_dir=str(deployment.paths.logs),
        target=deployment.graph.target,
        gpus=deployment.gpus_option,
        command_line=dict(deployment.command_line) or None,
        environment=Environment(
            DYNAMO_SERVICE_CONFIG=deployment.state_config_json,
            SYSTEM_RESOURCES=SystemResources(
                total_gpus=len(deployment.gpus), gpu_info=[str(device.index) for device in deployment.gpus]
            ),
        ),
    )


def without_credentials(url: str) -> str:
    """The URL without user and password: the statefile holds no secrets."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]

"""The event log: every change of a worker's state, with its cause, as JSON lines beside the logs. It outlives the run.

The statefile, not this log, is what a restart is built on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.core.fleet.effects import Commit, Effect, Note, describe
from dynamo_local.core.fleet.lifecycle import Transition
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import Missing, watcher_name
from dynamo_local.errors import StateError
from dynamo_local.system import json_lines as jsonl
from dynamo_local.system.json_lines import JsonLog, LogUnwritable, Record, parsed

if TYPE_CHECKING:
    from dynamo_local.arbiter.deployment import Deployment
    from dynamo_local.arbiter.guarded_run import GuardedRun
    from dynamo_local.arbiter.servers import ServerEvent

FILE_NAME = "events.jsonl"
UNWRITABLE = Trouble("the event log")

KINDS: jsonl.Kinds = (
    ("seq", int),
    ("time", (int, float)),
    ("watcher_name", str),
    ("event", str),
    ("from", str),
    ("to", str),
)
"""`{"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", …the event's own fields}`.

`instructions` lists the effects on the worker in that step. `time` is seconds since 1970. `seq` goes up by one per
event, through rotations and from one arbiter to the next. With `aside` (true) the worker's state did not change: the
step had effects on it, and `event` is their cause.
"""


class EventLogUnwritable(LogUnwritable):
    """The events could not be written. They are kept and written with the next ones."""

    code = "event_log_unwritable"


class EventLog(JsonLog):
    """The writer."""

    what = "event"
    kinds = KINDS
    unwritable = EventLogUnwritable


def event_log_path(logs: Path) -> Path:
    """Where the events of the namespace with that log folder are."""
    return logs / FILE_NAME


def record_of(transition: Transition, *, time_s: float) -> dict[str, Any]:
    """The transition as a record without its `seq`, which `EventLog.append` gives. `time_s` is seconds since 1970.

    A detail that is missing is null.
    """
    details = {name: None if isinstance(value, Missing) else value for name, value in transition.details.items()}
    return {
        "time": time_s,
        "watcher_name": transition.name,
        "component": transition.component,
        "event": str(transition.kind),
        "from": str(transition.before),
        "to": str(transition.after),
        "stimulus_id": transition.stimulus_id,
        **details,
    }


def aside_record(aside: Note, *, time_s: float) -> dict[str, Any]:
    """A record of effects on a worker whose state did not change."""
    return {
        "time": time_s,
        "watcher_name": aside.name,
        "component": aside.component,
        "event": aside.event,
        "from": str(aside.state),
        "to": str(aside.state),
        "stimulus_id": aside.stimulus_id,
        "aside": True,
    }


def is_aside(record: Record) -> bool:
    """Whether the record belongs to a worker's story only: its state did not change."""
    return bool(record.get("aside"))


def read(
    path: Path,
    *,
    since_seq: int = 0,
    last: int | None = None,
    of: Container[str] | None = None,
    asides: bool = False,
) -> list[Record]:
    """Events in order, also from rotated files: those after `since_seq`, of the workers `of`, and of these the `last`
    ones.

    `asides` adds steps that had effects without changing a state. Lines that are no records (half written, edited) are
    left out.
    """

    def wanted(record: Record) -> bool:
        return (of is None or record["watcher_name"] in of) and (asides or not is_aside(record))

    return jsonl.read(path, KINDS, since_seq=since_seq, last=last, wanted=wanted)


class EventRecorder:
    """Writes the event log in a thread, in order. It is the arbiter's `EventWriter`."""

    def __init__(self, log: EventLog, wall_s: Callable[[], float], tell: Tell) -> None:
        self._log = log
        self._wall_s = wall_s
        self._tell = tell
        self._writing = asyncio.Lock()
        self._unwritten = False

    async def append(self, commit: Commit, effects: Sequence[Effect]) -> None:
        """Write a step's transitions and notes, with each worker's effects. A failed write is only reported."""
        now_s = self._wall_s()
        done = _by_worker(effects)
        records = []
        for each in commit.transitions:
            record = record_of(each, time_s=now_s)
            records.append({**record, "instructions": done.pop(each.name, [])})
        for aside in commit.notes:
            records.append({**aside_record(aside, time_s=now_s), "instructions": done.pop(aside.name, [])})
        await self._write(records)

    async def record(self, record: dict[str, Any]) -> None:
        """Append a record that is no worker's event, in order with those that are."""
        await self._write([record])

    async def _write(self, records: list[dict[str, Any]]) -> None:
        if not records:
            return
        async with self._writing:  # in the order of the calls
            try:
                await asyncio.to_thread(self._log.append, records)
            except StateError as error:
                self._tell(str(error), UNWRITABLE)
                self._unwritten = True
            else:
                if self._unwritten:
                    self._tell("the event log is written again", Over(UNWRITABLE.name))
                self._unwritten = False


def _by_worker(effects: Sequence[Effect]) -> dict[str, list[str]]:
    """The effects on each worker, in words."""
    done: dict[str, list[str]] = {}
    for each in effects:
        name = getattr(each, "name", None)
        if name is not None:
            done.setdefault(name, []).append(describe(each))
    return done


class EventTail:
    """Events and asides as they come, from after `since_seq`. With other `kinds`: the records of another log.

    Survives rotation, a half-written last line and a deleted file.
    """

    def __init__(self, path: Path, since_seq: int, kinds: jsonl.Kinds = KINDS) -> None:
        self._path = path
        self._kinds = kinds
        self._seq = since_seq
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> list[Record]:
        """The records since the last call. Never waits."""
        missed: list[Record] = []
        try:
            with self._path.open("rb") as file:
                info = os.fstat(file.fileno())
                if info.st_ino != self._inode or info.st_size < self._offset:
                    missed = self._missed(info.st_ino)
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        return missed + self._new(record for line in lines if (record := parsed(line, self._kinds)) is not None)

    def _missed(self, inode: int) -> list[Record]:
        """The file was rotated or truncated. Read the events since then, also from rotated files."""
        self._inode, self._offset, self._rest = inode, 0, b""
        if any(record["seq"] < self._seq for record in jsonl.read(self._path, self._kinds, last=1)):
            self._seq = 0  # somebody deleted the log, and an arbiter counts from 1 again
        return self._new(jsonl.read(self._path, self._kinds, since_seq=self._seq))

    def _new(self, records: Iterable[Record]) -> list[Record]:
        found = []
        for record in records:
            if record["seq"] > self._seq:
                self._seq = record["seq"]
                found.append(record)
        return found


# Records beside workers' events: begin and end of a run, deaths and starts of its servers.
# The arbiter writes the records of its run. For a killed arbiter the guardian writes the end, else the next arbiter
# reports it.

ARBITER = "arbiter"
RUN_STARTED, RUN_ADOPTED, RUN_NOT_ADOPTED, RUN_ENDED = "RunStarted", "RunAdopted", "RunNotAdopted", "RunEnded"
BY_GUARDIAN = "guardian"
RUN_EVENTS = frozenset({RUN_STARTED, RUN_ADOPTED, RUN_NOT_ADOPTED, RUN_ENDED})


def arbiter_name(namespace: str) -> str:
    """`watcher_name` of a run's own records."""
    return watcher_name(namespace, ARBITER)


def server_record(event: ServerEvent, wall_s: float) -> dict[str, Any]:
    """A server's event as a record without its `seq`."""
    return {
        "time": wall_s,
        "watcher_name": event.watcher_name,
        "component": event.kind,
        "event": event.event,
        "from": event.before,
        "to": event.after,
        "stimulus_id": event.cause,
        "pid": event.pid,
        "next_try_s": event.next_try_s,
        "reason": event.reason,
    }


class RunRecords:
    """Writes the records of one arbiter's life."""

    def __init__(self, deployment: Deployment, events: EventRecorder, wall_s: Callable[[], float]) -> None:
        self._deployment = deployment
        self._events = events
        self._wall_s = wall_s

    async def began(self, *, adopted: bool) -> None:
        """Write that the arbiter has begun. Nothing of the run is started or adopted yet."""
        namespace = self._deployment.graph.namespace
        log = event_log_path(self._deployment.paths.logs)
        killed = await asyncio.to_thread(_without_end, log, namespace)
        event = RUN_ADOPTED if adopted else RUN_STARTED
        await self._write(event, "", "starting", target=self._deployment.graph.target, killed_pid=killed)

    async def ended(self, why: str, exit_code: int, *, ours: bool) -> None:
        """Write that the run has ended. If it is not `ours`, it was not adopted and still exists."""
        event, reason = RUN_ENDED if ours else RUN_NOT_ADOPTED, why.partition("\n")[0]
        await self._write(event, "leaving", "", reason=reason, exit_code=exit_code)

    async def _write(self, event: str, before: str, after: str, **more: Any) -> None:
        await self._events.record(
            {
                "time": self._wall_s(),
                "watcher_name": arbiter_name(self._deployment.graph.namespace),
                "component": ARBITER,
                "event": event,
                "from": before,
                "to": after,
                "stimulus_id": "serve",
                "run_id": self._deployment.run_id,
                "arbiter_pid": os.getpid(),
                **more,
            }
        )


def ended_in_its_place(
    events: EventLog, guarded: GuardedRun, death: str, workers: Sequence[str], wall_s: float
) -> None:
    """Write the end that a killed arbiter could not write. Raises `StateError`.

    `death` says how the arbiter ended (`was killed by SIGKILL`). The caller holds the namespace's lock.
    """
    events.append(
        [
            {
                "time": wall_s,
                "watcher_name": arbiter_name(guarded.namespace),
                "component": ARBITER,
                "event": RUN_ENDED,
                "from": "ready",
                "to": "",
                "stimulus_id": BY_GUARDIAN,
                "run_id": guarded.run_id,
                "arbiter_pid": guarded.arbiter_pid,
                "reason": f"its arbiter {death}, and the guardian ended what it left",
                "death": death,
                "workers": list(workers),
            }
        ]
    )


def ended_by_death(log: Path, namespace: str) -> Record | None:
    """The last record of the namespace's runs, if a guardian wrote it: the run ended with its arbiter's death."""
    for last in read(log, last=1, of={arbiter_name(namespace)}):
        if last["event"] == RUN_ENDED and last.get("stimulus_id") == BY_GUARDIAN and isinstance(last.get("death"), str):
            return last
    return None


def _without_end(log: Path, namespace: str) -> int | None:
    """The pid of the previous arbiter if it wrote no end, because it was killed."""
    for last in read(log, last=1, of={arbiter_name(namespace)}):
        pid = last.get("arbiter_pid")
        return pid if last["event"] in (RUN_STARTED, RUN_ADOPTED) and isinstance(pid, int) else None
    return None

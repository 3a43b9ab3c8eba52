"""The event log: every change of a worker's state, with its cause, as JSON lines beside the logs. It outlives the run.

The statefile, not this log, is what a restart is built on.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynamo_local.core.lifecycle import Event
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.serve import jsonl
from dynamo_local.serve.jsonl import JsonLog, LogUnwritable, Record, parsed

FILE_NAME = "events.jsonl"

KINDS: jsonl.Kinds = (
    ("seq", int),
    ("time", (int, float)),
    ("watcher_name", str),
    ("event", str),
    ("from", str),
    ("to", str),
)
"""`{"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", …the event's own fields}`.

`time` is seconds since 1970; `seq` goes up by one per event, through rotations and from one arbiter to the next.
"""


class EventLogUnwritable(LogUnwritable):
    """The events could not be written; they are kept and tried again with the next ones."""

    code = "event_log_unwritable"


class EventLog(JsonLog):
    """The writing end. See `JsonLog`."""

    what = "event"
    kinds = KINDS
    unwritable = EventLogUnwritable


def event_log_path(logs: Path) -> Path:
    """Where the events of the namespace with that log folder are."""
    return logs / FILE_NAME


def record_of(
    event: Event, *, watcher_name: str, component: str, before: WorkerState, after: WorkerState, time_s: float
) -> dict[str, Any]:
    """The event as a record without its `seq`, which `EventLog.append` gives. `time_s` is seconds since 1970.

    What is missing is null.
    """
    own = {field.name: getattr(event, field.name) for field in fields(event) if field.name != "stimulus_id"}
    own = {name: None if isinstance(value, Missing) else value for name, value in own.items()}
    return {
        "time": time_s,
        "watcher_name": watcher_name,
        "component": component,
        "event": type(event).__name__,
        "from": str(before),
        "to": str(after),
        "stimulus_id": event.stimulus_id,
        **own,
    }


def read(path: Path, *, since_seq: int = 0, last: int | None = None, of: Container[str] | None = None) -> list[Record]:
    """Events in order, rotated files included: after `since_seq`, of the workers `of` only, the `last` so many of them.

    Empty if nothing was written. Lines that are no records (half written, edited) are left out.
    """
    return jsonl.read(
        path, KINDS, since_seq=since_seq, last=last, wanted=lambda record: of is None or record["watcher_name"] in of
    )


class EventTail:
    """Events as they come, from after `since_seq`; survives rotation, a half-written last line and a deleted file."""

    def __init__(self, path: Path, since_seq: int) -> None:
        self._path = path
        self._seq = since_seq
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def poll(self) -> list[Record]:
        """What came since the last call. Never waits."""
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
        return missed + self._new(record for line in lines if (record := parsed(line, KINDS)) is not None)

    def _missed(self, inode: int) -> list[Record]:
        """Another file is in its place (or it was cut): what came meanwhile, from the rotated ones too."""
        self._inode, self._offset, self._rest = inode, 0, b""
        if any(record["seq"] < self._seq for record in read(self._path, last=1)):
            self._seq = 0  # somebody deleted the log, and an arbiter counts from 1 again
        return self._new(read(self._path, since_seq=self._seq))

    def _new(self, records: Iterable[Record]) -> list[Record]:
        found = []
        for record in records:
            if record["seq"] > self._seq:
                self._seq = record["seq"]
                found.append(record)
        return found

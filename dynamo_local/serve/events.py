"""The event log: every change of a worker's state, with its cause, as JSON lines beside the logs. It outlives the run.

One arbiter writes it (it holds the namespace's lock). The statefile, not this log, is what a restart is built on:
an event that cannot be written now (a full disk) is kept in memory and written with the next ones.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynamo_local.core.lifecycle import Event
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.errors import StateError

FILE_NAME = "events.jsonl"
MAX_BYTES = 8 * 1024 * 1024
"""About 40,000 events; then the file becomes `events.jsonl.1`."""

KEPT = 3
BACKLOG = 10_000
"""Events that are kept while the file cannot be written; then the oldest go, which the gap in `seq` shows."""

Record = Mapping[str, Any]
"""`{"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", …the event's own fields}`.

`time` is seconds since 1970; `seq` goes up by one per event, through rotations and from one arbiter to the next.
"""


_NEEDED: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("seq", int),
    ("time", (int, float)),
    ("watcher_name", str),
    ("event", str),
    ("from", str),
    ("to", str),
)


class EventLogUnwritable(StateError):
    """The events could not be written; they are kept and tried again with the next ones."""

    code = "event_log_unwritable"


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


class EventLog:
    """The writing end. Calls block (disk): make them in a thread, one after the other, in the order of the events.

    Making one reads the last record's number, a few milliseconds; an unreadable file is an OSError.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._waiting: deque[bytes] = deque(maxlen=BACKLOG)
        self._lock = threading.Lock()
        self._seq = max((int(record["seq"]) for record in read(path, last=1)), default=0)

    def append(self, records: Iterable[Record]) -> None:
        """Number the records and write them, and any that waited, in one write.

        Raises `EventLogUnwritable` with nothing half written. Then they wait; an `append([])` tries again.
        """
        with self._lock:
            for record in records:
                self._seq += 1
                self._waiting.append(_line({"seq": self._seq, **record}))
            if not self._waiting:
                return
            try:
                self._write(b"".join(self._waiting))
            except OSError as error:
                raise EventLogUnwritable(
                    f"{self._path}: {len(self._waiting)} events wait to be written ({error.strerror}); "
                    "make room or give access, they are tried again with the next event"
                ) from error
            self._waiting.clear()

    def _write(self, block: bytes) -> None:
        self._rotate(len(block))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                block = b"\n" + block  # an arbiter was killed in mid-write: its half line stays alone
            written = os.write(fd, block)
            if written != len(block):  # the disk is full: take the piece back, truncating needs no room
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def _rotate(self, coming_bytes: int) -> None:
        """Each batch opens the file anew, so renaming is enough; readers see it by the changed inode."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size == 0 or size + coming_bytes <= self._max_bytes:
            return
        for n in range(self._kept, 1, -1):
            if _numbered(self._path, n - 1).exists():
                os.replace(_numbered(self._path, n - 1), _numbered(self._path, n))
        os.replace(self._path, _numbered(self._path, 1))


def read(path: Path, *, since_seq: int = 0, last: int | None = None, of: Container[str] | None = None) -> list[Record]:
    """Events in order, rotated files included: after `since_seq`, of the workers `of` only, the `last` so many of them.

    Empty if nothing was written. Lines that are no records (half written, edited) are left out.
    """
    found: list[Record] = []
    below = None
    for record in _backwards(path):
        seq = record["seq"]
        if below is not None and seq >= below:
            continue  # the file was rotated while we read: the same lines under their new name
        below = seq
        if seq <= since_seq or (last is not None and len(found) >= last):
            break
        if of is None or record["watcher_name"] in of:
            found.append(record)
    found.reverse()
    return found


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
        return missed + self._new(record for line in lines if (record := _parsed(line)) is not None)

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


def _numbered(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), kind) for key, kind in _NEEDED):
        return None
    return record


def _backwards(path: Path) -> Iterator[Record]:
    """Newest first, through the file and its rotated predecessors. A last line without its end is left out."""
    for file in (path, *(_numbered(path, n) for n in range(1, KEPT + 1))):
        try:
            block = file.read_bytes()
        except FileNotFoundError:
            continue
        for line in reversed(block.split(b"\n")[:-1]):
            if line and (record := _parsed(line)) is not None:
                yield record

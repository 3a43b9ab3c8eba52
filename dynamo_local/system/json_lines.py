"""Logs of JSON lines that the arbiter writes beside the processes' logs: numbered, bounded, never half a line.

One arbiter writes them (it holds the namespace's lock); anybody may read. A record that cannot be written now (a full
disk) is kept in memory and written with the next ones.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from dynamo_local.errors import BadInput, StateError

MAX_BYTES = 8 * 1024 * 1024
"""About 40,000 events; then the file becomes `NAME.1`."""

KEPT = 3
BACKLOG = 10_000
"""Records that are kept while the file cannot be written; then the oldest go, which the gap in `seq` shows."""

Record = Mapping[str, Any]
"""Has at least `seq`, which goes up by one per record, through rotations and from one arbiter to the next."""

Kinds = tuple[tuple[str, type | tuple[type, ...]], ...]
"""Keys that a record must have, with the types of their values: what else is in the file is no record."""


@dataclass(slots=True)
class Skipped:
    """Lines that a reader could not use and passed over. `first` names the first one, with file and line."""

    count: int = 0
    first: str = ""

    def add(self, why: str) -> None:
        self.count += 1
        self.first = self.first or why

    def add_all(self, others: Skipped) -> None:
        self.count += others.count
        self.first = self.first or others.first

    def warning(self, what: str) -> str | None:
        """One sentence for people about the lines of `what`; None if none was skipped."""
        if not self.count:
            return None
        lines = "1 line is" if self.count == 1 else f"{self.count:,} lines are"
        return f"{what}: {lines} skipped. The first is {self.first}"


class LogUnwritable(StateError):
    """Records could not be written; they are kept and tried again with the next ones."""

    code = "log_unwritable"


class JsonLog:
    """The writing end. Calls block (disk): make them in a thread, one after the other, in the order of the records.

    Making one reads the last record's number, a few milliseconds; an unreadable file is an OSError.
    """

    what: ClassVar[str]
    """The kind of the records, in a word, for messages."""
    kinds: ClassVar[Kinds]
    unwritable: ClassVar[type[LogUnwritable]] = LogUnwritable

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._waiting: deque[bytes] = deque(maxlen=BACKLOG)
        self._lock = threading.Lock()
        self._seq = max((int(record["seq"]) for record in read(path, self.kinds, last=1)), default=0)

    @property
    def last_seq(self) -> int:
        """The number of the newest record; 0 before the first."""
        return self._seq

    def append(self, records: Iterable[Record]) -> None:
        """Number the records and write them, and any that waited, in one write.

        Raises `LogUnwritable` with nothing half written. Then they wait; an `append([])` tries again.
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
                raise self.unwritable(
                    f"{self._path}: {len(self._waiting)} {self.what}s wait to be written ({error.strerror}); "
                    f"make room or give access, they are tried again with the next {self.what}"
                ) from error
            self._waiting.clear()

    def _write(self, block: bytes) -> None:
        self._rotate(len(block))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                block = b"\n" + block  # an arbiter was killed while it wrote: its half line stays a line of its own
            written = os.write(fd, block)
            if written != len(block):  # the disk is full: remove the piece, truncating needs no space
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


def read(
    path: Path,
    kinds: Kinds,
    *,
    since_seq: int = 0,
    last: int | None = None,
    wanted: Callable[[Record], bool] = lambda record: True,
) -> list[Record]:
    """Records in order, also from rotated files: the wanted ones after `since_seq`; of these the `last` ones.

    Empty if nothing was written. Lines that are no records (half written, edited) are left out.
    """
    found: list[Record] = []
    for record in newest_first(path, kinds):
        if record["seq"] <= since_seq or (last is not None and len(found) >= last):
            break
        if wanted(record):
            found.append(record)
    found.reverse()
    return found


def oldest_first(path: Path, kinds: Kinds) -> Iterator[Record]:
    """All records in order, also from rotated files, one at a time: for logs that are too long to be held.

    Lines that are no records are left out, and so is a last one without its end.
    """
    with contextlib.ExitStack() as stack:
        files = []
        for file in (path, *(_numbered(path, n) for n in range(1, KEPT + 1))):
            # All at once, the newest first: one that is renamed meanwhile is there twice, and none is missed.
            with contextlib.suppress(FileNotFoundError):
                files.append(stack.enter_context(file.open("rb")))
        last = -1
        for handle in reversed(files):
            for line in handle:
                record = parsed(line, kinds) if line.endswith(b"\n") else None
                if record is not None and record["seq"] > last:
                    last = record["seq"]
                    yield record


def newest_first(path: Path, kinds: Kinds) -> Iterator[Record]:
    """Newest first, through the file and its rotated predecessors.

    Lines that are no records are left out, and so is a last one without its end.
    """
    return (record for record, _ in newest_lines(path, kinds))


@dataclass(frozen=True, slots=True)
class LogLine:
    """Where a record stands: in `file`, so many lines `after` the byte `begins`."""

    file: Path
    begins: int
    after: int

    def __str__(self) -> str:
        """`ticks.jsonl, line 17`. Reads what is before `begins`, to count lines."""
        before = 0
        if self.begins:
            with contextlib.suppress(OSError), self.file.open("rb") as handle:
                before = handle.read(self.begins).count(b"\n")
        return f"{self.file}, line {before + self.after + 1}"


def newest_lines(
    path: Path, kinds: Kinds, *, bytes_max: float = math.inf, skipped: Skipped | None = None
) -> Iterator[tuple[Record, LogLine]]:
    """As `newest_first`, with the place of each record. Reads at most the last `bytes_max` bytes of all files."""
    below, left = math.inf, bytes_max
    for file in (path, *(_numbered(path, n) for n in range(1, KEPT + 1))):
        try:
            with file.open("rb") as handle:
                size = handle.seek(0, os.SEEK_END)
                begins = max(0, size - int(min(size, left)))
                handle.seek(begins)
                block = handle.read()
        except FileNotFoundError:
            continue
        left = max(0, left - len(block))
        lines = block.split(b"\n")[:-1]
        for after in range(len(lines) - 1, 0 if begins else -1, -1):  # the first may have lost its beginning
            record = parsed(lines[after], kinds) if lines[after] else None
            if record is None:
                if skipped is not None and lines[after]:
                    skipped.add(f"{LogLine(file, begins, after)}: this is no record")
            # The file may be rotated while we read: the same lines under their new name.
            elif record["seq"] < below:
                below = record["seq"]
                yield record, LogLine(file, begins, after)


def parsed(line: bytes, kinds: Kinds) -> Record | None:
    """The record of one line; None if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), kind) for key, kind in kinds):
        return None
    return record


def _numbered(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


# Reads traces: files of JSON lines, gzipped if their names end in `.gz`.
#
# Each error is a `BadTrace` that names the file, the line and the field.

LINE_BYTES_MAX = 64 * 1024 * 1024
"""A longer line is refused before all of it is read: a gzipped file may hold a thousand times its size."""
TOKENS_MAX = 1_000_000_000
MILLISECONDS_MAX = 1e15
"""A later time is a damaged one: this is 31,700 years after its clock's begin."""

_SHOWN = 60
_BEGIN = b'{"seq":'


class BadTrace(BadInput):
    """A trace cannot be used; the message names the file, the line and the field."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class Row:
    """One line's object. `where` names file and line for messages."""

    fields: dict[str, Any]
    where: str

    def field(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.fields:
            there = ", ".join(map(str, self.fields)) or "nothing"
            raise BadTrace(f"{self.where}: {name} is missing; the line has: {there}")
        return self.fields[name]

    def milliseconds(self, name: str) -> float:
        """A time, 0 or more."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise BadTrace(f"{self.where}: {name} must be a number of milliseconds, not {shown(value)}")
        if value < 0:
            raise BadTrace(f"{self.where}: {name} must be 0 or more, not {shown(value)}")
        if value > MILLISECONDS_MAX:
            raise BadTrace(f"{self.where}: {name} is {shown(value)} ms; no time is above {MILLISECONDS_MAX:.0e}")
        return float(value)

    def tokens(self, name: str, *, least: int = 1) -> int:
        """A whole number of tokens."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadTrace(
                f"{self.where}: {name} must be a whole number of tokens, {least} or more, not {shown(value)}"
            )
        if value > TOKENS_MAX:
            raise BadTrace(f"{self.where}: {name} is {shown(value)} tokens; no request has more than {TOKENS_MAX:,}")
        return value

    def inner(self, name: str) -> Row:
        """An object within the object; its fields are told as `name.field`."""
        value = self.field(name)
        if not isinstance(value, dict):
            raise BadTrace(f"{self.where}: {name} must be an object, not {shown(value)}")
        return Row(value, f"{self.where}, in {name}")


def read_rows(path: Path, skipped: Skipped | None = None, *, halves: bool = False) -> Iterator[Row]:
    """The objects of a file, one at a time; empty lines are passed over.

    Raises `BadTrace`. With `skipped` a line that is no object is counted there, and does not raise. With `halves` the
    beginning of a `JsonLog`'s line is passed over: its writer was killed, and the gap in `seq` shows that.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not (text := line.strip()):
            continue
        try:
            row = _row(text, f"{path}, line {number}")
        except BadTrace as error:
            if halves and (text.startswith(_BEGIN) or _BEGIN.startswith(text)):
                continue
            if skipped is None:
                raise
            skipped.add(str(error))
        else:
            yield row


def shown(value: Any) -> str:
    """A value as a message shows it: JSON, or a line's own text, cut where it is long."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise BadTrace(f"trace {path} has a line of more than {LINE_BYTES_MAX:,} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadTrace(f"trace {path} cannot be read: {what}") from error


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{where}: this is no JSON ({error}): {shown(line)}") from error
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: a request is a JSON object, not {shown(line)}")
    return Row(row, where)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False

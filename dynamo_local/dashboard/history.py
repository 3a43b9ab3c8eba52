"""The history: one bounded SQLite file for each namespace, with points of 1 s, 10 s and 1 min.

A row holds one time of one level: its values as 32-bit floats, in the order of the table `columns`. A full disk costs
points and nothing else. All calls block: make them in a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.dashboard.stream import encoded
from dynamo_local.errors import StateError

log = logging.getLogger(__name__)

FILE_NAME = "history.sqlite"
DAY_S = 86_400
LEVELS: Mapping[int, int] = {1: DAY_S, 10: 7 * DAY_S, 60: 31 * DAY_S}
"""Seconds of a step -> seconds for which points of that step are kept."""
MAXIMA = ("ttft_p99", "itl_p99", "waiting")
"""A coarser step has the highest value of these, and the mean of all others: a spike stays visible."""
BYTES_MAX = 64 * 1024 * 1024
"""A month of 25 columns has 23 MB (measured: 121 bytes a row)."""
COLUMNS_MAX = 200
MARKS_MAX = 20_000
GAPS_MAX = 2_000
PAGE_BYTES = 4_096
POINTS_MAX = 100_000
BUSY_S = 2.0
VERSION = 1

Values = Mapping[str, float | None]


def history_path(logs: Path) -> Path:
    """Where the history of the namespace with that log folder is."""
    return logs / FILE_NAME


# --- pure


@dataclass(slots=True)
class Bucket:
    """The points of one coarser step so far."""

    t: int
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: Values) -> None:
        """One more point."""
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                continue
            if name in MAXIMA:
                self.sums[name], self.counts[name] = max(self.sums.get(name, value), value), 1
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def values(self) -> dict[str, float | None]:
        """The point of the step."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}


@dataclass(slots=True)
class Levels:
    """Makes the points of all levels from those of a second."""

    _open: dict[int, Bucket] = field(default_factory=dict)

    def add(self, t: float, values: Values) -> Iterator[tuple[int, int, Values]]:
        """`(step_s, t, values)` of each point that is to be written now. An unfinished step is written as it is so
        far, and again when it is complete."""
        yield 1, int(t), values
        for step_s in list(LEVELS)[1:]:
            at = int(t) // step_s * step_s
            bucket = self._open.get(step_s)
            if bucket is None or bucket.t != at:
                if bucket is not None:
                    yield step_s, bucket.t, bucket.values()
                bucket = self._open[step_s] = Bucket(at)
            bucket.add(values)

    def rest(self) -> Iterator[tuple[int, int, Values]]:
        """The steps that are not complete."""
        for step_s, bucket in self._open.items():
            yield step_s, bucket.t, bucket.values()


def level_for(from_s: float, to_s: float, points: int, now_s: float) -> int:
    """The coarsest step that fills so many points, of those that reach back to `from_s`."""
    reaching = [step_s for step_s, kept_s in LEVELS.items() if now_s - from_s <= kept_s * 1.01] or [max(LEVELS)]
    filling = [step_s for step_s in reaching if (to_s - from_s) / step_s >= points]
    return max(filling) if filling else min(reaching)


# --- the file


class HistoryWriter:
    """The writing end, of one process. Failures are logged once and cost points."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        self.path = path
        self.note: str | None = None
        """The history's trouble, for people. None: there is none."""
        self._bytes_max = bytes_max
        self._levels = Levels()
        self._ids: dict[str, int] = {}
        self._waiting: list[tuple[int, int, Values]] = []
        self._pruned_s = 0.0
        self._db: sqlite3.Connection | None = None
        self._open()

    def add(self, t: float, values: Values) -> None:
        """Take a point. `flush` writes it."""
        self._waiting += self._levels.add(t, values)
        del self._waiting[:-POINTS_MAX]

    def flush(
        self, now_s: float, marks: Sequence[Mapping[str, Any]] = (), gaps: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write what waits, in one transaction. Past failures are tried again with it."""
        if self._db is None:
            self._open()
        try:
            self._write(now_s, marks, gaps)
        except sqlite3.DatabaseError as error:
            full = "full" in str(error) or "disk" in str(error)
            self._trouble(f"{'the disk is full or fails' if full else 'the history cannot be written'} ({error})")
            self._close()
            if not full and not isinstance(error, sqlite3.OperationalError):
                self._set_aside(error)
        except OSError as error:
            self._trouble(f"the history cannot be written ({error.strerror or error})")
        else:
            if self.note is not None and self.note.startswith("points are lost"):
                log.info("%s: the history is written again", self.path)
                self.note = None
        self._waiting.clear()

    def close(self, now_s: float) -> None:
        """Write the rest."""
        self._waiting += self._levels.rest()
        self.flush(now_s)
        self._close()

    def size(self) -> int | None:
        """The size of the file and its log; None where there is none."""
        sizes = [path.stat().st_size for path in (self.path, Path(f"{self.path}-wal")) if path.exists()]
        return sum(sizes) if sizes else None

    def _open(self) -> None:
        try:
            self._db = self._opened()
        except OSError as error:
            self._trouble(f"the history cannot be opened ({error.strerror or error})")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
                self._trouble(f"the history cannot be opened ({error})")
                return
            self._set_aside(error)
            with contextlib.suppress(sqlite3.Error):
                self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA journal_size_limit=4194304")
            db.execute(f"PRAGMA max_page_count={self._bytes_max // PAGE_BYTES}")
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("the file is malformed")
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                raise sqlite3.DatabaseError(f"the file is of version {found}, not {VERSION}")
            for statement in SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA user_version={VERSION}")
            self._ids = dict(db.execute("SELECT name, id FROM columns"))
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: Exception) -> None:
        self._close()
        aside = self.path.with_name(f"{self.path.name}.corrupt")
        with contextlib.suppress(OSError):
            os.replace(self.path, aside)
            for tail in ("-wal", "-shm"):
                Path(f"{self.path}{tail}").unlink(missing_ok=True)
        self.note = f"the history could not be read ({error}); it is put aside as {aside}, and a new one begins"
        log.warning("%s", self.note)

    def _trouble(self, why: str) -> None:
        note = f"points are lost: {why}; {self.path}"
        if self.note != note:
            log.warning("%s", note)
        self.note = note

    def _close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None

    def _write(self, now_s: float, marks: Iterable[Mapping[str, Any]], gaps: Iterable[Mapping[str, Any]]) -> None:
        db = self._db
        if db is None:
            raise OSError("it cannot be opened")
        db.execute("BEGIN IMMEDIATE")
        try:
            rows = [(step_s, t, self._packed(db, values)) for step_s, t, values in self._waiting]
            db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?)", rows)
            db.executemany("INSERT INTO marks VALUES (?, ?)", [(mark["t"], encoded(mark)) for mark in marks])
            db.executemany(
                "INSERT INTO gaps VALUES (?, ?, ?)", [(each["from"], each["to"], each["why"]) for each in gaps]
            )
            if now_s - self._pruned_s >= 60 or now_s < self._pruned_s:
                self._pruned_s = now_s
                self._prune(db, now_s)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            self._ids = {}
            with contextlib.suppress(sqlite3.Error):
                self._ids = dict(db.execute("SELECT name, id FROM columns"))
            raise

    def _packed(self, db: sqlite3.Connection, values: Values) -> bytes:
        for name in values:
            if name not in self._ids and len(self._ids) < COLUMNS_MAX:
                db.execute("INSERT OR IGNORE INTO columns (id, name) VALUES (?, ?)", (len(self._ids), name))
                self._ids[name] = len(self._ids)
        packed = array("f", [math.nan]) * len(self._ids)
        for name, value in values.items():
            if value is not None and name in self._ids:
                packed[self._ids[name]] = value
        return packed.tobytes()

    def _prune(self, db: sqlite3.Connection, now_s: float) -> None:
        """Old parts fall out, and so do those that a clock ahead of its time has written."""
        for step_s, kept_s in LEVELS.items():
            db.execute("DELETE FROM points WHERE step=? AND (t<? OR t>?)", (step_s, now_s - kept_s, now_s + DAY_S))
        for table, most in (("marks", MARKS_MAX), ("gaps", GAPS_MAX)):
            db.execute(f"DELETE FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - {most}")


SCHEMA = (
    "CREATE TABLE IF NOT EXISTS columns (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL)",
    "CREATE TABLE IF NOT EXISTS points (step INTEGER, t INTEGER, v BLOB, PRIMARY KEY (step, t)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS marks (t REAL, mark TEXT)",
    "CREATE TABLE IF NOT EXISTS gaps (began REAL, ended REAL, why TEXT)",
    "CREATE INDEX IF NOT EXISTS marks_t ON marks (t)",
)


@dataclass(frozen=True, slots=True)
class Span:
    """Points of one level, column by column. `columns` has `t` first."""

    step_s: int
    columns: dict[str, list[float | None]]
    gaps: list[dict[str, Any]]


class HistoryReader:
    """The reading end, of any process. It never waits for the writer (WAL)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def span(self, from_s: float, to_s: float, *, points: int, columns: Sequence[str] | None, now_s: float) -> Span:
        """The points of a time. An unreadable file has none. Columns that no point has are all null."""
        step_s = level_for(from_s, to_s, points, now_s)
        with self._opened() as db:
            if db is None:
                return Span(step_s, {"t": [], **{name: [] for name in columns or ()}}, [])
            ids: dict[str, int] = dict(db.execute("SELECT name, id FROM columns"))
            wanted = list(ids) if columns is None else list(columns)
            found: dict[str, list[float | None]] = {"t": [], **{name: [] for name in wanted}}
            rows = db.execute(
                "SELECT t, v FROM points WHERE step=? AND t>=? AND t<=? ORDER BY t LIMIT ?",
                (step_s, from_s, to_s, POINTS_MAX),
            )
            places = [(found[name], ids.get(name, COLUMNS_MAX)) for name in wanted]
            for t, blob in rows:
                values = array("f")
                values.frombytes(blob)
                found["t"].append(t)
                for into, n in places:
                    value = values[n] if n < len(values) else math.nan
                    into.append(None if value != value else round(value, 6))
            gaps = [
                {"from": began, "to": ended, "why": why}
                for began, ended, why in db.execute(
                    "SELECT began, ended, why FROM gaps WHERE ended>=? AND began<=? ORDER BY began", (from_s, to_s)
                )
            ]
        return Span(step_s, found, gaps)

    def marks(self, from_s: float, to_s: float, limit: int = 2_000) -> list[str]:
        """The newest marks of a time, in order, as JSON."""
        with self._opened() as db:
            rows = (
                ()
                if db is None
                else db.execute(
                    "SELECT mark FROM marks WHERE t>=? AND t<=? ORDER BY t DESC, rowid DESC LIMIT ?",
                    (from_s, to_s, limit),
                ).fetchall()
            )
        return [str(row[0]) for row in reversed(rows)]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        if not self._path.exists():
            yield None
            return
        db = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=BUSY_S, check_same_thread=False)
        try:
            yield db
        except sqlite3.Error as error:
            log.warning("%s cannot be read: %s", self._path, error)
            raise HistoryUnreadable(
                f"the history {self._path} cannot be read ({error}); `rm` it to begin a new one"
            ) from error
        finally:
            db.close()


class HistoryUnreadable(StateError):
    """The file is no history, or the disk fails."""

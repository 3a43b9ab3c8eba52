"""Every process writes its own log file; we only read them, so logging goes on when the arbiter is dead.

(A process whose log pipe closes dies of SIGPIPE: seen when an arbiter was killed.)
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import re
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from dynamo_local.errors import BadInput

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024 * 1024
KEPT = 3
KEPT_DAYS = 14.0
"""Nobody looks for what is older; and workers that were scaled away long ago would leave theirs for ever."""
TAIL_LINES = 20
TICK_S = 0.02
"""A file's time is that of the kernel's last tick: up to 10 ms behind the clock."""
_IS_LOG = re.compile(r"\.log(\.\d+)?$")
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")


class HasLogFile(Protocol):
    """A watcher's plan, as far as this module needs it."""

    @property
    def log_file(self) -> Path:
        """Where its output goes."""
        ...


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last `lines` lines, without reading a large file whole; empty if there is no file."""
    if lines <= 0:
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            block_bytes = 64 * 1024
            while True:
                file.seek(max(0, size - block_bytes))
                block = file.read(block_bytes)
                if block_bytes >= min(size, MAX_BYTES) or block.count(b"\n") > lines:
                    break
                block_bytes *= 4
    except FileNotFoundError:
        return []
    return [line.decode("utf-8", "replace") for line in block.splitlines()[-lines:]]


def kept_files(path: Path) -> list[Path]:
    """The log and what was rotated away of it, the oldest first."""
    numbered = [_numbered(path, n) for n in range(KEPT, 0, -1)]
    return [file for file in (*numbered, path) if file.exists()]


def last_lines(path: Path, lines: int) -> list[str]:
    """The last `lines` lines, also of earlier starts and of what was rotated away."""
    found: list[str] = []
    for file in reversed(kept_files(path)):
        found = tail(file, lines - len(found)) + found
        if len(found) >= lines:
            break
    return found


def lines_since(path: Path, since_s: float) -> Iterator[str]:
    """All lines of those kept files that were written to at or after `since_s` (since 1970)."""
    for file in kept_files(path):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < since_s:
                continue
            with file.open("rb") as opened:
                for line in opened:
                    yield line.rstrip(b"\r\n").decode("utf-8", "replace")


def log_tail(plan: HasLogFile) -> str:
    """The end of a worker's log, quoted."""
    lines = tail(plan.log_file)
    quoted = "\n".join(f"  | {line}" for line in lines) if lines else "  | (it wrote nothing)"
    return f"the end of its log, {plan.log_file}:\n{quoted}"


def rotate(path: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> bool:
    """Copy the file aside and truncate it, if it has outgrown `max_bytes`; True if it had.

    The writer keeps its descriptor (opened with O_APPEND), so it goes on at the new end: no signal, no pipe.
    Lines written between the copy and the truncation are lost; renaming would instead leave the writer on the
    old file for ever.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size < max_bytes:
        return False
    target = _make_room(path, kept)
    with path.open("rb") as source, open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    os.truncate(path, 0)
    return True


def set_aside(path: Path, *, kept: int = KEPT, max_bytes: int = MAX_BYTES) -> None:
    """Keep the old file as `.1`, so that a failed start never shows lines of the last run.

    The old file is appended to `.1` while both together are within `max_bytes`. So the log of the first start survives
    if a graph is started again and again.
    """
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return
    before = _numbered(path, 1)
    if before.exists() and before.stat().st_size + size <= max_bytes and _appended(path, before):
        path.unlink()
    else:
        os.replace(path, _make_room(path, kept))


def _appended(path: Path, earlier: Path) -> bool:
    """All of it, or nothing: on a full disk a log can still be renamed, and its writer must start all the same."""
    size = earlier.stat().st_size
    try:
        with path.open("rb") as source, earlier.open("ab") as end:
            shutil.copyfileobj(source, end, 1 << 20)
    except OSError as error:
        log.warning("%s cannot be appended to %s: %s", path, earlier, error)
        os.truncate(earlier, size)
        return False
    return True


def discard_old(folder: Path, current: Container[Path], now_s: float) -> None:
    """Remove logs that nobody has written to for `KEPT_DAYS`, but for those of processes of now (`current`)."""
    for file in folder.glob("*.log*"):
        if file in current or not _IS_LOG.search(file.name):
            continue
        with contextlib.suppress(OSError):
            if now_s - file.stat().st_mtime > KEPT_DAYS * 86_400.0:
                file.unlink()


def _make_room(path: Path, kept: int) -> Path:
    """Shift the kept files by one, so that `.1` is free; the oldest is removed."""
    for n in range(kept, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(_numbered(path, n - 1), _numbered(path, n))
    return _numbered(path, 1)


def _numbered(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def rotate_all(paths: Iterable[Path], *, max_bytes: int = MAX_BYTES) -> None:
    """`rotate` each. One that fails (a full disk) is logged, and tried again the next time."""
    for path in paths:
        try:
            rotate(path, max_bytes=max_bytes)
        except OSError as error:
            log.warning("%s has outgrown %d bytes and cannot be rotated: %s", path, max_bytes, error)


@dataclass(slots=True)
class Follower:
    """New whole lines of one growing file, from where it stood; survives truncation and replacement by rotation."""

    name: str
    path: Path
    offset: int = 0
    inode: int | None = None
    written_s: float = 0.0
    """When it was last written to, as far as we have looked; seconds since 1970."""
    _rest: bytes = field(default=b"", repr=False)

    def lines(self) -> list[str]:
        """Lines completed since the last call; a half-written last line waits."""
        try:
            # Most have not grown: opening all 66 files 7 times a second cost 0.3 % of a core (benchmarks).
            now = os.stat(self.path)
            if now.st_size < self.offset or self.inode not in (None, now.st_ino):
                self.offset, self._rest = 0, b""
            self.inode = now.st_ino
            if now.st_size == self.offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read()
        except OSError:  # not there yet, or no descriptor left for a moment: the next call tries again
            return []
        self.offset += len(block)
        *whole, self._rest = (self._rest + block).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]


class Interleaver:
    """Lines of several files with prefixes, for the foreground and for `dynamo logs -f`.

    Each `poll` gets the current files, so processes need no registration. Lines from before the first poll are left out
    for the files in `skip`, which were in use already.
    """

    def __init__(self) -> None:
        self._began_s = time.time() - TICK_S
        self._followers: dict[str, Follower] = {}

    def skip(self, files: Mapping[str, Path]) -> None:
        """Show nothing of what these hold now."""
        for name, path in files.items():
            self._followers[name] = _from_end(name, path)

    def poll(self, files: Mapping[str, Path]) -> list[tuple[str, str]]:
        """`(name, line)` for all that is new in these files, and the last words of those that were listed before."""
        for name, path in files.items():
            if name not in self._followers:
                self._followers[name] = self._begin(name, path)
        # A file that is no longer listed is still read. Its process wrote its last lines after it had left the list,
        # and another process of that name may come.
        return [(follower.name, line) for follower in self._followers.values() for line in follower.lines()]

    def _begin(self, name: str, path: Path) -> Follower:
        follower = _from_end(name, path)
        if follower.written_s >= self._began_s:
            follower.offset = 0
        return follower


def _from_end(name: str, path: Path) -> Follower:
    try:
        found = path.stat()
    except OSError:
        return Follower(name, path)
    return Follower(name, path, found.st_size, found.st_ino, found.st_mtime)


def colour_of(name: str, names: Iterable[str]) -> str:
    """A stable colour for a name among its fellows."""
    order = sorted(names)
    return COLOURS[order.index(name) % len(COLOURS)] if name in order else COLOURS[0]


# The lines of several processes' logs, merged by the time at which they were written.
#
# Each kind of process writes the time in a way of its own: ours `2026-03-01 14:05:21,123`, etcd
# `"ts":"2026-03-01T14:05:21.123Z"`, NATS `2026/03/01 14:05:21.123456`, vLLM `INFO 03-01 14:05:21`. A line without one
# belongs to the line before it.

LOOKED_AT = 96
"""Characters of a line in which its time is looked for: what follows is the message, which may have times, too."""
UNKNOWN_MAX = 1000
"""So many lines may come before the first that has a time."""

_DATED = re.compile(
    r"(?P<day>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<time>\d\d:\d\d:\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_VLLM = re.compile(r"^(?:\([^)]*\) )?[A-Z]+ (?P<day>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d) ")
_AGO = re.compile(r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?")


def written_at(line: str, now: datetime) -> float | None:
    """When the line was written, in seconds since 1970. None: the line has no time. Without a zone: local time.

    vLLM leaves the year out. The year is then the last one in which that day is not after `now`.
    """
    head = line[:LOOKED_AT]
    found = _DATED.search(head)
    if found is not None:
        fraction = float(f"0.{found['fraction']}") if found["fraction"] else 0.0
        whole = _seconds(found["day"].replace("/", "-"), found["time"], found["zone"] or "")
        return None if whole is None else whole + fraction
    found = _VLLM.match(head)
    if found is None:
        return None
    this_year = _seconds(f"{now.year}-{found['day']}", found["time"], "")
    if this_year is not None and this_year <= now.timestamp() + 86_400.0:
        return this_year
    return _seconds(f"{now.year - 1}-{found['day']}", found["time"], "")


@lru_cache(maxsize=64)
def _seconds(day: str, time: str, zone: str) -> float | None:
    """Cached: lines come many to a second."""
    try:
        return datetime.fromisoformat(f"{day}T{time}{zone}").timestamp()
    except (ValueError, OverflowError):  # the 31st of February
        return None


def timed(lines: Iterable[str], now: datetime, otherwise_s: float) -> Iterator[tuple[float, str]]:
    """Each line with its time: that of the line before it where it has none, of the next one for the first lines.

    `otherwise_s` is the time of lines in a file without any.
    """
    waiting: list[str] = []
    at_s: float | None = None
    for line in lines:
        found = written_at(line, now)
        at_s = at_s if found is None else found
        if at_s is None and len(waiting) < UNKNOWN_MAX:
            waiting.append(line)
            continue
        at_s = otherwise_s if at_s is None else at_s
        for earlier in waiting:
            yield at_s, earlier
        waiting.clear()
        yield at_s, line
    for earlier in waiting:
        yield otherwise_s, earlier


def merged(streams: Mapping[str, Iterable[tuple[float, str]]]) -> Iterator[tuple[str, str]]:
    """`(name, line)` of all streams by time. The lines of one stream keep their order, whatever their times say."""
    named = [_named(name, stream) for name, stream in streams.items()]
    for _, name, line in heapq.merge(*named, key=itemgetter(0)):
        yield name, line


def _named(name: str, stream: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str, str]]:
    return ((at_s, name, line) for at_s, line in stream)


def since(text: str, now: datetime) -> float:
    """`10m`, `1h30m`, `14:05`, `2026-03-01`, `2026-03-01 14:05:21`, `2026-03-01T14:05Z`: in seconds since 1970.

    A time without a day is the last one that has been. Raises `BadInput` for anything else.
    """
    word = text.strip()
    if re.match(r"\d", word) and (ago := _AGO.fullmatch(word)) is not None:
        d, h, m, s = (int(ago[unit] or 0) for unit in "dhms")
        try:
            return (now - timedelta(days=d, hours=h, minutes=m, seconds=s)).timestamp()
        except OverflowError:
            return 0.0
    try:
        if _CLOCK.fullmatch(word):
            at = datetime.combine(now.date(), datetime.strptime(word, _clock_format(word)).time())  # noqa: DTZ007 - local
            at = at.astimezone()
            return (at if at <= now else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        raise BadInput(
            f"--since {text}: say how long ago (90s, 10m, 2h, 1d, 1h30m) or when "
            "(14:05, 2026-03-01, '2026-03-01 14:05:21')"
        ) from None


def _clock_format(word: str) -> str:
    return "%H:%M:%S" if word.count(":") == 2 else "%H:%M"

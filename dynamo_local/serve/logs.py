"""Every process writes its own file; we only read them. Nobody depends on us to be alive in order to log.

(A process whose log pipe closes dies of SIGPIPE: seen when an arbiter was killed.)
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MAX_BYTES = 64 * 1024 * 1024
KEPT = 3
TAIL_LINES = 20
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")


class HasLogFile(Protocol):
    """A watcher's plan, as far as this module needs it."""

    @property
    def log_file(self) -> Path: ...


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last `lines` lines, without reading a large file whole; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=lines))


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
        while block := source.read(1 << 20):
            copy.write(block)
    os.truncate(path, 0)
    return True


def set_aside(path: Path, *, kept: int = KEPT) -> None:
    """Begin a file anew, as `.1` the old one is kept: what a failed start shows must not be the last run's.

    Only before its writer starts.
    """
    if path.exists() and path.stat().st_size:
        os.replace(path, _make_room(path, kept))


def _make_room(path: Path, kept: int) -> Path:
    """`.1` is free after this; the oldest kept one is gone."""
    for n in range(kept, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(path.with_name(f"{path.name}.{n - 1}"), path.with_name(f"{path.name}.{n}"))
    return path.with_name(f"{path.name}.1")


@dataclass(slots=True)
class Follower:
    """New whole lines of one growing file, from where it stood; survives truncation by rotation."""

    name: str
    path: Path
    offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def lines(self) -> list[str]:
        """Lines completed since the last call; a half-written last line waits."""
        try:
            # Most have grown by nothing: opening 66 files for that, 7 times a second, was 0.3 % of a core (benchmarks).
            size = os.stat(self.path).st_size
            if size < self.offset:
                self.offset, self._rest = 0, b""
            if size == self.offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(block)
        *whole, self._rest = (self._rest + block).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]


class Interleaver:
    """Lines of several files with prefixes, for the foreground and for `dynamo logs -f`."""

    def __init__(self, *, from_end: bool = False) -> None:
        self._from_end = from_end
        self._followers: dict[str, Follower] = {}

    def watch(self, name: str, path: Path) -> None:
        """Follow one more file; a name that is followed already is left alone."""
        if name not in self._followers:
            start = path.stat().st_size if self._from_end and path.exists() else 0
            self._followers[name] = Follower(name, path, start)

    def poll(self) -> Iterator[tuple[str, str]]:
        """`(name, line)` for all that is new."""
        for follower in self._followers.values():
            for line in follower.lines():
                yield follower.name, line

    @property
    def names(self) -> list[str]:
        return list(self._followers)


def colour_of(name: str, names: Iterable[str]) -> str:
    """A stable colour for a name among its fellows."""
    order = sorted(names)
    return COLOURS[order.index(name) % len(COLOURS)] if name in order else COLOURS[0]

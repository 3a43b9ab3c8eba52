"""How a start, a run and a leave look: to a person at a terminal, to a log, and to the parent of `--detach`."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from dynamo_local.serve.logs import colour_of

_BOOT = "boot-"
_BOOT_YOUNG_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One process in the display. `since_s` is how long it has been in this state."""

    name: str
    state: str
    gpus: str
    since_s: float
    note: str = ""


class View(Protocol):
    """Where the supervisor tells what happens. Calls are cheap and never raise.

    `wants_logs` says whether `log_line` does anything: the files need not be read otherwise.
    """

    wants_logs: bool

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        """The processes as they are now."""
        ...

    def event(self, text: str) -> None:
        """One thing that happened, in words."""
        ...

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        """A line that a process wrote."""
        ...

    def ready(self, facts: dict[str, Any]) -> None:
        """Everything is ready."""
        ...

    def failed(self, message: str, exit_code: int) -> None:
        """The start failed; all that was started is being ended."""
        ...

    def close(self) -> None: ...


class PlainView:
    """Lines on a stream: for pipes, files and systemd's journal."""

    def __init__(self, stream: TextIO | None = None, *, logs: bool = True) -> None:
        self._stream = stream or sys.stdout
        self.wants_logs = logs
        self._told: dict[str, str] = {}

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._told.get(row.name) != row.state:
                self._told[row.name] = row.state
                gpus = f" on GPU {row.gpus}" if row.gpus else ""
                self._write(f"{row.name}: {row.state}{gpus}{f' ({row.note})' if row.note else ''}")

    def event(self, text: str) -> None:
        self._write(text)

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        if self.wants_logs:
            self._write(f"[{name}] {line}")

    def ready(self, facts: dict[str, Any]) -> None:
        self._write(f"ready: {facts.get('frontend_url') or facts['namespace']}")

    def failed(self, message: str, exit_code: int) -> None:
        print(f"dynamo: {message}", file=sys.stderr)  # noqa: T201  the CLI's error channel

    def close(self) -> None:
        return None


class TerminalView:
    """A live table while things start or leave; coloured, prefixed log lines otherwise."""

    wants_logs = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._live: Any = None

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        from rich.live import Live
        from rich.table import Table

        if all(row.state in ("ready", "exited") for row in rows):
            self._stop_live()
            return
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("process", "state", "GPU", "for", ""):
            table.add_column(column)
        for row in rows:
            table.add_row(row.name, row.state, row.gpus, f"{row.since_s:.1f} s", row.note)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, text: str) -> None:
        self._console.print(text, style="bold", markup=False)

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble((f"[{name}] ", colour_of(name, names)), line))

    def ready(self, facts: dict[str, Any]) -> None:
        self._stop_live()
        url = facts.get("frontend_url")
        self._console.print(f"ready{f': {url}/v1' if url else ''}  (Ctrl-C leaves gracefully)", style="bold green")

    def failed(self, message: str, exit_code: int) -> None:
        self._stop_live()
        print(f"dynamo: {message}", file=sys.stderr)  # noqa: T201  the CLI's error channel

    def close(self) -> None:
        self._stop_live()


class BootReport:
    """JSON lines in a private file, by which a detached arbiter tells `dynamo serve --detach` how it goes."""

    wants_logs = False

    def __init__(self, path: Path) -> None:
        self._plain = PlainView(logs=False)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(fd, "w")

    def _write(self, kind: str, **facts: Any) -> None:
        if not self._file.closed:
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **facts}, default=str) + "\n")
            self._file.flush()

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        self._plain.rows(title, rows)
        self._write("rows", title=title, rows=[asdict(row) for row in rows])

    def event(self, text: str) -> None:
        self._plain.event(text)
        self._write("event", text=text)

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        """The process's own file has it."""

    def ready(self, facts: dict[str, Any]) -> None:
        self._plain.ready(facts)
        self._write("ready", facts=facts)
        self._file.close()

    def failed(self, message: str, exit_code: int) -> None:
        self._plain.failed(message, exit_code)
        self._write("failed", message=message, exit_code=exit_code)

    def close(self) -> None:
        self._file.close()


def new_boot_report(folder: Path) -> tuple[int, Path]:
    """A new file for a `BootReport`, locked while its reader (we) lives. Close the descriptor, then remove the file.

    What a reader that was killed has left in the folder goes first: nobody else would ever remove it.
    """
    for path in folder.glob(f"{_BOOT}*.jsonl"):
        _remove_unread(path)
    fd, name = tempfile.mkstemp(prefix=_BOOT, suffix=".jsonl", dir=folder)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd, Path(name)


def errors_beside(boot_report: Path) -> Path:
    """Where what the arbiter writes to stderr goes meanwhile."""
    return boot_report.with_suffix(".err")


def _remove_unread(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # its reader has just removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size == 0 and time.time() - os.fstat(fd).st_mtime < _BOOT_YOUNG_S:
            return  # between its making and its lock
        path.unlink(missing_ok=True)
        errors_beside(path).unlink(missing_ok=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


def open_view(*, detached: bool, boot_report: Path) -> View:
    """The view that fits where our output goes."""
    if detached:
        return BootReport(boot_report)
    return TerminalView() if sys.stdout.isatty() else PlainView()

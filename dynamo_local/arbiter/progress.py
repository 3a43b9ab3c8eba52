"""Shows a start, a run and its end: on a terminal, in a log, or to the parent of `--detach`. It also rotates logs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.system.executors import FILES, CallOverdue
from dynamo_local.system.log_files import Interleaver, colour_of, discard_old, rotate_all

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One process in the display. `since_s` is how long it has been in this state."""

    name: str
    state: str
    gpus: str
    since_s: float
    note: str = ""


class View(Protocol):
    """The display of a supervisor. Calls are cheap. `LastingView` makes sure that they never raise."""

    @property
    def wants_logs(self) -> bool:
        """Whether `log_line` has an effect. If not, the log files need not be read."""
        ...

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
        self._shown: dict[str, str] = {}

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._shown.get(row.name) != row.state:
                self._shown[row.name] = row.state
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
    """JSON lines by which a detached arbiter reports to `dynamo serve --detach`.

    `when_ready` is called after the last line. Nobody reads our output from then on.
    """

    wants_logs = False

    def __init__(self, path: Path, when_ready: Callable[[], None]) -> None:
        self._plain = PlainView(logs=False)
        self._when_ready = when_ready
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
        """Ignored: the process's own log file has the line."""

    def ready(self, facts: dict[str, Any]) -> None:
        self._plain.ready(facts)
        self._write("ready", facts=facts)
        self._file.close()
        self._when_ready()

    def failed(self, message: str, exit_code: int) -> None:
        self._plain.failed(message, exit_code)
        self._write("failed", message=message, exit_code=exit_code)

    def close(self) -> None:
        self._file.close()


class LastingView:
    """A view that survives its output: a closed terminal, a broken pipe, a full disk.

    After the first failure our output goes nowhere, because later prints would fail in the same way.
    """

    def __init__(self, view: View, silence: Callable[[], None]) -> None:
        self._view: View | None = view
        self._silence = silence

    @property
    def wants_logs(self) -> bool:
        """False once the output is gone."""
        return self._view is not None and self._view.wants_logs

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        self._show(lambda view: view.rows(title, rows))

    def event(self, text: str) -> None:
        self._show(lambda view: view.event(text))

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        self._show(lambda view: view.log_line(name, line, names))

    def ready(self, facts: dict[str, Any]) -> None:
        self._show(lambda view: view.ready(facts))

    def failed(self, message: str, exit_code: int) -> None:
        self._show(lambda view: view.failed(message, exit_code))

    def close(self) -> None:
        self._show(lambda view: view.close())

    def _show(self, show: Callable[[View], None]) -> None:
        if self._view is None:
            return
        try:
            show(self._view)
        except (OSError, ValueError) as error:  # ValueError: its file is closed
            self._view = None
            log.warning("nothing is shown any more, the run goes on: %s", error)
            self._silence()


def silence_output() -> None:
    """Send stdout and stderr to nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def open_view(boot_report: Path | None = None) -> View:
    """The view for the present output. A detached run has a boot report."""
    if boot_report is not None:
        return LastingView(BootReport(boot_report, silence_output), silence_output)
    return LastingView(TerminalView() if sys.stdout.isatty() else PlainView(), silence_output)


log = logging.getLogger(__name__)

LOG_POLL_S, QUIET_LOG_POLL_S = 0.15, 1.0
"""How often 66 log files are read: while they grow, and after a quiet time."""
ROTATE_EVERY_S = 30.0
OF_THE_RUN = ("_arbiter", "_guardian")
"""Logs of the run itself, which may be written to seldom."""
LOGS_DEADLINE_S = 10.0
ROTATE_DEADLINE_S = 120.0
"""Many files of 64 MiB may have to be copied at once."""


class ShownLogs:
    """Shows the lines that workers log, and rotates all log files.

    `names` are the present workers. `rows` updates the display. Lines of `servers` (etcd and NATS) are not shown: their
    files have them.
    """

    def __init__(
        self,
        view: View,
        clock: Clock,
        names: Callable[[], Iterable[str]],
        servers: Callable[[], Iterable[str]],
        log_file: Callable[[str], Path],
        rows: Callable[[], None],
    ) -> None:
        self._view = view
        self._clock = clock
        self._names = names
        self._servers = servers
        self._log_file = log_file
        self._rows = rows
        self._logs = Interleaver()
        self._known: dict[str, Path] = {}

    def skip_to_end(self) -> None:
        """Do not show lines from before now."""
        self._logs.skip(self._files())

    async def run(self, *, changing: Callable[[], bool]) -> None:
        """Read and rotate until cancelled, in threads. The display is updated while `changing()`."""
        rotated_s = self._clock.now_s()
        every_s = LOG_POLL_S
        while True:
            await sleep_to_next(self._clock, every_s)
            files = self._files()
            lines = await self._read(files) if self._view.wants_logs else []
            for name, line in lines:
                self._view.log_line(name, line, list(files))
            busy = changing()
            every_s = LOG_POLL_S if lines or busy else min(every_s * 1.5, QUIET_LOG_POLL_S)
            if busy:
                self._rows()
            if self._clock.now_s() - rotated_s > ROTATE_EVERY_S:
                rotated_s = self._clock.now_s()
                await self._rotate([*files.values(), *map(self._log_file, self._servers())])

    def _files(self) -> dict[str, Path]:
        """The log file of each worker. Paths are kept, because this is called several times a second."""
        self._known = {name: self._known.get(name) or self._log_file(name) for name in self._names()}
        return self._known

    async def _read(self, files: Mapping[str, Path]) -> list[tuple[str, str]]:
        try:
            return await FILES.run(partial(self._logs.poll, files), LOGS_DEADLINE_S, what="reading the logs")
        except CallOverdue as error:
            log.warning("%s", error)
            return []

    async def _rotate(self, current: list[Path]) -> None:
        def rotate() -> None:
            rotate_all(current)
            for folder in {file.parent for file in current}:
                ours = {folder / each.name for each in folder.glob("*.log") if each.stem.endswith(OF_THE_RUN)}
                discard_old(folder, ours.union(current), time.time())

        try:
            await FILES.run(rotate, ROTATE_DEADLINE_S, what="rotating the logs")
        except CallOverdue as error:
            log.warning("%s", error)

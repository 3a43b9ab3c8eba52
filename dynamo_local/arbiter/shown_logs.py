"""What a run shows while it goes: the display of a start, the lines that processes log, and their files' rotation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from dynamo_local.arbiter.progress import View
from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.system.executors import FILES, CallOverdue
from dynamo_local.system.log_files import Interleaver, discard_old, rotate_all

log = logging.getLogger(__name__)

LOG_POLL_S, QUIET_LOG_POLL_S = 0.15, 1.0
"""How often 66 log files are looked at while there is something in them, and when for a while there was not."""
ROTATE_EVERY_S = 30.0
OF_THE_RUN = ("_arbiter", "_guardian")
"""Whose logs are not among the names, and may be written to seldom."""
LOGS_DEADLINE_S = 10.0
ROTATE_DEADLINE_S = 120.0
"""Many files of 64 MiB may have to be copied at once."""


class ShownLogs:
    """`names` are the workers of now, also those that were added later; `rows` shows them in the display.

    `servers` are etcd and NATS, whose lines nobody who serves a model wants between his own: their files have them.
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
        """What was logged until now is not shown."""
        self._logs.skip(self._files())

    async def run(self, *, changing: Callable[[], bool]) -> None:
        """For ever. Reads files only, in a thread. While `changing()` the display is kept up to date."""
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
        """The log file of each worker. Asked several times a second: 64 paths are not made anew each time."""
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

"""TensorBoard's event files, written in a thread: a slow or full disk loses points and never blocks the arbiter.

This uses `EventsWriter`, not `SummaryWriter`. The latter passes points to its own thread through a queue that blocks
when full, and that thread dies silently at the first `OSError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.errors import ConfigError, how_to_install
from dynamo_local.planner.records import figures
from dynamo_local.planner.records.decision_log import DecisionRecord
from dynamo_local.planner.values import Observation

log = logging.getLogger(__name__)

CAPACITY = 4096
"""Groups of points that may wait for the disk: over an hour of pulls. Later ones are dropped and counted."""

FLUSH_S = 2.0
"""The age at which a point must be visible in the file."""

RETRY_S = 10.0
"""After a failed write all points are dropped for this long. Then a new file begins."""

CLOSE_S = 2.0
_FILES = itertools.count(1)

_Group = tuple[Mapping[str, float], int, float]


def available() -> bool:
    """Whether the extra `tensorboard` is installed."""
    return find_spec("tensorboardX") is not None


def missing_library(log_dir: Path | None) -> str | None:
    """The install hint if `log_dir` is given and the extra is not installed, else None."""
    if log_dir is None or available():
        return None
    return (
        f"no TensorBoard files are written to {log_dir}: they need the extra `tensorboard`; "
        f"{how_to_install('tensorboard')}. The decision log is written as always"
    )


def folder_for(log_dir: Path | None, *, base: Path, logs: Path, now: datetime) -> Path | None:
    """The folder for the scalars of a planner that starts `now`: `log_dir`, below `base` if it is relative.

    Without `log_dir` it is `tensorboard/<MMDD_HHMMSS>` in the run's own log folder. Dynamo's `logs/<MMDD_HHMMSS>` would
    be in whatever folder the arbiter was started from. It is None if the extra is not installed.
    """
    if not available():
        return None
    return logs / "tensorboard" / f"{now:%m%d_%H%M%S}" if log_dir is None else base / log_dir


class ScalarFile:
    """A folder's event file, open for points. Making one blocks (import, disk). Raises `ConfigError`.

    `dropped` counts the points that never reached the disk.
    """

    def __init__(self, folder: Path, *, capacity: int = CAPACITY, retry_s: float = RETRY_S) -> None:
        self.folder = folder
        self.dropped = 0
        self._retry_s = retry_s
        self._waiting: queue.Queue[_Group | None] = queue.Queue(capacity)
        self._unflushed = 0
        self._flushed_s = time.monotonic()
        self._broken_s: float | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: Any = _open(folder)
        except OSError as error:
            raise ConfigError(f"Planner: log_dir: {folder} cannot be written to: {error}") from error
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, points: Mapping[str, float], *, step: int, wall_s: float) -> None:
        """Add the points of one moment. Never waits.

        `step` is seconds since the planner's start, `wall_s` seconds since 1970.
        """
        if not points or self._closed:
            return
        try:
            self._waiting.put_nowait((points, step, wall_s))
        except queue.Full:
            self.dropped += len(points)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the waiting points, within the timeout. Blocks, so call it in a thread."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning("TensorBoard's last points are not on disk yet (%s)", self.folder)

    # --- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                group = self._waiting.get(timeout=FLUSH_S if self._unflushed else None)
            except queue.Empty:
                self._guarded(self._flush)
                continue
            if group is None:
                if self._file is not None:
                    self._guarded(lambda: self._file.close())
                return
            if self._broken_s is None or time.monotonic() - self._broken_s >= self._retry_s:
                self._unflushed += len(group[0])
                self._guarded(partial(self._write, group))
            else:
                self.dropped += len(group[0])

    def _write(self, group: _Group) -> None:
        if self._file is None:
            self._file, self._broken_s = _open(self.folder), None
        self._file.write_event(_event(*group))
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._file.flush()
        self._unflushed, self._flushed_s = 0, time.monotonic()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work`. After an OSError drop the file and its unflushed points. A new file begins later."""
        try:
            work()
        except OSError as error:
            log.warning("TensorBoard's points in %s are dropped for %g s: %s", self.folder, self._retry_s, error)
            self.dropped += self._unflushed
            self._unflushed, self._broken_s = 0, time.monotonic()
            broken, self._file = self._file, None
            if broken is not None:
                with contextlib.suppress(OSError):  # an unwritable file cannot be closed cleanly
                    broken.close()


def _open(folder: Path) -> Any:
    from tensorboardX.event_file_writer import EventsWriter

    # The suffix makes the name unique: two files of one second would overwrite each other.
    return EventsWriter(str(folder / "events"), f".{os.getpid()}.{next(_FILES)}")


def _event(points: Mapping[str, float], step: int, wall_s: float) -> Any:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in points.items()]
    return Event(wall_time=wall_s, step=step, summary=Summary(value=values))


class Board:
    """Writes a planner's TensorBoard scalars from `open` to `close`. A `PlannerObserver`.

    `base` is the folder that a relative log_dir is in, `logs` the run's own.
    """

    def __init__(self, base: Path, logs: Path, clock: Clock, tell: Callable[[str], None]) -> None:
        self._base = base
        self._logs = logs
        self._clock = clock
        self._tell = tell
        self._log_dir: Path | None = None
        self._file: ScalarFile | None = None
        self._began_s = 0.0
        self._dropped_before = 0

    @property
    def folder(self) -> Path | None:
        """The folder of the scalars. None while there is none."""
        return None if self._file is None else self._file.folder

    @property
    def dropped(self) -> int:
        """Points that never reached the disk, in all files so far."""
        return self._dropped_before + (0 if self._file is None else self._file.dropped)

    async def open(self, log_dir: Path | None) -> None:
        """The planner starts, or its log_dir changes. Raises `ConfigError`. The old file then stays open."""
        if self._file is not None and log_dir == self._log_dir:
            return
        now = datetime.fromtimestamp(self._clock.wall_s()).astimezone()
        if (why := missing_library(log_dir)) is not None:
            self._tell(why)
        folder = folder_for(log_dir, base=self._base, logs=self._logs, now=now)
        try:
            file = None if folder is None else await asyncio.to_thread(ScalarFile, folder)
        except ConfigError as error:
            if log_dir is not None:
                raise
            self._tell(f"no TensorBoard scalars: {error}")  # no log_dir was named: no reason to fail
            file = None
        await self.close()
        self._file, self._log_dir, self._began_s = file, log_dir, self._clock.now_s()

    async def close(self) -> None:
        """Write the buffered points, and close the file."""
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(file.close)
            self._dropped_before += file.dropped

    def on_observation(self, observation: Observation) -> None:
        if self._file is not None:
            points = figures.of_reading(observation.reading, observation.pools)
            self._file.add(points, step=self._second(observation.at_s), wall_s=self._clock.wall_s())

    def on_decision(self, record: DecisionRecord) -> None:
        if self._file is not None:
            points = figures.of_decision(record.decision.reasons, record.inputs.fleet)
            self._file.add(points, step=self._second(record.decision.now_s), wall_s=record.wall_s)

    def _second(self, at_s: float) -> int:
        return max(0, int(at_s - self._began_s))

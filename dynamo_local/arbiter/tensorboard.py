"""TensorBoard's event files, written in a thread: a slow or full disk costs points, never the arbiter's loop.

It uses `EventsWriter`, not `SummaryWriter`. A `SummaryWriter` hands points to a thread of its own by a queue that
blocks when full, and dies silently of the first `OSError`.
"""

from __future__ import annotations

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

from dynamo_local.errors import ConfigError, how_to_install

log = logging.getLogger(__name__)

CAPACITY = 4096
"""Groups of points that wait for the disk: over an hour of pulls. Past it new ones are dropped, and counted."""

FLUSH_S = 2.0
"""How old a point may be before a reader of the file sees it."""

RETRY_S = 10.0
"""After a failed write everything is dropped for so long, then a new file is begun."""

CLOSE_S = 2.0
_FILES = itertools.count(1)

_Group = tuple[Mapping[str, float], int, float]


def available() -> bool:
    """The extra `tensorboard` is installed."""
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
    """The folder of the scalars of a planner that starts `now`: `log_dir`, below `base` if it is relative.

    The default is `tensorboard/<MMDD_HHMMSS>` in the log folder of the run. Dynamo's `logs/<MMDD_HHMMSS>` would be in
    the folder from which the arbiter was started. None if the extra is not installed.
    """
    if not available():
        return None
    return logs / "tensorboard" / f"{now:%m%d_%H%M%S}" if log_dir is None else base / log_dir


class ScalarFile:
    """A folder's event file, open for points. Making one blocks (import, disk); raises `ConfigError`.

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
        """Points of one moment: `step` is seconds since the planner's start, `wall_s` since 1970. Never waits."""
        if not points or self._closed:
            return
        try:
            self._waiting.put_nowait((points, step, wall_s))
        except queue.Full:
            self.dropped += len(points)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits, within the time-out. Blocks: call it in a thread."""
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
        """Run `work`; after an OSError drop the open file and its unflushed points. A new file is begun later."""
        try:
            work()
        except OSError as error:
            log.warning("TensorBoard's points in %s are dropped for %g s: %s", self.folder, self._retry_s, error)
            self.dropped += self._unflushed
            self._unflushed, self._broken_s = 0, time.monotonic()
            broken, self._file = self._file, None
            if broken is not None:
                with contextlib.suppress(OSError):  # what could not be written cannot be written now
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

"""Whether a namespace's arbiter lives. A live run that is taken for a dead one loses all of its streams.

There are two witnesses, which do not depend on a shell's variables. One is the lock beside the statefile. The other is
the pid in the statefile, with its start time. One of them is enough. The lock file may have been deleted, or may be
another release's. The pid means nothing to a container with processes of its own.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dynamo_local.errors import NamespaceBusy, StateError
from dynamo_local.state.raw import read_raw
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive

# The namespace lock: one arbiter per namespace, by a kernel lock that the arbiter holds for its whole life.
#
# Two circus arbiters on one control socket silently take each other's messages. The lock is taken before any socket is
# bound. The kernel frees it within a millisecond after its holder was killed.

GUARDIAN = "the guardian, ending what a killed arbiter left behind"
"""How a guardian at work describes itself."""
GUARDIAN_PATIENCE_S = 15.0
PROBED_S = 0.1
"""Asking whether the lock is held takes it for a moment: wait this long before refusing."""
_POLL_S = 0.02


def _info_file(lock: Path) -> Path:
    return lock.with_suffix(".owner")


def acquire(lock: Path, namespace: str, what: str) -> FileLock:
    """Take the namespace or raise `NamespaceBusy`, which says who runs it. `what` describes us to others.

    A guardian at work is waited for: it is done in a moment.
    """
    held = FileLock(lock, mode=0o600)
    if not _acquired(held, PROBED_S):
        patience_s = GUARDIAN_PATIENCE_S if GUARDIAN in holder(lock) and what != GUARDIAN else 0.0
        if not _acquired(held, patience_s):
            raise busy(namespace, holder(lock))
    try:
        _info_file(lock).write_text(f"pid {os.getpid()} ({what})")
    except OSError:
        release(held)
        raise
    return held


def busy(namespace: str, holder: str) -> NamespaceBusy:
    """The refusal where `holder` runs the namespace."""
    return NamespaceBusy(
        f"namespace {namespace!r} is run by {holder}; use `dynamo status -n {namespace}`, "
        f"`dynamo down -n {namespace}`, or another --namespace"
    )


def _acquired(held: FileLock, timeout_s: float) -> bool:
    try:
        held.acquire(timeout=timeout_s, poll_interval=_POLL_S)
    except Timeout:
        return False
    return True


def release(held: FileLock) -> None:
    """Give the namespace back; the owner's text goes first, so that nobody reads a dead owner's."""
    _info_file(Path(held.lock_file)).unlink(missing_ok=True)
    held.release()


def holder(lock: Path) -> str:
    """The holder of the lock, in words."""
    try:
        return _info_file(lock).read_text() or "another process"
    except FileNotFoundError:
        return "another process"


def forget_dead_owner(lock: Path) -> None:
    """Remove the text of an owner that was killed: nobody holds the lock any more."""
    if not is_held(lock):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # its folder may be gone, or be a file
            _info_file(lock).unlink()


def is_held(lock: Path) -> bool:
    """True while an arbiter lives. Leaves nothing behind."""
    if not lock.exists():
        return False
    probe = FileLock(lock, mode=0o600)
    try:
        probe.acquire(timeout=0)
    except Timeout:
        return True
    probe.release()
    return False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The arbiter of a run, by its statefile. `pid` is None if that arbiter is gone."""

    run_id: str
    pid: int | None


def recorded(paths: Paths) -> Recorded | None:
    """The arbiter that the statefile names. None: no readable statefile."""
    try:
        raw = read_raw(paths.statefile)
    except StateError:
        return None
    pid, started_s = raw.get("arbiter_pid"), raw.get("arbiter_start_time")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(started_s, int | float) or not is_alive(pid, started_s):
        pid = None
    return Recorded(str(raw.get("run_id")), pid)


def lives(paths: Paths) -> bool:
    """An arbiter answers for the namespace (or a guardian, or a `dynamo down` in its place, is at work)."""
    return is_held(paths.lock) or arbiter_pid(paths) is not None


def arbiter_pid(paths: Paths) -> int | None:
    """The live arbiter's, by the statefile."""
    run = recorded(paths)
    return None if run is None else run.pid


def who(paths: Paths) -> str:
    """The arbiter of the namespace, in words."""
    if is_held(paths.lock):
        return holder(paths.lock)
    pid = arbiter_pid(paths)
    return "another process" if pid is None else f"pid {pid} (as {paths.statefile} says)"


def claim(paths: Paths, what: str) -> FileLock:
    """Take the namespace, or raise `NamespaceBusy`, which says who runs it. `what` describes us to others."""
    held = acquire(paths.lock, paths.namespace, what)
    if arbiter_pid(paths) is None:
        return held
    release(held)
    raise busy(paths.namespace, who(paths))

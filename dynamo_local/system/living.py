"""Whether a namespace's arbiter lives. A live run that is taken for a dead one loses all of its streams.

Two witnesses, neither of which depends on the variables of a shell: the lock beside the statefile, and the pid with its
start time that the statefile names. One is enough: the lock file may have been deleted, or be another release's; the
pid means nothing to a container with processes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from filelock import FileLock

from dynamo_local.errors import StateError
from dynamo_local.state.raw import read_raw
from dynamo_local.system import lock
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive


@dataclass(frozen=True, slots=True)
class Recorded:
    """Who answers for a run, by its statefile. `pid` is None where the arbiter that it names is gone."""

    run_id: str
    pid: int | None


def recorded(paths: Paths) -> Recorded | None:
    """What the statefile says; None where there is none that can be read."""
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
    return lock.is_held(paths.lock) or arbiter_pid(paths) is not None


def arbiter_pid(paths: Paths) -> int | None:
    """The live arbiter's, by the statefile."""
    run = recorded(paths)
    return None if run is None else run.pid


def who(paths: Paths) -> str:
    """Who answers for the namespace, in words."""
    if lock.is_held(paths.lock):
        return lock.holder(paths.lock)
    pid = arbiter_pid(paths)
    return "another process" if pid is None else f"pid {pid} (as {paths.statefile} says)"


def claim(paths: Paths, what: str) -> FileLock:
    """Take the namespace, or raise `NamespaceBusy`, which says who runs it. `what` describes us to others."""
    held = lock.acquire(paths.lock, paths.namespace, what)
    if arbiter_pid(paths) is None:
        return held
    lock.release(held)
    raise lock.busy(paths.namespace, who(paths))

"""The marks that identify the processes of a run: variables in their environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_local.core.prewarmed import is_prewarmed
from dynamo_local.core.types import watcher_name
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive, parent_and_session, start_time_s

SERVERS = ("nats", "etcd")
"""The order in which they end: NATS clients may still look something up."""
GUARDIAN = "guardian"


@dataclass(frozen=True, slots=True)
class MarkedProcess:
    """A live process whose environment names this namespace."""

    pid: int
    started_s: float
    name: str
    run_id: str
    is_worker: bool
    """Whether it is the worker's own process (a component's, or a command's runner), not a child of it."""
    arbiter: int | None = None
    """A guardian's live arbiter, by pid."""


def guardian_marks(arbiter_pid: int) -> dict[str, str]:
    """The variables by which a guardian names its arbiter, for readers without a statefile."""
    return {"DYN_ARBITER_PID": str(arbiter_pid), "DYN_ARBITER_START_TIME": str(start_time_s(arbiter_pid) or 0.0)}


def marks(namespace: str, statefile: Path, run_id: str, name: str) -> dict[str, str]:
    """The environment by which `marked` finds a process again."""
    return {
        "DYN_NAMESPACE": namespace,
        "DYN_STATEFILE": str(statefile),
        "DYN_RUN_ID": run_id,
        "DYN_WATCHER_NAME": name,
    }


def marked(paths: Paths) -> list[MarkedProcess]:
    """Our live processes with the namespace's marks, without this process and its ancestors."""
    statefile, own_sessions = os.path.realpath(paths.statefile), {}
    found: list[MarkedProcess] = []
    for pid, env in environments(paths.namespace):
        started_s, name, around = start_time_s(pid), env.get("DYN_WATCHER_NAME"), parent_and_session(pid)
        if started_s is None or name is None or around is None:
            continue
        if os.path.realpath(env.get("DYN_STATEFILE", "")) != statefile:
            continue
        parent, session = around
        if session == pid:
            own_sessions[pid] = parent
        arbiter = _arbiter_named(env)
        found.append(MarkedProcess(pid, started_s, name, env.get("DYN_RUN_ID", ""), is_worker=False, arbiter=arbiter))
    return _with_workers(found, own_sessions, paths.namespace)


def environments(namespace: str | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Pid and environment of every process of ours that is marked with the namespace, whatever its statefile.

    Without a namespace: with any.
    """
    needle = (f"\0DYN_NAMESPACE={namespace}\0" if namespace else "\0DYN_WATCHER_NAME=").encode()
    ancestors = ourselves()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            if needle not in environ or pid in ancestors or os.stat(f"/proc/{pid}").st_uid != os.getuid():
                continue
        except OSError:
            continue  # it is gone, or of another user
        # Decoded like names of the file system: a path that is no UTF-8 must equal itself.
        yield pid, dict(item.split("=", 1) for item in os.fsdecode(environ).split("\0") if "=" in item)


def _arbiter_named(env: Mapping[str, str]) -> int | None:
    """The pid of the live arbiter that a guardian's environment names. None without one, or if it is dead."""
    try:
        pid, started_s = int(env["DYN_ARBITER_PID"]), float(env["DYN_ARBITER_START_TIME"])
    except (KeyError, ValueError):
        return None
    return pid if is_alive(pid, started_s) else None


def guarded_arbiter(found: Iterable[MarkedProcess]) -> int | None:
    """The live arbiter that a guardian among them watches, by pid. This works without lock and statefile, too."""
    return next((each.arbiter for each in found if each.arbiter is not None), None)


def statefiles_elsewhere(paths: Paths) -> list[Path]:
    """Other statefiles of our live runs in a namespace of the same name.

    A shell with another `DYN_LOCAL_STATE_DIR` or home started those runs.
    """
    named = {os.path.realpath(env.get("DYN_STATEFILE", "/")) for _, env in environments(paths.namespace)}
    return [Path(path) for path in sorted(named - {"/", os.path.realpath(paths.statefile)})]


def _with_workers(
    found: Sequence[MarkedProcess], own_sessions: Mapping[int, int], namespace: str
) -> list[MarkedProcess]:
    """Mark the workers among them. Each process that an arbiter starts leads a session of its own.

    A worker's child inherits its marks and may begin a session, too. Then its parent has the same marks. `own_sessions`
    maps each leader to its parent. A command line would tell less, because a command's may be anything.
    """
    servants = household(namespace)
    of_worker = {(process.pid, process.name, process.run_id) for process in found}

    def is_worker(process: MarkedProcess) -> bool:
        parent = own_sessions.get(process.pid)
        inherited = (parent, process.name, process.run_id) in of_worker
        prewarmed = is_prewarmed(process.name, namespace)
        return parent is not None and not inherited and process.name not in servants and not prewarmed

    return [replace(process, is_worker=is_worker(process)) for process in found]


def household(namespace: str) -> frozenset[str]:
    """Names of a run's processes beside its workers: the embedded servers and the guardian."""
    return frozenset(watcher_name(namespace, kind) for kind in (*SERVERS, GUARDIAN))


def ourselves() -> set[int]:
    """This process and its ancestors: somebody may type `dynamo serve` in a worker's own shell."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found

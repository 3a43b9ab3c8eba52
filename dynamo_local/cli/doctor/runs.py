"""Reads ports, namespaces, and what dead runs left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from dynamo_local.arbiter.marks import GUARDIAN, environments, guarded_arbiter, marked
from dynamo_local.cli.common import DEFAULT_NAMESPACE
from dynamo_local.cli.ls import begun, look
from dynamo_local.core.doctor.runs import Orphans, Port, SeenRun, SocketPath, Statefile
from dynamo_local.core.types import namespace_fault, watcher_name
from dynamo_local.errors import StateError
from dynamo_local.state.raw import namespaces, read_raw
from dynamo_local.system.host_leases import is_free
from dynamo_local.system.liveness import is_held, lives
from dynamo_local.system.paths import IPC_PATH_MAX, Paths, runtime_root


def runs(env: Mapping[str, str]) -> tuple[SeenRun, ...]:
    """All namespaces of this user, as `dynamo ls` sees them. `statefiles` tells of broken statefiles."""
    broken = {each.namespace for each in statefiles(env) if each.fault is not None}
    found = (look(Paths.found(namespace, env)) for namespace in begun(env) if namespace not in broken)
    return tuple(SeenRun(run.namespace, run.state, run.note or "") for run in found if run is not None)


def statefiles(env: Mapping[str, str]) -> tuple[Statefile, ...]:
    """The statefiles of this user's namespaces."""
    found = []
    for namespace in namespaces(env):
        path = Paths.of(namespace, env).statefile
        try:
            read_raw(path)
        except StateError as error:
            foreign = path.exists() and path.stat().st_uid != os.geteuid()
            found.append(Statefile(namespace, str(path), str(error), foreign))
        else:
            found.append(Statefile(namespace, str(path)))
    return tuple(found)


def our_processes(env: Mapping[str, str]) -> dict[str, Any]:
    """The facts `our_processes` (pid to watcher, of any run of this user) and `orphans`. Reads all of /proc."""
    ours: dict[int, str] = {}
    states: set[tuple[str, str]] = set()
    for pid, variables in environments():
        watcher, statefile = variables.get("DYN_WATCHER_NAME"), variables.get("DYN_STATEFILE")
        namespace = variables.get("DYN_NAMESPACE", "")
        if watcher and statefile and namespace_fault(namespace) is None:
            ours[pid] = watcher
            states.add((namespace, str(Path(statefile).parent)))
    orphans = (
        found for namespace, state_dir in sorted(states) if (found := _orphans(namespace, state_dir, env)) is not None
    )
    return {"our_processes": ours, "orphans": tuple(orphans)}


def _orphans(namespace: str, state_dir: str, env: Mapping[str, str]) -> Orphans | None:
    """Processes of a run without arbiter and statefile. A guardian alone is at work, and ends by itself."""
    paths = Paths.found(namespace, {**env, "DYN_LOCAL_STATE_DIR": state_dir})
    if lives(paths) or paths.statefile.exists():
        return None
    found = marked(paths)
    if guarded_arbiter(found) is not None:
        return None
    guardian = watcher_name(namespace, GUARDIAN)
    names = [f"{each.name} (pid {each.pid})" for each in found if each.name != guardian]
    return Orphans(namespace, state_dir, tuple(names)) if names else None


def leftover_folders(env: Mapping[str, str]) -> tuple[str, ...]:
    """Runtime folders of namespaces without a statefile, a live arbiter, or a process."""
    found = []
    for folder in sorted(runtime_root(env).glob("*/")):
        if namespace_fault(folder.name) is not None:
            continue
        paths = Paths.of(folder.name, env)
        if not (paths.statefile.exists() or lives(paths) or is_held(paths.runtime_lock) or marked(paths)):
            found.append(str(folder))
    return tuple(found)


def control_socket(env: Mapping[str, str]) -> SocketPath:
    """That of the default namespace."""
    return SocketPath(str(Paths.of(DEFAULT_NAMESPACE, env).control_socket), IPC_PATH_MAX)


def listeners(numbers: Iterable[int]) -> dict[int, psutil.Process | None]:
    """Port to the process that listens on it, for those that are not free. None: the process cannot be seen."""
    taken = [number for number in numbers if number and not is_free(number)]
    pids: dict[int, int] = {}
    if taken:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.pid:
                pids[each.laddr.port] = each.pid
    return {number: psutil.Process(pids[number]) if number in pids else None for number in taken}


def ports(
    numbers: Iterable[int], taken: Mapping[int, psutil.Process | None], ours: Mapping[int, str]
) -> tuple[Port, ...]:
    """With the holders in words."""
    found = []
    for number in numbers:
        process = taken.get(number)
        if number not in taken:
            found.append(Port(number))
        elif process is None:
            found.append(Port(number, "a program of another user, or in another container"))
        else:
            try:
                who = ours.get(process.pid) or f"{process.name()} of {process.username()}"
            except psutil.Error:
                who = "a program"
            found.append(Port(number, f"{who} (pid {process.pid})", process.pid in ours))
    return tuple(found)

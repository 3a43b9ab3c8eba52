"""Finds, ends and clears what a killed arbiter left in its namespace.

The guardian does this at once, else `dynamo down` or the next `dynamo serve`. Each holds the namespace's lock
meanwhile. So the recorded arbiter is dead, and only one of them clears.

Two marks identify our processes. The environment of everything that a run starts names the namespace and the statefile,
and children inherit it. The session of each recorded process (pid and start time verified) also holds children with
another environment. A child that left both cannot be told from a stranger.
"""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo_local.arbiter.marks import GUARDIAN, SERVERS, household, marked, ourselves
from dynamo_local.core.fleet.states import STAGES
from dynamo_local.core.types import watcher_name
from dynamo_local.errors import ConfigError, DynamoError, StateError
from dynamo_local.state.raw import StateMissing, read_raw
from dynamo_local.system.liveness import forget_dead_owner
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive, is_resource_tracker, send_signal, sessions, start_time_s
from dynamo_local.transport.access import EtcdAccess
from dynamo_local.transport.certificates import Certificates

log = logging.getLogger(__name__)

GONE_TIMEOUT_S = 10.0
TRACKER_GRACE_S = 10.0
"""How long a resource tracker may take once the others are gone.

It removes the others' shared memory from /dev/shm. If it were killed first, that memory would stay until the next boot.
It needs milliseconds. On two cores with thirty processes it needed more than two seconds.
"""
POLL_S = 0.005
START_TIME_SLACK_S = 0.011
"""The kernel counts start times in ticks of 10 ms."""


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """A process in the statefile. `started_s` is seconds since boot, None if it is not written yet."""

    name: str
    pid: int
    started_s: float | None
    role: str = "other"
    drain_deadline_s: float = 600.0
    born: str | None = None
    """Its spawn name, if it has another name now."""

    @property
    def alive(self) -> bool:
        """Whether it runs and is still the same process."""
        return self.started_s is not None and is_alive(self.pid, self.started_s)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The statefile of a run, read without validation: the guardian must cope with any content.

    `leases` are hex, by worker: its own first, then those of processes behind it. `readable` is False if the statefile
    is missing or broken.
    """

    readable: bool = False
    run_id: str | None = None
    keep: bool = False
    workers: tuple[RecordedProcess, ...] = ()
    servers: tuple[RecordedProcess, ...] = ()
    leases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    etcd_endpoints: str | None = None
    certificates: str | None = None
    """The folder of the embedded etcd's certificates. None for the user's etcd."""

    @property
    def living(self) -> list[RecordedProcess]:
        """Workers whose processes still are those of the statefile."""
        return [worker for worker in self.workers if worker.alive]


class Unkillable(DynamoError):
    """A process is still there long after SIGKILL. It hangs in the kernel, for example in a driver."""

    code = "unkillable"


# --- finding -------------------------------------------------------------------------------------


def recorded(statefile: Path) -> RecordedRun:
    """Read the statefile. The record is empty if the file is missing or broken."""
    try:
        raw = read_raw(statefile)
    except StateMissing:
        return RecordedRun()
    except StateError as error:
        log.warning("%s", error)
        return RecordedRun()
    entries, servers = _entries(raw.get("components")), _entries(raw.get("servers"))
    return RecordedRun(
        readable=isinstance(raw.get("run_id"), str),
        run_id=str(raw.get("run_id")),
        keep=raw.get("on_arbiter_death") == "keep",
        workers=tuple(_known(name, entry) for name, entry in entries.items() if isinstance(entry.get("pid"), int)),
        servers=tuple(_known(name, entry) for name, entry in servers.items() if isinstance(entry.get("pid"), int)),
        leases={name: leases for name, entry in entries.items() if (leases := _leases(entry))},
        etcd_endpoints=raw.get("etcd_endpoints"),
        certificates=raw.get("certificates") if any(e.get("kind") == "etcd" for e in servers.values()) else None,
    )


def _leases(entry: dict[str, Any]) -> tuple[str, ...]:
    others = entry.get("other_leases")
    leases = [entry.get("lease"), *(others if isinstance(others, list) else ())]
    return tuple(lease for lease in leases if isinstance(lease, str))


def _entries(value: Any) -> dict[str, dict[str, Any]]:
    return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}


def _known(name: str, entry: Mapping[str, Any]) -> RecordedProcess:
    started, deadline = entry.get("pid_start_time"), entry.get("drain_deadline_s")
    return RecordedProcess(
        name=name,
        pid=entry["pid"],
        started_s=float(started) if isinstance(started, int | float) else None,
        role=str(entry.get("role", "other")),
        drain_deadline_s=float(deadline) if isinstance(deadline, int | float) else 600.0,
        born=entry["born"] if isinstance(entry.get("born"), str) else None,
    )


def in_sessions(of: Iterable[RecordedProcess]) -> dict[int, str]:
    """pid -> name of every process in the sessions of these processes.

    The kernel does not reuse a session's number while it has members. A session is not ours if its leader is another
    process than the recorded one, or if a member is older.
    """
    now, found = sessions(), {}
    ancestors = ourselves()
    for known in of:
        members = now.get(known.pid, {})
        if known.started_s is None:
            continue
        first_s = known.started_s - START_TIME_SLACK_S
        if abs(members.get(known.pid, known.started_s) - known.started_s) < START_TIME_SLACK_S:
            theirs = (pid for pid, started_s in members.items() if started_s > first_s and pid not in ancestors)
            found.update(dict.fromkeys(theirs, known.name))
    return found


# --- ending --------------------------------------------------------------------------------------


def end(find: Callable[[], Mapping[int, str]], timeout_s: float = GONE_TIMEOUT_S) -> list[str]:
    """Kill the processes of `find` (pid -> name) until none is left, and wait until all are gone.

    A resource tracker gets a moment to end by itself, because it clears /dev/shm after the others. Returns the ended
    processes in words. Raises `Unkillable`.
    """
    ended: dict[int, tuple[str, float]] = {}
    others_s = time.monotonic()
    deadline_s = others_s + timeout_s
    while True:
        found = find()
        trackers = {pid for pid in found if is_resource_tracker(pid)}
        if found.keys() - trackers or _living(ended, trackers):
            others_s = time.monotonic()
        elif trackers:
            deadline_s = others_s + TRACKER_GRACE_S + timeout_s
        waits = time.monotonic() < others_s + TRACKER_GRACE_S
        for pid, name in found.items():
            started_s = start_time_s(pid)
            if started_s is None:
                continue
            ended[pid] = (name, started_s)
            if waits and pid in trackers:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        left = [f"{ended[pid][0]} (pid {pid})" for pid in _living(ended)]
        if not left and not found:
            return [f"{name} (pid {pid})" for pid, (name, _) in ended.items()]
        if time.monotonic() > deadline_s:
            raise Unkillable(
                f"still there {timeout_s:g} s after SIGKILL: {', '.join(left)}; see `ps`, and `dmesg` for its driver"
            )
        time.sleep(POLL_S)


def _living(ended: Mapping[int, tuple[str, float]], but: Container[int] = ()) -> list[int]:
    """The processes that are not gone yet. A killed one holds its pipes and memory until it is."""
    return [pid for pid, (_, started_s) in ended.items() if pid not in but and is_alive(pid, started_s)]


def end_guardian(paths: Paths, *, but: int | None = None) -> list[str]:
    """End the namespace's guardians, except the process `but`: a successor takes over, and they must not act."""
    name = watcher_name(paths.namespace, GUARDIAN)
    return end(lambda: {found.pid: found.name for found in marked(paths) if found.name == name and found.pid != but})


def end_workers(paths: Paths, run: RecordedRun, *, living: Iterable[str] = ()) -> list[str]:
    """End all workers and the processes that they started, of any run, except those named in `living`."""
    kept = frozenset(living)
    helpers = household(paths.namespace)
    condemned = [worker for worker in run.workers if worker.name not in kept]

    def find() -> dict[int, str]:
        by_mark = {
            found.pid: found.name
            for found in marked(paths)
            if found.name not in helpers and not (found.name in kept and found.run_id == run.run_id)
        }
        return by_mark | in_sessions(condemned)

    return end(find)


def end_children(paths: Paths, run_id: str, name: str) -> list[str]:
    """End processes that a dead worker started, also outside of its session: they would keep VRAM."""
    return end(
        lambda: {found.pid: name for found in marked(paths) if found.name == name and found.run_id == run_id},
    )


def end_sessions(of: Iterable[RecordedProcess]) -> list[str]:
    """End what is left in the sessions of these processes."""
    of = list(of)
    return end(lambda: in_sessions(of))


def end_servers(paths: Paths, run: RecordedRun) -> list[str]:
    """End the embedded servers: NATS, then etcd. Their data ends with the run, so SIGKILL is enough."""
    ended = []
    for kind in SERVERS:
        name = watcher_name(paths.namespace, kind)
        known = [server for server in run.servers if server.name == name]

        def find(name: str = name, known: list[RecordedProcess] = known) -> dict[int, str]:
            return {found.pid: name for found in marked(paths) if found.name == name} | in_sessions(known)

        ended += end(find)
    return ended


def clear(paths: Paths, run: RecordedRun) -> None:
    """Remove the statefile of a dead run (a broken one is set aside), and the runtime folder."""
    from dynamo_local.state.store import StateStore

    store = StateStore(paths.statefile)
    try:
        store.set_aside_if_broken()
        if run.run_id is not None:
            store.remove_if_owned(run.run_id)
    except StateError as error:
        log.warning("the statefile was not removed: %s", error)
    shutil.rmtree(paths.runtime, ignore_errors=True)
    forget_dead_owner(paths.runtime_lock)


def end_run(paths: Paths) -> list[str]:
    """End everything that is left in the namespace: workers, leases, NATS, etcd, statefile, sockets.

    Returns the ended processes. Raises `Unkillable`. The statefile then stays, because it says which worker holds which
    GPU.
    """
    run = recorded(paths.statefile)
    ended = end_workers(paths, run)
    revoke(run.etcd_endpoints, run.certificates, itertools.chain.from_iterable(run.leases.values()))
    ended += end_servers(paths, run)
    clear(paths, run)
    return ended


log = logging.getLogger(__name__)

REVOKE_TIMEOUT_S = 2.0
"""For each call to etcd. If etcd does not answer, the leases expire."""


def revoke(endpoints: str | None, certificates: str | None, leases: Iterable[str]) -> None:
    """Revoke leases (hex) if etcd answers. A failure is logged, and the leases expire.

    This uses etcd's JSON gateway, because gRPC would double the size of the guardian. `certificates` is the folder of
    the embedded etcd's certificates. The user's etcd (None) is reached by the variables of our environment
    (`transport.access`).
    """
    leases = list(leases)
    if not endpoints or not leases:
        return
    first = endpoints.split(",")[0].strip()
    try:
        _revoke_at(first, certificates, leases)
    except (OSError, ValueError, http.client.HTTPException, ConfigError) as error:
        log.warning("etcd at %s does not answer us, the leases expire by themselves: %s", first, error)


def _revoke_at(endpoint: str, certificates: str | None, leases: list[str]) -> None:
    env = Certificates(Path(certificates)).etcd_env if certificates else os.environ
    access = EtcdAccess.of(env)
    target = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    host, port = target.hostname or "", target.port or 2379
    connection = (
        http.client.HTTPSConnection(host, port, timeout=REVOKE_TIMEOUT_S, context=access.tls.context())
        if target.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=REVOKE_TIMEOUT_S)
    )

    def ask(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")

    try:
        headers = {}
        if access.user is not None:
            status, text = ask("/v3/auth/authenticate", {"name": access.user, "password": access.password}, {})
            if status == http.client.OK:
                headers["Authorization"] = json.loads(text)["token"]
        for lease in leases:
            status, text = ask("/v3/lease/revoke", {"ID": str(int(lease, 16))}, headers)
            if status != http.client.OK and "lease not found" not in text:
                log.warning("lease %s was not revoked (it expires by itself): %s", lease, text.strip())
    finally:
        connection.close()


EXIT_POLL_S = 0.02


def drain_without_arbiter(workers: Iterable[RecordedProcess], tell: Callable[[str], None]) -> None:
    """Drain workers of a dead arbiter by SIGTERM, in the stages of a `down`, each within its own deadline.

    Blocks. The caller ends the remaining processes.
    """
    workers = list(workers)
    for stage in STAGES:
        draining = [worker for worker in workers if worker.role in stage and worker.alive]
        for worker in draining:
            tell(f"{worker.name}: draining")
            send_signal(worker.pid, signal.SIGTERM)
        began_s = time.monotonic()
        for worker in draining:
            while worker.alive and time.monotonic() - began_s < worker.drain_deadline_s:
                time.sleep(EXIT_POLL_S)

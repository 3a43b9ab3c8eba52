"""Checks of ports, namespaces and leftovers of dead runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.doctor.findings import Check, Results, faults_or_ok, ok, problem, warning


@dataclass(frozen=True, slots=True)
class SocketPath:
    """The path of a unix socket, and the bytes that the kernel allows."""

    path: str
    longest: int


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port and the process that listens on it: `holder` in words, None if it is free. `ours`: a run's own."""

    number: int
    holder: str | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A namespace with a run, or with what a run has left. `state` is as `dynamo ls` says it."""

    namespace: str
    state: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Statefile:
    """A statefile. `fault` says why it cannot be read; `foreign`: it belongs to another user."""

    namespace: str
    path: str
    fault: str | None = None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Orphans:
    """Processes with the marks of a run that has neither an arbiter nor a statefile. `state_dir`: of that run."""

    namespace: str
    state_dir: str
    processes: Sequence[str]


@dataclass(frozen=True, slots=True)
class GpuLock:
    """A GPU lock that is held, and whether the arbiter that took the lock is alive."""

    uuid: str
    holder: str
    namespace: str
    alive: bool


def port(ports: Sequence[Port]) -> Results:
    """The Frontend's port is free, or one of your own graphs has it."""
    for each in ports:
        if each.holder is None:
            yield ok(f"nothing listens on port {each.number}", f"port {each.number}")
        elif each.ours:
            yield ok(f"your own graph listens on port {each.number}: {each.holder}", f"port {each.number}")
        else:
            yield problem(
                f"in use by {each.holder}",
                "end that program, or choose another port: --Frontend.port=0 takes any",
                f"port {each.number}",
            )


def namespace_dead(runs: Sequence[SeenRun]) -> Results:
    """No run was killed and left its statefile. The next `serve` of its namespace cleans up first."""
    faults = (
        warning(f"nothing runs, but its statefile is left: {run.note}", f"dynamo down -n {run.namespace}", _named(run))
        for run in runs
        if run.state == "dead"
    )
    yield from faults_or_ok(faults, _listed(runs))


def namespace_kept(runs: Sequence[SeenRun]) -> Results:
    """No worker serves without an arbiter. Nobody restarts or scales such workers, and they hold their GPUs."""
    faults = (
        warning(
            run.note or "its arbiter is dead, workers serve on",
            f"`dynamo serve … --adopt` takes them back, `dynamo down -n {run.namespace}` ends them",
            _named(run),
        )
        for run in runs
        if run.state == "kept"
    )
    yield from faults_or_ok(faults, _listed(runs))


def namespace_silent(runs: Sequence[SeenRun]) -> Results:
    """Every live arbiter answers."""
    faults = (
        warning(
            f"its arbiter did not answer within two seconds: {run.note}",
            f"look at `dynamo logs arbiter -n {run.namespace}`; `dynamo down --now -n {run.namespace}` ends it",
            _named(run),
        )
        for run in runs
        if run.state == "not_answering"
    )
    yield from faults_or_ok(faults, _listed(runs))


def statefile(statefiles: Sequence[Statefile]) -> Results:
    """Each statefile can be read, and is yours."""
    faults = []
    for each in statefiles:
        subject = f"namespace {each.namespace}"
        if each.foreign:
            repair = f"have its owner end that run and remove {each.path}, or set DYN_LOCAL_STATE_DIR"
            faults.append(problem(each.fault or each.path, repair, subject))
        elif each.fault is not None:
            repair = f"dynamo down -n {each.namespace}"
            faults.append(warning(each.fault, f"{repair} sets it aside, as the next `serve` does", subject))
    yield from faults_or_ok(faults, f"{len(statefiles)} statefiles")


def orphans(orphans: Sequence[Orphans]) -> Results:
    """No process of a dead run is left. Such a process may hold the memory of a GPU."""
    faults = (
        warning(
            f"without an arbiter or a statefile: {', '.join(each.processes)}",
            f"DYN_LOCAL_STATE_DIR={each.state_dir} dynamo down --now -n {each.namespace}",
            f"namespace {each.namespace}",
        )
        for each in orphans
    )
    yield from faults_or_ok(faults, "/proc: every process with our marks belongs to a run")


def runtime_leftovers(leftover_folders: Sequence[str]) -> Results:
    """No runtime folder is left without a run."""
    faults = (warning(f"{folder} belongs to no run", f"rm -r {folder}") for folder in leftover_folders)
    yield from faults_or_ok(faults, "every runtime folder belongs to a run")


def gpu_lock(gpu_locks: Sequence[GpuLock]) -> Results:
    """Each GPU lock is held by a live arbiter. After its death a worker or a child of a worker keeps the lock."""
    faults = (
        warning(
            f"GPU {lock.uuid} is locked by {lock.holder}, whose arbiter is dead",
            f"`dynamo down -n {lock.namespace}` ends what holds it; `fuser` on the lock file names the process",
        )
        for lock in gpu_locks
        if not lock.alive
    )
    yield from faults_or_ok(faults, f"{len(gpu_locks)} GPU locks are held, each by a live arbiter")


def socket_path(control_socket: SocketPath) -> Results:
    """The path of the control socket is short enough for the kernel."""
    length = len(control_socket.path.encode())
    evidence = f"{control_socket.path} has {length} of {control_socket.longest} bytes"
    if length > control_socket.longest:
        yield problem(evidence, "set XDG_RUNTIME_DIR to a shorter folder, or use a shorter --namespace")
    else:
        yield ok(evidence)


def _named(run: SeenRun) -> str:
    return f"namespace {run.namespace}"


def _listed(runs: Sequence[SeenRun]) -> str:
    return ", ".join(f"{run.namespace} is {run.state}" for run in runs) or "no run on this host"


CHECKS: tuple[Check, ...] = (
    port,
    socket_path,
    statefile,
    namespace_dead,
    namespace_kept,
    namespace_silent,
    orphans,
    runtime_leftovers,
    gpu_lock,
)

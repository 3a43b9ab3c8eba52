"""Deals with a killed arbiter's run in `dynamo serve`: refuse, end, replace, or take back (`--adopt`).

`settle` decides this under the namespace's lock, before anything is planned. `Found` describes a run that can be taken
back. `Adoption` takes it back in the new arbiter: it watches the live processes, restores the state of each worker, and
continues pending work. A worker's process is ended only if its end was decided before. A failed adoption releases
everything and ends no process.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynamo_local.arbiter import leftovers, marks
from dynamo_local.arbiter.deployment import WatcherFactory
from dynamo_local.arbiter.marks import MarkedProcess
from dynamo_local.arbiter.servers import EmbeddedServers, EtcdSpec, NatsSpec, ServerBinary
from dynamo_local.arbiter.statefile import restart_of_entry, standby_of_entry, with_sleepers, without_credentials
from dynamo_local.core.fleet.backoff import RestartHistory
from dynamo_local.core.fleet.fleet import Fleet, FlipTarget, Intent, Leave, Process, Registration, Start, Worker
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import GraphSpec, Resources, ServiceSpec, WorkerState, suffix_of, watcher_name
from dynamo_local.errors import ConfigError, DynamoError, GpuError, NamespaceBusy, NotRunning
from dynamo_local.state.schema import ComponentEntry, ServerEntry, State
from dynamo_local.state.store import load
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.liveness import busy
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import AdoptingHost, LaunchSpec
from dynamo_local.system.processes import age_s, is_alive, start_time_s
from dynamo_local.transport.access import run_environment
from dynamo_local.transport.certificates import Certificates

log = logging.getLogger(__name__)


def worker_of(namespace: str, entry: ComponentEntry, gpus: tuple[str, ...], now_s: float) -> Worker:
    """An entry of the statefile as a worker without a process."""
    flip = _flip(namespace, entry)
    unasked = _leaves_unasked(entry)
    return Worker(
        entry.watcher_name,
        entry.component,
        entry.role,
        suffix_of(entry.watcher_name, namespace, entry.component),
        WorkerState.READY if entry.state is WorkerState.FLIPPING and flip is None else entry.state,
        since_s=now_s,
        gpus=gpus,
        intent=_intent(entry),
        reason=entry.reason,
        history=_history(entry, now_s),
        registration=Registration(entry.lease, other_leases=tuple(entry.other_leases or ())),
        start=Start(entry.restarts + 1, entry.launched or "", spawned_as=entry.born),
        leave=Leave(None if unasked else _drain_requested_s(entry, now_s), lease_gone=unasked),
        flip=flip,
        standby=standby_of_entry(entry.standby),
    )


def _flip(namespace: str, entry: ComponentEntry) -> FlipTarget | None:
    if entry.flip is None or entry.state is not WorkerState.FLIPPING:
        return None
    target = entry.flip
    return FlipTarget(
        target.watcher_name, target.component, suffix_of(target.watcher_name, namespace, target.component)
    )


def with_process(worker: Worker, entry: ComponentEntry, pid: int, now_s: float) -> Worker:
    """The worker with its process. Its running time is not taken from the wall clock, which may have been set since."""
    traits = TRAITS[entry.state]
    served = traits.serves or traits.leaves or traits.standby or entry.state is WorkerState.FLIPPING
    began_s = now_s - age_s(pid)
    return worker.changed(
        process=Process(pid, start_time_s(pid), began_s, entry.started_at),
        lease=None,  # The pid in the registry must be this process.
        served=served,
        ready_s=began_s if served else None,
        heard_s=now_s if served else None,  # Its silence counts from now on.
    )


def _leaves_unasked(entry: ComponentEntry) -> bool:
    """Whether somebody else revoked its lease, so that it drains or has left without a request of the dead arbiter.

    A requested drain has `asked_s`, except for a worker that was to leave before its process existed. A drain that is
    being cancelled counts as ours.
    """
    if entry.asked_s is not None or entry.course == Intent.RETURNING:
        return False
    if entry.state is WorkerState.DRAINING:  # otherwise nobody had seen its process yet
        return entry.pid_start_time is not None
    return entry.state is WorkerState.EXITED and entry.course == Intent.RESTARTING


def _drain_requested_s(entry: ComponentEntry, now_s: float) -> float | None:
    """Its deadline still counts from the request."""
    if not TRAITS[entry.state].drains:
        return None
    return now_s if entry.asked_s is None else min(now_s, entry.asked_s)


def _history(entry: ComponentEntry, now_s: float) -> RestartHistory:
    """The failures that decide its next restart. Times in the future are left out.

    Such times are from before a reboot, or the file was edited.
    """
    failures_s = tuple(at_s for at_s in entry.failures_s or () if at_s <= now_s)
    return RestartHistory(failures_s, entry.failures_streak or 0)


def _intent(entry: ComponentEntry) -> Intent:
    """A ready worker keeps its intent: the statefile only guessed that its lease was gone."""
    if TRAITS[entry.state].serves:
        return Intent.STEADY
    try:
        return Intent(entry.course or Intent.STEADY)
    except ValueError:
        log.warning("%s: its course %r is of a newer version; left out", entry.watcher_name, entry.course)
        return Intent.STEADY


FILES_DEADLINE_S = 10.0
"""The guardian checks its files every two seconds. A busy host takes longer."""
FILES_POLL_S = 0.05
MAY_HAVE_PROCESS = frozenset(state for state, traits in TRAITS.items() if traits.process is not HasProcess.NO)


@dataclass(frozen=True, slots=True)
class Found:
    """A run whose arbiter is dead, and those of its processes that live: pids by watcher name, servers included.

    `notes` say what was ended when it was found.
    """

    state: State
    pids: Mapping[str, int]
    notes: tuple[str, ...] = ()


# --- deciding ------------------------------------------------------------------------------------


def settle(paths: Paths, *, adopt: bool, replace: bool, tell: Callable[[str], None]) -> Found | None:
    """Deal with the run that a killed arbiter left in the namespace.

    Returns the run to adopt, or None if the namespace is empty now. Raises `NamespaceBusy` if workers live and no
    option says what to do. Raises `NotRunning` if there is nothing to adopt, `StateError` if the run cannot be adopted.
    Nothing is changed then.
    """
    run = leftovers.recorded(paths.statefile)
    marked = marks.marked(paths)
    # Without a statefile (somebody has just removed it) the guardian still says which arbiter it watches.
    if arbiter := marks.guarded_arbiter(marked):
        raise busy(paths.namespace, f"pid {arbiter} (as its guardian says)")
    if adopt:
        return _to_adopt(paths, run, marked)
    living = sorted({worker.name for worker in run.living})
    if not run.readable:  # without a statefile their purpose is unknown
        living = sorted({found.name for found in marked if found.is_worker})
    if living and not replace and (run.keep or not run.readable):
        raise NamespaceBusy(
            f"namespace {paths.namespace!r} has {len(living)} live workers ({', '.join(living)}), whose arbiter is "
            "dead. `dynamo serve --adopt` takes them back, no stream is cut. `dynamo down` lets them finish and ends "
            "them. `dynamo serve --replace` ends them at once, which cuts what they stream, and starts anew"
        )
    if replace and living:
        tell(f"--replace: {len(living)} live workers are ended at once; what they stream is cut")
    if marked or run.readable or paths.statefile.exists():
        for what in (*leftovers.end_guardian(paths), *leftovers.end_run(paths)):
            tell(f"left over from a dead run of {paths.namespace}, ended: {what}")
    return None


def _to_adopt(paths: Paths, run: leftovers.RecordedRun, marked: list[MarkedProcess]) -> Found:
    state = load(paths.statefile) if run.readable or paths.statefile.exists() else None
    pids = {} if state is None else dict(_running(state, marked))
    if state is None or not any(name in pids for name in state.components):
        raise NotRunning(
            f"no worker of namespace {paths.namespace!r} lives that could be adopted; `dynamo serve` without --adopt "
            "starts anew"
        )
    _wait_for_files(paths, state, marked)
    ended = leftovers.end_workers(paths, run, living=_known_as(state, pids))
    return Found(state, pids, tuple(ended))


def _wait_for_files(paths: Paths, state: State, marked: list[MarkedProcess]) -> None:
    """Wait until the guardian has restored the files by which the running etcd and NATS are reached.

    Somebody may have removed the runtime folder. Raises `DynamoError` if the files do not appear.
    """
    needed = [] if not state.certificates else list(Certificates(Path(state.certificates)).paths)
    needed += [Path(state.nats_token_file)] if state.nats_token_file else []
    guarded = any(found.name == watcher_name(paths.namespace, marks.GUARDIAN) for found in marked)
    deadline_s = time.monotonic() + (FILES_DEADLINE_S if guarded else 0.0)
    while missing := [path for path in needed if not path.is_file()]:
        if time.monotonic() >= deadline_s:
            late = f"its guardian has not made them again within {FILES_DEADLINE_S:g} s"
            why = late if guarded else "no guardian lives that knows what was in them"
            raise DynamoError(
                f"namespace {paths.namespace!r} cannot be adopted: {', '.join(map(str, missing))}, by which its "
                f"running etcd and NATS are reached, were removed, and {why}. Its workers finish what they stream: "
                "`dynamo down` lets them finish and ends them, `dynamo serve --replace` starts anew"
            )
        time.sleep(FILES_POLL_S)


def _known_as(state: State, pids: Mapping[str, int]) -> frozenset[str]:
    """The names of the workers that live, and those in their processes' environments."""
    living = [entry for name, entry in state.components.items() if name in pids]
    return frozenset(name for entry in living for name in (entry.watcher_name, entry.born) if name is not None)


def _running(state: State, marked: list[MarkedProcess]) -> Iterator[tuple[str, int]]:
    """Name and pid of every process that still is the recorded one.

    If the arbiter was killed between a process's start and the next commit, the statefile lacks the start time. It has
    the pid only if the worker wrote it. The environment of the process then says which worker it is.
    """
    itself = {found.name: found for found in marked if found.run_id == state.run_id and _leads_session(found)}
    entries: dict[str, ComponentEntry | ServerEntry] = {**state.components, **(state.servers or {})}
    for name, entry in entries.items():
        found = itself.get(name)
        if entry.pid is not None and entry.pid_start_time is not None:
            if is_alive(entry.pid, entry.pid_start_time):
                yield name, entry.pid
        elif found is not None and entry.pid in (None, found.pid) and _may_run(entry):
            yield name, found.pid


def _leads_session(found: MarkedProcess) -> bool:
    try:
        return os.getsid(found.pid) == found.pid
    except ProcessLookupError:
        return False


def _may_run(entry: ComponentEntry | ServerEntry) -> bool:
    return isinstance(entry, ServerEntry) or entry.state in MAY_HAVE_PROCESS


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The values of the command line that must match the running ones. Addresses are None where embedded.

    The statefile has no credentials. So credentials are not compared, and the error shows none.
    """

    graph: GraphSpec
    cwd: Path
    gpus_option: str
    config_json: str
    etcd_endpoints: str | None
    nats_server: str | None


def check_same(found: Found, settings: ServeSettings) -> None:
    """Raises `ConfigError` that names each difference: adopted workers keep their configuration."""
    state = found.state
    differences = [
        *_differs("the graph", state.target, settings.graph.target),
        *_differs("--gpus", state.gpus, settings.gpus_option),
        *(
            difference
            for name, entry in state.components.items()
            for difference in _differs(f"{name}'s folder", entry.cwd, str(settings.cwd))
        ),
        *_config_differences(state.environment.DYNAMO_SERVICE_CONFIG, settings.config_json),
    ]
    kinds = {server.kind for server in (state.servers or {}).values()}
    nats = None if settings.nats_server is None else without_credentials(settings.nats_server)
    for kind, running, wanted in (
        ("etcd", state.etcd_endpoints, settings.etcd_endpoints),
        ("nats", state.nats_server, nats),
    ):
        if wanted is not None or kind not in kinds:
            differences += _differs(kind, running, wanted)
    here = {*(spec.name for spec in settings.graph.services), *(state.retired or ())}
    unknown = {entry.component for entry in state.components.values()} - here
    differences += [f"the graph has no {component}" for component in sorted(unknown)]
    if differences:
        raise ConfigError(
            f"the workers of namespace {state.namespace!r} run with something else: {'; '.join(differences)}; adopt "
            "them with what they run with, then `dynamo apply -f FILE` changes it and cuts nothing; or use --replace"
        )


def _differs(what: str, running: str | None, wanted: str | None) -> list[str]:
    return [] if running == wanted else [f"{what} is {running}, not {wanted}"]


def _config_differences(running: str, wanted: str) -> list[str]:
    """Differences by service and key. Values are left out: they may be long, or masked."""
    old, new = json.loads(running), json.loads(wanted)
    found = []
    for section in sorted(old.keys() | new.keys()):
        before, after = old.get(section, {}), new.get(section, {})
        if before == after:
            continue
        if not isinstance(before, dict) or not isinstance(after, dict):
            found.append(section)
            continue
        keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        found += [f"{section}.{key}" for key in keys]
    return [f"the configuration differs in {', '.join(found)}"] if found else []


def retired(state: State) -> tuple[ServiceSpec, ...]:
    """Services that an apply removed, while their last workers are still leaving."""
    return tuple(
        ServiceSpec(
            entry.component,
            entry.role,
            workers=0,
            resources=Resources(entry.gpus_per_worker),
            start_deadline_s=entry.start_deadline_s,
            drain_deadline_s=entry.drain_deadline_s,
        )
        for entry in {each.component: each for each in state.components.values()}.values()
        if entry.component in (state.retired or ())
    )


def hold_gpus(found: Found, ledger: GpuLedger, pool: GpuPool) -> GpuLedger:
    """The ledger in which all entries hold their devices. Raises `GpuError` if they cannot.

    A running worker holds the locks of its devices itself. For the others we lock the devices. A worker holds none if
    another namespace has locked them meanwhile.
    """
    ledger = with_sleepers(ledger, found.state, found.pids)
    for name, entry in found.state.components.items():
        uuids = entry.resources.gpu_uuids or []
        ledger = ledger.assign(name, uuids)
        if name in found.pids:
            pool.lock_rest(name, uuids)
        else:
            try:
                pool.lock(name, uuids)
            except GpuError as error:
                log.warning("%s cannot have its GPUs back: %s", name, error)
                ledger = ledger.release(name)
    return ledger


def adopted_plans(found: Found, factory: WatcherFactory, ledger: GpuLedger) -> tuple[LaunchSpec, ...]:
    """The watchers of all entries, as if they were started now."""
    entries = found.state.components
    return tuple(
        factory.plan(factory.service(entry.component), name, ledger.held.get(name, ()))
        for name, entry in entries.items()
    )


# --- taking back ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Adoption:
    """One adoption, inside of the new arbiter: workers and servers as they are, from the statefile."""

    found: Found
    host: AdoptingHost
    gone: dict[str, int] = field(default_factory=dict)
    """Processes that ended while there was no arbiter: watcher name to pid, 0 if it is not known."""

    def env(self, nats_server: str | None) -> dict[str, str]:
        """The variables that tell workers where etcd and NATS are. `nats_server` has the command line's credentials."""
        env = run_environment(self.found.state)
        return env if nats_server is None else {**env, "NATS_SERVER": nats_server}

    def workers(self, empty: Fleet, now_s: float) -> Fleet:
        """The fleet as the killed arbiter left it; `empty` has the ledger with what its workers hold."""
        workers = {}
        now = {template.component: template.fingerprint for template in empty.templates}
        for name, entry in self.found.state.components.items():
            pid = self.found.pids.get(name)
            worker = worker_of(empty.namespace, entry, empty.gpus.held_uuids.get(name, ()), now_s)
            if entry.launched is None:  # of an older version, which changed nothing at run time
                worker = worker.changed(launched=now.get(worker.component, ""))
            if pid is not None:
                worker = with_process(worker, entry, pid, now_s)
            workers[name] = worker
        restarts = tuple(restart_of_entry(each) for each in self.found.state.restarts or ())
        return replace(empty, workers=workers, restarts=restarts, revoked=self.found.state.revoked or {})

    def watch(self, fleet: Fleet, spec: Callable[[Worker], LaunchSpec]) -> Fleet:
        """Watch every worker that runs, so that every exit is noticed.

        Returns the fleet without processes that have ended. Those are in `gone`.
        """
        workers = dict(fleet.workers)
        for name, worker in fleet.workers.items():
            entry = self.found.state.components[name]
            if worker.pid is not None:
                try:
                    self.host.adopt_process(spec(worker), worker.pid)
                    continue
                except ProcessLookupError:  # it has ended since we looked
                    workers[name] = worker.changed(process=None, lease=entry.lease)
            may_have = TRAITS[worker.state].process is not HasProcess.NO
            if may_have and (entry.pid is not None or worker.state is not WorkerState.CRASHED):
                self.gone[name] = entry.pid or 0
        return replace(fleet, workers=workers)

    def watch_servers(self, servers: EmbeddedServers, paths: Paths) -> None:
        """The embedded servers, and watchers for those that run."""
        state = self.found.state
        made = Certificates(Path(state.certificates)) if state.certificates else None
        if made is not None and (missing := made.missing()):
            raise DynamoError(f"{missing[0]}, with which the running servers are reached, is gone; use --replace")
        for name, entry in (state.servers or {}).items():
            spec = _server_spec(entry, paths, made)
            pid = self.found.pids.get(name)
            if pid is not None:
                try:
                    self.host.adopt_process(servers.process_spec(name, spec), pid)
                except ProcessLookupError:
                    pid = None
            servers.adopt(name, spec, pid)


def _server_spec(entry: ServerEntry, paths: Paths, made: Certificates | None) -> EtcdSpec | NatsSpec:
    """Raises `DynamoError` if its files are gone: it could not be started again."""
    if entry.kind == "etcd":
        binary = ServerBinary("etcd", Path(entry.binary), "PATH", None)
        client, peer = entry.ports
        return EtcdSpec(binary, paths.runtime / "etcd", client, peer, made)
    folder = paths.runtime / "nats"
    try:
        token = (folder / "token").read_text().strip()
    except OSError as error:
        raise DynamoError(f"the token of the running NATS cannot be read: {error}; use --replace") from error
    binary = ServerBinary("nats-server", Path(entry.binary), "PATH", None)
    return NatsSpec(binary, folder, entry.ports[0], token, made)

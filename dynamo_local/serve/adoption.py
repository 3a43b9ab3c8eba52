"""What `dynamo serve` does with what a killed arbiter left: refuse, sweep, replace, or take it back (`--adopt`).

`settle` decides, with the namespace's lock held and before anything is planned. `Found` is what can be taken back,
as a value; `Adoption` takes it back, inside of the new arbiter: watchers for processes that run already, workers in
the state in which they were, and for each the next step of what was under way. A worker's process is never touched
unless its end was decided before. An adoption that fails lets go of everything and ends nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.core.fleet_view import Course
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.restarts import RestartHistory
from dynamo_local.core.types import GraphSpec, WorkerState
from dynamo_local.errors import ConfigError, DynamoError, NamespaceBusy, NotRunning
from dynamo_local.serve import leftovers
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.host import AdoptingHost
from dynamo_local.serve.infra import EtcdSpec, NatsSpec, ServerBinary
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.plan import Deployment, WatcherPlan, WorkerPlanner
from dynamo_local.serve.processes import age_s, is_alive, start_time_s
from dynamo_local.state import ComponentEntry, ServerEntry, State, load

if TYPE_CHECKING:
    from dynamo_local.serve.supervisor import Supervisor

log = logging.getLogger(__name__)

MAY_HAVE_PROCESS = frozenset(
    {
        WorkerState.STARTING,
        WorkerState.READY,
        WorkerState.DRAINING,
        WorkerState.DRAIN_TIMED_OUT,
        WorkerState.CRASHED,
        WorkerState.START_TIMED_OUT,
    }
)


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
    """Deal with what is left in the namespace. Returns what is to be adopted; None if the namespace is empty now.

    Raises `NamespaceBusy` beside live workers unless told what to do with them, `NotRunning` if there is nothing to
    adopt, `StateError` if what there is cannot be adopted; then nothing was touched.
    """
    run = leftovers.recorded(paths.statefile)
    marked = leftovers.marked(paths)
    if adopt:
        return _to_adopt(paths, run, marked)
    living = sorted({worker.name for worker in run.living})
    if not run.readable:  # nobody can tell what they are for
        living = sorted({found.name for found in marked if found.is_worker})
    if living and not replace and (run.keep or not run.readable):
        raise NamespaceBusy(
            f"namespace {paths.namespace!r} has {len(living)} live workers ({', '.join(living)}), whose arbiter is "
            "dead: `dynamo serve --adopt` takes them back, no stream is cut; `dynamo down` lets them finish and ends "
            "them; `dynamo serve --replace` ends them at once, which cuts what they stream, and starts anew"
        )
    if replace and living:
        tell(f"--replace: {len(living)} live workers are ended at once; what they stream is cut")
    if marked or run.readable or paths.statefile.exists():
        for what in (*leftovers.end_guardian(paths), *leftovers.end_run(paths)):
            tell(f"left over from a dead run of {paths.namespace}, ended: {what}")
    return None


def _to_adopt(paths: Paths, run: leftovers.Recorded, marked: list[leftovers.Marked]) -> Found:
    state = load(paths.statefile) if run.readable or paths.statefile.exists() else None
    pids = {} if state is None else dict(_running(state, marked))
    if state is None or not any(name in pids for name in state.components):
        raise NotRunning(
            f"no worker of namespace {paths.namespace!r} lives that could be adopted; `dynamo serve` without --adopt "
            "starts anew"
        )
    ended = leftovers.end_workers(paths, run, living=frozenset(pids) & state.components.keys())
    return Found(state, pids, tuple(ended))


def _running(state: State, marked: list[leftovers.Marked]) -> Iterator[tuple[str, int]]:
    """Name and pid of everything that is what the statefile says.

    A process that was killed for between its start and its first commit (or whose worker wrote its pid itself) has no
    start time there: its environment says who it is.
    """
    itself = {found.name: found for found in marked if found.run_id == state.run_id and _leads(found)}
    entries: dict[str, ComponentEntry | ServerEntry] = {**state.components, **(state.servers or {})}
    for name, entry in entries.items():
        found = itself.get(name)
        if entry.pid is not None and entry.pid_start_time is not None:
            if is_alive(entry.pid, entry.pid_start_time):
                yield name, entry.pid
        elif found is not None and entry.pid in (None, found.pid) and _may_run(entry):
            yield name, found.pid


def _leads(found: leftovers.Marked) -> bool:
    try:
        return os.getsid(found.pid) == found.pid
    except ProcessLookupError:
        return False


def _may_run(entry: ComponentEntry | ServerEntry) -> bool:
    return isinstance(entry, ServerEntry) or entry.state in MAY_HAVE_PROCESS


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for, to be compared with what runs. Addresses are None where embedded."""

    graph: GraphSpec
    cwd: Path
    gpus_option: str
    config_json: str
    etcd_endpoints: str | None
    nats_server: str | None


def check_same(found: Found, wish: Wish) -> None:
    """Raises `ConfigError` naming each difference: adopted workers keep what they were started with."""
    state = found.state
    differences = [
        *_differs("the graph", state.target, wish.graph.target),
        *_differs("--gpus", state.gpus, wish.gpus_option),
        *(
            difference
            for name, entry in state.components.items()
            for difference in _differs(f"{name}'s folder", entry.cwd, str(wish.cwd))
        ),
        *_config_differences(state.environment.DYNAMO_SERVICE_CONFIG, wish.config_json),
    ]
    kinds = {server.kind for server in (state.servers or {}).values()}
    for kind, running, wanted in (
        ("etcd", state.etcd_endpoints, wish.etcd_endpoints),
        ("nats", state.nats_server, wish.nats_server),
    ):
        if wanted is not None or kind not in kinds:
            differences += _differs(kind, running, wanted)
    unknown = {entry.component for entry in state.components.values()} - {spec.name for spec in wish.graph.services}
    differences += [f"the graph has no {component}" for component in sorted(unknown)]
    if differences:
        raise ConfigError(
            f"the workers of namespace {state.namespace!r} run with something else: {'; '.join(differences)}; adopt "
            "them with the same command line, then change it by `dynamo restart`, or use --replace"
        )


def _differs(what: str, running: str | None, wanted: str | None) -> list[str]:
    return [] if running == wanted else [f"{what} is {running}, not {wanted}"]


def _config_differences(running: str, wanted: str) -> list[str]:
    """By service and key. Values are left out: they may be long, or masked."""
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


def hold_gpus(found: Found, pool: GpuPool) -> dict[str, tuple[GpuDevice, ...]]:
    """Count the devices of all entries as theirs; by watcher name. Raises `GpuError` if they cannot be."""
    held = {}
    for name, entry in found.state.components.items():
        uuids = entry.resources.gpu_uuids or []
        held[name] = pool.assign(name, uuids, running=name in found.pids) if uuids else ()
    return held


def adopted_plans(
    found: Found, planner: WorkerPlanner, held: Mapping[str, tuple[GpuDevice, ...]]
) -> tuple[WatcherPlan, ...]:
    """The watchers of all entries, as if they were started now."""
    entries = found.state.components
    return tuple(
        planner.plan(planner.graph.service(entry.component), name, held[name]) for name, entry in entries.items()
    )


# --- taking back ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Adoption:
    """One adoption, inside of the new arbiter."""

    found: Found
    deployment: Deployment
    supervisor: Supervisor
    host: AdoptingHost
    _ended: dict[str, int] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """What the workers were told of etcd and NATS."""
        state = self.found.state
        env = {
            "ETCD_ENDPOINTS": state.etcd_endpoints or "",
            # The command line's own has the credentials, if there are any.
            "NATS_SERVER": self.deployment.nats_server or state.nats_server or "",
        }
        if state.nats_token_file:
            env["DYN_NATS_TOKEN_FILE"] = state.nats_token_file
        return env

    def restore(self) -> None:
        """Fleet, watchers and servers as they are. From here on every exit is noticed."""
        for plan in self.deployment.workers:
            self._restore_worker(plan, self.found.state.components[plan.name])
        for name, server in (self.found.state.servers or {}).items():
            self._restore_server(name, server)

    def _restore_worker(self, plan: WatcherPlan, entry: ComponentEntry) -> None:
        supervisor = self.supervisor
        worker = supervisor.fleet.add(plan)
        worker.state, worker.reason = entry.state, entry.reason
        worker.starts = entry.restarts + 1
        worker.course = _course(entry)
        worker.history = _history(entry, supervisor.clock.now_s())
        worker.lease = entry.lease
        pid = self.found.pids.get(plan.name)
        if pid is not None:
            try:
                self.host.adopt_process(supervisor.operations.spec(worker), pid)
            except ProcessLookupError:
                pid = None  # it has ended since we looked
        if pid is None:
            if entry.state in MAY_HAVE_PROCESS and (entry.pid is not None or entry.state is not WorkerState.CRASHED):
                self._ended[plan.name] = entry.pid or 0
            return
        now_s = supervisor.clock.now_s()
        worker.lease = None  # the registry will say, of this very pid
        worker.pid, worker.pid_start_time = pid, start_time_s(pid)
        worker.started_at = entry.started_at
        worker.started_s = now_s - age_s(pid)  # not by the time of day, which may have been set meanwhile
        worker.served = entry.state in (WorkerState.READY, WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT)
        worker.ready_s = worker.started_s if worker.served else None
        worker.heard_s = now_s if worker.served else None  # its silence counts from here on
        if entry.state is WorkerState.DRAINING:  # its deadline goes on from when it was asked
            worker.asked_s = now_s if entry.asked_s is None else min(now_s, entry.asked_s)

    def _restore_server(self, name: str, entry: ServerEntry) -> None:
        spec = _server_spec(entry, self.deployment.paths)
        pid = self.found.pids.get(name)
        supervisor = self.supervisor
        if pid is not None:
            try:
                self.host.adopt_process(supervisor.servers.process_spec(name, spec), pid)
            except ProcessLookupError:
                pid = None
        supervisor.servers.adopt(name, spec, pid)

    async def resume(self) -> None:
        """Go on where the killed arbiter stood. The registry has been looked through."""
        supervisor = self.supervisor
        for worker in list(supervisor.fleet.workers.values()):
            if worker.state is WorkerState.READY and worker.pid is not None and worker.lease is None:
                # Its lease was revoked, or has expired, while nobody watched: nothing is routed to it.
                lease = self.found.state.components[worker.name].lease
                await supervisor.registrations.unregistered(worker, lease or "")
            supervisor.operations.resume(worker, self._ended.get(worker.name))
        await supervisor.fleet.commit(list(supervisor.fleet.workers))
        supervisor.scaler.resume_restarts(self.found.state.restarts or ())


def _history(entry: ComponentEntry, now_s: float) -> RestartHistory:
    """What its restarts are decided by. Times to come are of before a reboot, or edited: left out."""
    failures_s = tuple(at_s for at_s in entry.failures_s or () if at_s <= now_s)
    return RestartHistory(failures_s, entry.failures_streak or 0)


def _course(entry: ComponentEntry) -> Course:
    try:
        return Course(entry.course or Course.STEADY)
    except ValueError:
        log.warning("%s: its course %r is of a newer version; left out", entry.watcher_name, entry.course)
        return Course.STEADY


def _server_spec(entry: ServerEntry, paths: Paths) -> EtcdSpec | NatsSpec:
    """Raises `DynamoError` if its files are gone: it could not be started again."""
    if entry.kind == "etcd":
        binary = ServerBinary("etcd", Path(entry.binary), "PATH", None)
        client, peer = entry.ports
        return EtcdSpec(binary, paths.runtime / "etcd", client, peer)
    folder = paths.runtime / "nats"
    try:
        token = (folder / "token").read_text().strip()
    except OSError as error:
        raise DynamoError(f"the token of the running NATS cannot be read: {error}; use --replace") from error
    return NatsSpec(ServerBinary("nats-server", Path(entry.binary), "PATH", None), folder, entry.ports[0], token)

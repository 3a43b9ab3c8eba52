"""The plan of a run as a value: `dynamo serve` makes it before anything starts, and `--dry-run` prints it.

Every refusal happens here or earlier. The supervisor only carries the plan out.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core import secrets as api_keys
from dynamo_local.core.fleet.backoff import DEFAULT_POLICY, RestartPolicy
from dynamo_local.core.fleet.fleet import StartPace, Template, Worker
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.gpus import DEFAULT_VRAM_SHARE, GpuAsk, GpuDevice, GpuLedger, cuda_visible_devices
from dynamo_local.core.secrets import allowed_env, mask_env
from dynamo_local.core.traffic import UNREAD_BOUND_S
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec, watcher_name
from dynamo_local.core.virtual import Layout, root
from dynamo_local.errors import ConfigError
from dynamo_local.system.log_files import log_tail
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import LaunchSpec

COMMAND_ENTRY = str(Path(__file__).parents[1] / "worker" / "serve_command.py")
"""A path, because the process starts without `site`, which finds packages."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the run, from the command line and the section `Host`."""

    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    lease_ttl_s: int = 10
    pass_env: tuple[str, ...] = ()
    pin_gpus: bool = True
    keep_on_arbiter_death: bool = False
    health_bound_s: float = 30.0
    unread_bound_s: float = UNREAD_BOUND_S
    restart_revoked: bool = False
    restart: RestartPolicy = DEFAULT_POLICY
    pace: StartPace = StartPace()  # noqa: RUF009 - frozen
    metrics_port: int = 0
    metrics_socket: bool = False
    metrics_api_key: str | None = None
    dashboard: int | None = None
    history: bool = False
    spares: int = 0


@dataclass(frozen=True, slots=True)
class Deployment:
    """The plan of a whole run.

    `etcd_endpoints` and `nats_server` are None if we start our own. `gpus` are those of the host, and the `ledger`
    assigns them to workers. `config_sections` and `state_config_json` have masked secrets, because they are shown and
    kept in the statefile.

    `load_planner` has the planner's options, and `load_planner_starts` says whether it starts with the graph. An
    adopted run keeps its planner's state unless the command line (`load_planner_flag`) says otherwise. `follow` says
    where another planner's decisions are, if the run carries those out. `host` is the section `Host` as given.
    """

    graph: GraphSpec
    run_id: str
    paths: Paths
    settings: Settings
    factory: WatcherFactory
    workers: tuple[LaunchSpec, ...]
    gpus: tuple[GpuDevice, ...]
    ledger: GpuLedger
    gpus_option: str
    etcd_endpoints: str | None
    nats_server: str | None
    config_sections: Mapping[str, Any] = field(default_factory=dict)
    state_config_json: str = "{}"
    load_planner: PlannerConfig = PlannerConfig()  # noqa: RUF009 - frozen
    load_planner_starts: bool = False
    load_planner_flag: bool | None = None
    follow: Layout | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    command_line: Mapping[str, Any] = field(default_factory=dict)
    """Masked, too: the sections that the command line says."""

    def describe(self) -> dict[str, Any]:
        """For `--dry-run`: configuration, watchers, GPUs and environments, secrets masked."""
        infra = [name for name, url in (("etcd", self.etcd_endpoints), ("nats", self.nats_server)) if url is None]
        return {
            "namespace": self.graph.namespace,
            "graph": self.graph.target,
            "config": self.config_sections,
            "gpus": self.gpus_option,
            "etcd_endpoints": self.etcd_endpoints or "embedded",
            "nats_server": self.nats_server or "embedded",
            "planner": self.load_planner.model_dump(mode="json") if self.load_planner_starts else None,
            "follow": None if self.follow is None else root(self.graph.namespace, self.follow),
            "flips": {
                each.name: each.flips_to or f"no: {each.cannot_flip}"
                for each in self.graph.services
                if ROLES[each.role].computes
            },
            "infra_watchers": [f"{self.graph.namespace}_{name}" for name in infra],
            "watchers": [
                {
                    "watcher_name": w.name,
                    "component": w.component,
                    "role": str(self.factory.service(w.component).role),
                    "gpus": [d.index for d in w.gpus],
                    "gpu_uuids": [d.uuid for d in w.gpus],
                    "cmd": " ".join(w.argv),
                    "cwd": w.cwd,
                    "log_file": str(w.log_file),
                    "start_deadline_s": w.start_deadline_s,
                    "drain_deadline_s": w.graceful_timeout_s,
                    "env": mask_env({**w.env, "DYNAMO_SERVICE_CONFIG": self.state_config_json}),
                }
                for w in self.workers
            ],
        }


@dataclass(frozen=True, slots=True)
class WatcherFactory:
    """The settings that all workers of a run share. It makes the plan of a worker at any time.

    `base_env` is the allow-listed part of the caller's environment. `key_env` has variables that only one service may
    see. `retired` are services that an apply removed, while their last workers may still be leaving.
    """

    graph: GraphSpec
    settings: Settings
    paths: Paths
    run_id: str
    cwd: Path
    service_config_json: str
    base_env: Mapping[str, str]
    key_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    retired: tuple[ServiceSpec, ...] = ()

    def service(self, name: str) -> ServiceSpec:
        """The service of that name, also a retired one. KeyError if there is none."""
        return next((spec for spec in self.retired if spec.name == name), None) or self.graph.service(name)

    def plan(self, spec: ServiceSpec, name: str, gpus: Sequence[GpuDevice]) -> LaunchSpec:
        """The watcher of one worker on those devices."""
        return LaunchSpec(
            name=name,
            argv=worker_argv(self.graph.target, spec),
            env=self._env(spec, name, gpus),
            cwd=str(self.cwd),
            log_file=self.paths.log_file(name),
            graceful_timeout_s=spec.drain_deadline_s or self.settings.drain_deadline_s,
            death_signal=None if self.settings.keep_on_arbiter_death else signal.SIGKILL,
            asks_itself=True,
            component=spec.name,
            gpus=tuple(gpus),
            gpus_per_worker=spec.resources.gpu,
            start_deadline_s=self.start_deadline_s(spec),
        )

    def start_deadline_s(self, spec: ServiceSpec) -> float:
        """The service's own deadline, else the run's.

        A frontend waits for engines to load a model. So a frontend without a deadline of its own may take as long as
        those.
        """
        if spec.start_deadline_s is not None:
            return spec.start_deadline_s
        waits = spec.role is Role.FRONTEND
        others = (each.start_deadline_s or 0.0 for each in self.graph.services if waits and ROLES[each.role].computes)
        return max(self.settings.start_deadline_s, *others, 0.0)

    def launch_of(self, worker: Worker) -> LaunchSpec:
        """How that worker is started, without its devices. The statefile keeps this."""
        plan = self.plan(self.service(worker.component), worker.name, ())
        return replace(plan, log_file=self.paths.log_file(worker.spawn_name))

    def log_tail_of(self, worker: Worker) -> str:
        """The end of its log, quoted."""
        return log_tail(self.launch_of(worker).log_file)

    def templates(self) -> tuple[Template, ...]:
        """One template for each component. If the user pins GPUs, we assign none."""
        here = tuple(self._template(spec) for spec in self.graph.services)
        return (*here, *(replace(self._template(spec), retired=True) for spec in self.retired))

    def _template(self, spec: ServiceSpec) -> Template:
        return Template(
            spec.name,
            spec.role,
            spec.resources.gpu if self.settings.pin_gpus else 0,
            spec.max_workers,
            self.start_deadline_s(spec),
            spec.drain_deadline_s or self.settings.drain_deadline_s,
            fingerprint=self._fingerprint(spec),
            flips_to=spec.flips_to,
            cannot_flip=spec.cannot_flip,
            standby=spec.standby,
            vram_share=vram_share(spec),
            guests=tuple(each.name for each in spec.guests),
            shared_floor=None if spec.sharing is None else spec.sharing.floor,
        )

    def _fingerprint(self, spec: ServiceSpec) -> str:
        """A hash of everything that a worker reads when it starts.

        The input may hold secrets. The run's id keeps equal secrets of two runs from having equal fingerprints.
        """
        read: list[Any] = [self.run_id, spec.runtime, spec.target, spec.config, spec.envs, asdict(spec.resources)]
        if spec.guests:
            read.append({each.name: each.config for each in spec.guests})
        if spec.standby is not None:  # no worker reads how many are kept asleep
            read.append("standby")
        return hashlib.sha256(json.dumps(read, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def plan_all(self, given: Mapping[str, Sequence[GpuDevice]]) -> tuple[LaunchSpec, ...]:
        """The watchers that `serve` starts with, in the graph's order."""
        return tuple(self.plan(spec, name, given.get(name, ())) for spec, name in named_workers(self.graph))

    def _env(self, spec: ServiceSpec, name: str, gpus: Sequence[GpuDevice]) -> dict[str, str]:
        """Allow-listed variables, the service's `envs`, then ours. The later wins."""
        env = dict(self.base_env)
        env.update(self.key_env.get(spec.name, {}))
        env.update(spec.envs)
        if spec.flips_to is not None:
            env["DYN_FLIPS_TO"] = spec.flips_to
        if self.settings.pin_gpus:
            # Empty, not absent: a worker without GPUs must not see all of them.
            env["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices(gpus)
        env.update(
            {
                "DYN_NAMESPACE": self.graph.namespace,
                "DYN_RUN_ID": self.run_id,
                "DYN_WATCHER_NAME": name,
                "DYN_WORKER_FOLDER": str(self.paths.worker_folder(name)),
                "DYN_WORKER_GPUS": str(spec.resources.gpu),
                "DYN_STATEFILE": str(self.paths.statefile),
                "DYN_LEASE_TTL_S": str(self.settings.lease_ttl_s),
                "DYN_UNREAD_BOUND_S": str(self.settings.unread_bound_s),
                "DYNAMO_SERVICE_CONFIG": self.service_config_json,
                "DYN_START_DEADLINE_S": str(self.start_deadline_s(spec)),
                "PYTHONUNBUFFERED": "1",
                "GRPC_ENABLE_FORK_SUPPORT": "0",
            }
        )
        for name in ("DYN_STANDBY", "DYN_COLOCATED"):
            env.pop(name, None)
        if spec.guests:
            env["DYN_COLOCATED"] = ",".join(each.name for each in spec.guests)
        if spec.standby is not None:
            env["DYN_STANDBY"] = "1"
        return env


def vram_share(spec: ServiceSpec) -> float:
    """The share of a device's memory that an awake worker takes, by vLLM's own option."""
    given = spec.config.get("gpu_memory_utilization")
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= 1:
        return float(given)
    return DEFAULT_VRAM_SHARE


class Launcher:
    """How workers are started now. An apply replaces the `factory`."""

    def __init__(self, factory: WatcherFactory) -> None:
        self.factory = factory

    def plan(self, worker: Worker, gpus: Sequence[GpuDevice]) -> LaunchSpec:
        """Its watcher, on those devices."""
        return self.factory.plan(self.factory.service(worker.component), worker.name, gpus)

    def launch_of(self, worker: Worker) -> LaunchSpec:
        """How that worker is started, without its devices. The statefile keeps this."""
        return self.factory.launch_of(worker)


def named_workers(graph: GraphSpec) -> list[tuple[ServiceSpec, str]]:
    """Each worker that the graph starts with: its service and its watcher's name."""
    return [(spec, watcher_name(graph.namespace, spec.name, n)) for spec in graph.services for n in range(spec.workers)]


def gpu_asks(graph: GraphSpec) -> list[GpuAsk]:
    """The GPUs that the first workers request from the ledger."""
    return [GpuAsk(watcher_name=name, service=spec.name, gpu=spec.resources.gpu) for spec, name in named_workers(graph)]


def base_environment(graph: GraphSpec, environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The caller's variables that every worker gets.

    Raises `ConfigError` if a service sets CUDA_VISIBLE_DEVICES while we pin: it would have no effect.
    """
    if settings.pin_gpus:
        for spec in graph.services:
            if "CUDA_VISIBLE_DEVICES" in spec.envs:
                raise ConfigError(
                    f"{spec.name}: ServiceArgs.envs sets CUDA_VISIBLE_DEVICES, but `dynamo serve` pins the workers; "
                    "remove it, or set DYN_DISABLE_AUTO_GPU_ALLOCATION=1 to pin them yourself"
                )
    base = allowed_env(environ, settings.pass_env)
    for name in (*key_variables(graph).values(), api_keys.variable_of(settings.metrics_api_key)):
        base.pop(name or "", None)
    if settings.pin_gpus:
        base.pop("CUDA_VISIBLE_DEVICES", None)
    return base


def key_variables(graph: GraphSpec) -> dict[str, str]:
    """Service -> the variable that holds its API keys."""
    named = {spec.name: api_keys.variable_of(spec.config.get(api_keys.OPTION)) for spec in graph.services}
    return {service: name for service, name in named.items() if name is not None}


def key_environment(graph: GraphSpec, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The caller's variables that one service alone sees, by service."""
    return {service: {name: environ[name]} for service, name in key_variables(graph).items() if name in environ}


def worker_argv(target: str, spec: ServiceSpec) -> tuple[str, ...]:
    """The command that starts one more worker of a service, as the statefile keeps it."""
    if spec.runtime is not None:
        return (sys.executable, "-S", COMMAND_ENTRY, "--service-name", spec.name)
    return (
        sys.executable,
        "-m",
        "dynamo_local.worker.serve_dynamo",
        spec.target or target,
        "--service-name",
        spec.name,
    )

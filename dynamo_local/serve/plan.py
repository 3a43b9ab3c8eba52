"""What `dynamo serve` would start: a value, made before anything starts, printed by `--dry-run`.

Everything that can be refused is refused here or earlier; the supervisor only carries a plan out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynamo_local.core.gpus import GpuAsk, GpuDevice, plan
from dynamo_local.core.secrets import allowed_env, mask_env
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec, watcher_name
from dynamo_local.serve.paths import Paths

Kind = Literal["etcd", "nats", "worker"]


@dataclass(frozen=True, slots=True)
class WatcherPlan:
    """One watcher: its command, environment, GPUs and deadlines (seconds)."""

    name: str
    kind: Kind
    component: str
    role: Role
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    gpus: tuple[GpuDevice, ...]
    log_file: Path
    start_deadline_s: float
    drain_deadline_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says about the run, apart from the graph and its configuration."""

    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    lease_ttl_s: int = 10
    pass_env: tuple[str, ...] = ()
    pin_gpus: bool = True


@dataclass(frozen=True, slots=True)
class Deployment:
    """The whole run. `etcd_endpoints`/`nats_server` are None where we start our own server.

    `config_sections` and `state_config_json` have secrets masked: they are shown, and kept in the statefile.
    """

    graph: GraphSpec
    run_id: str
    paths: Paths
    settings: Settings
    workers: tuple[WatcherPlan, ...]
    gpus: tuple[GpuDevice, ...]
    gpus_option: str
    etcd_endpoints: str | None
    nats_server: str | None
    config_sections: Mapping[str, Any] = field(default_factory=dict)
    state_config_json: str = "{}"

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
            "infra_watchers": [f"{self.graph.namespace}_{name}" for name in infra],
            "watchers": [
                {
                    "watcher_name": w.name,
                    "component": w.component,
                    "role": str(w.role),
                    "gpus": [d.index for d in w.gpus],
                    "gpu_uuids": [d.uuid for d in w.gpus],
                    "cmd": " ".join(w.argv),
                    "cwd": w.cwd,
                    "log_file": str(w.log_file),
                    "start_deadline_s": w.start_deadline_s,
                    "drain_deadline_s": w.drain_deadline_s,
                    "env": mask_env({**w.env, "DYNAMO_SERVICE_CONFIG": self.state_config_json}),
                }
                for w in self.workers
            ],
        }


def plan_workers(
    graph: GraphSpec,
    *,
    devices: Sequence[GpuDevice],
    elsewhere: Mapping[str, str],
    environ: Mapping[str, str],
    service_config_json: str,
    settings: Settings,
    paths: Paths,
    run_id: str,
    cwd: Path,
) -> tuple[WatcherPlan, ...]:
    """One watcher a worker, GPUs assigned. Raises `GpuError` if they do not suffice, naming who asked for what.

    `elsewhere` says which devices (UUID) other namespaces hold.
    `environ` is the caller's whole environment: only what the allow-list and `pass_env` admit goes further.
    """
    names = [
        (spec, watcher_name(graph.namespace, spec.name, n)) for spec in graph.services for n in range(spec.workers)
    ]
    asks = [GpuAsk(watcher_name=name, service=spec.name, gpu=spec.resources.gpu) for spec, name in names]
    given: Mapping[str, tuple[GpuDevice, ...]] = plan(devices, asks, elsewhere=elsewhere) if settings.pin_gpus else {}
    base = allowed_env(environ, settings.pass_env)
    return tuple(
        WatcherPlan(
            name=name,
            kind="worker",
            component=spec.name,
            role=spec.role,
            argv=worker_argv(graph.target, spec.name),
            cwd=str(cwd),
            env=worker_env(base, spec, name, given.get(name, ()), graph, service_config_json, settings, paths, run_id),
            gpus=given.get(name, ()),
            log_file=paths.log_file(name),
            start_deadline_s=spec.start_deadline_s or settings.start_deadline_s,
            drain_deadline_s=spec.drain_deadline_s or settings.drain_deadline_s,
        )
        for spec, name in names
    )


def worker_argv(target: str, service: str) -> tuple[str, ...]:
    """The command that starts one more worker of a service, as the statefile keeps it."""
    return (sys.executable, "-m", "dynamo_local.serve.serve_dynamo", target, "--service-name", service)


def worker_env(
    base: Mapping[str, str],
    spec: ServiceSpec,
    name: str,
    gpus: tuple[GpuDevice, ...],
    graph: GraphSpec,
    service_config_json: str,
    settings: Settings,
    paths: Paths,
    run_id: str,
) -> dict[str, str]:
    """Allow-listed variables, then the service's `envs`, then ours: the later wins."""
    env = {key: value for key, value in base.items() if not (settings.pin_gpus and key == "CUDA_VISIBLE_DEVICES")}
    env.update(spec.envs)
    if settings.pin_gpus:
        # Empty, not absent: a worker that asked for no GPU must not see all of them.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(d.uuid for d in gpus)
    env.update(
        {
            "DYN_NAMESPACE": graph.namespace,
            "DYN_RUN_ID": run_id,
            "DYN_WATCHER_NAME": name,
            "DYN_STATEFILE": str(paths.statefile),
            "DYN_LEASE_TTL_S": str(settings.lease_ttl_s),
            "DYNAMO_SERVICE_CONFIG": service_config_json,
            "DYN_START_DEADLINE_S": str(spec.start_deadline_s or settings.start_deadline_s),
            "PYTHONUNBUFFERED": "1",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }
    )
    return env


def to_json(deployment: Deployment) -> str:
    """`--dry-run --json`."""
    return json.dumps(deployment.describe(), indent=2, default=str)

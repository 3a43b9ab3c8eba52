"""The statefile's schema, version 1. Every released version is kept in `tests/golden/statefile` and loads for ever.

Keys of a newer version with the same `schema_version` are kept and written back. Only `environment` is closed, because
the predecessor leaked tokens by an open one.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from dynamo_local.core.secrets import MASK, mask_config
from dynamo_local.core.types import LEASE, NAME, Role, WorkerState

SCHEMA_VERSION = 1

Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
Lease = Annotated[str, Field(pattern=rf"^{LEASE.pattern}$")]
Seconds = Annotated[float, Field(ge=0)]


class _Model(BaseModel):
    """Base: strict types, no NaN, unknown keys kept, and fields that are None left out of the file."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        known = type(self).model_fields
        return {key: value for key, value in dumped.items() if value is not None or key not in known}


class EntryResources(_Model):
    """Devices of one worker: host indices as strings, and UUIDs in the same order. Empty is written as `{}`."""

    allocated_gpus: list[str] | None = None
    gpu_uuids: list[str] | None = None

    @model_validator(mode="after")
    def _same_devices(self) -> EntryResources:
        for field in ("allocated_gpus", "gpu_uuids"):
            values = getattr(self, field) or []
            if len(set(values)) != len(values):
                raise ValueError(f"{field} names a GPU twice: {', '.join(values)}")
        if self.allocated_gpus and self.gpu_uuids and len(self.allocated_gpus) != len(self.gpu_uuids):
            raise ValueError(f"{len(self.allocated_gpus)} allocated_gpus but {len(self.gpu_uuids)} gpu_uuids")
        return self


class FlipEntry(_Model):
    """The next name and component of a worker that changes its role."""

    watcher_name: Name
    component: Name


class StandbyEntry(_Model):
    """A worker that sleeps, or has been told to sleep or to wake: `core.fleet.fleet.Standby`, for a successor.

    While it sleeps, `gpu_uuids` are the devices that its process is pinned to. Others may hold these meanwhile.
    `vram_bytes` is the memory that it keeps on each of them, `host_bytes` the main memory (None: not known). `pids` are
    its processes.
    """

    wanted: bool = False
    order: Annotated[int, Field(ge=0)] = 0
    level: Annotated[int, Field(ge=1)] = 1
    drained: bool = False
    gpu_uuids: list[str] | None = None
    vram_bytes: Annotated[int, Field(ge=0)] | None = None
    host_bytes: Annotated[int, Field(ge=0)] | None = None
    pids: list[int] = Field(default_factory=list)


class ComponentEntry(_Model):
    """One worker, or (without pid, lease and resources) the template of a component that has none.

    `lease`: hex, as at the end of the etcd keys in `endpoints`. `started_at`: seconds since 1970. `pid_start_time`:
    seconds since boot. The pid and its start time identify a process.
    `other_leases`: leases of a command that registers itself.
    `launched`: the configuration of its last process (`core.fleet.fleet.Template`).
    `reason`: cause of the last change of state. `course`: the worker's intent after a drain
    (`core.fleet.fleet.Intent`). `asked_s`, `failures_s`: times of the drain's request and of recent failures, in
    seconds of the host's monotonic
    clock. `asked_s` is null if somebody else revoked the lease. `failures_streak`: failures in a row.
    `flip`: present during a role flip. `born`: the name in the process's environment, if it has another name now.
    `standby`: present for a worker that sleeps, or will.
    """

    watcher_name: Name
    component: Name
    cwd: str = ""
    cmd: str = ""
    resources: EntryResources = Field(default_factory=EntryResources)
    gpus_per_worker: Annotated[int, Field(ge=0)] = 0
    role: Role = Role.OTHER
    state: WorkerState = WorkerState.PENDING
    pid: Annotated[int, Field(gt=0)] | None = None
    pid_start_time: Seconds | None = None
    lease: Lease | None = None
    endpoints: list[str] = Field(default_factory=list)
    other_leases: list[Lease] | None = None
    started_at: Seconds | None = None
    restarts: Annotated[int, Field(ge=0)] = 0
    reason: str | None = None
    log_file: str | None = None
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None
    launched: str | None = None
    course: str | None = None
    asked_s: Seconds | None = None
    failures_s: list[Seconds] | None = None
    failures_streak: Annotated[int, Field(ge=0)] | None = None
    flip: FlipEntry | None = None
    born: Name | None = None
    standby: StandbyEntry | None = None

    @model_validator(mode="after")
    def _endpoints_under_lease(self) -> ComponentEntry:
        for key in self.endpoints:
            if self.lease is not None and not key.endswith(f":{self.lease}"):
                raise ValueError(f"endpoint {key!r} is not under lease {self.lease}")
        return self


class ServerEntry(_Model):
    """An embedded etcd or NATS. Its files are under `runtime_dir`; a token is in a 0600 file there, never here."""

    kind: Literal["etcd", "nats"]
    binary: str
    ports: list[Annotated[int, Field(gt=0, lt=65536)]]
    pid: Annotated[int, Field(gt=0)] | None = None
    pid_start_time: Seconds | None = None


class SpareEntry(_Model):
    """A process that has the modules of an engine imported, and waits to become a worker."""

    engine: str
    pid: Annotated[int, Field(gt=0)] | None = None
    pid_start_time: Seconds | None = None


class PlannerEntry(_Model):
    """The load planner of the run: what it does, and the options that differ from the defaults."""

    state: Literal["stopped", "running", "paused"] = "stopped"
    options: dict[str, Any] = Field(default_factory=dict)


class FollowEntry(_Model):
    """Another planner whose decisions the run carries out: by which connector, and the layout of its keys."""

    environment: Literal["virtual"] = "virtual"
    keys: Literal["v1", "v0"] = "v1"


class RestartEntry(_Model):
    """A `dynamo restart` that is under way: `core.fleet.fleet.RestartPlan`, for the arbiter's successor.

    `todo` are the workers that are left, in order, each with the number of processes it had had when the restart was
    asked for. `force` is how 1.0 wrote that all of them go in place.
    """

    stimulus_id: str
    todo: dict[Name, Annotated[int, Field(ge=0)]]
    begun: list[Name] = Field(default_factory=list)
    bring_back: list[Name] = Field(default_factory=list)
    in_place: list[Name] = Field(default_factory=list)
    substitutes: dict[Name, Name] = Field(default_factory=dict)
    awaited: list[Name] = Field(default_factory=list)
    removed: list[Name] = Field(default_factory=list)
    late: list[Name] = Field(default_factory=list)
    force: bool = False


class SystemResources(_Model):
    """The host's devices: indices as strings, under the predecessor's names."""

    total_gpus: Annotated[int, Field(ge=0)] = 0
    gpu_info: list[str] = Field(default_factory=list)


class Environment(_Model):
    """The only two variables that are recorded; any other is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    DYNAMO_SERVICE_CONFIG: str = "{}"
    SYSTEM_RESOURCES: SystemResources = Field(default_factory=SystemResources)

    @field_validator("DYNAMO_SERVICE_CONFIG")
    @classmethod
    def _holds_no_secret(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            raise ValueError("not JSON") from None
        # Count the masks instead of comparing the texts: masking also turns numbers under `envs` into text.
        if json.dumps(mask_config(value)).count(MASK) > text.count(MASK):
            raise ValueError("holds a secret in the clear; write it through core.secrets.mask_config")
        return text


class State(_Model):
    """One namespace. `run_id` says who owns the file: nobody else removes it.

    `nats_token_file`: a path, never the token. `certificates`: the folder of the embedded servers' certificates
    (`transport.certificates`), or None. URLs with credentials are refused. `runtime_dir` and `log_dir`: sockets
    and logs, for shells with other variables. `arbiter_pid` and `arbiter_start_time` (seconds since boot) identify
    the arbiter.
    `target`: the served `module:Service`. `gpus`: the option `--gpus` as given. `command_line`: the sections that
    the command line says, over the file's; secrets are masked. `servers`: the embedded ones, by
    watcher name. `on_arbiter_death`: the guardian's action when the arbiter is killed. `planner`: None if never
    started.
    `follow`: another planner that scales the graph. `restarts`: those under way. `retired`: components that an apply
    removed and whose last workers still run. `revoked`: workers, with their component, that left because somebody else
    revoked their lease. `spares`: prewarmed processes, by watcher name.
    """

    schema_version: Literal[1] = 1
    namespace: Name
    run_id: Name
    circus_endpoint: str | None = None
    components: dict[Name, ComponentEntry] = Field(default_factory=dict)
    environment: Environment = Field(default_factory=Environment)
    arbiter_pid: Annotated[int, Field(gt=0)] | None = None
    arbiter_start_time: Seconds | None = None
    etcd_endpoints: str | None = None
    nats_server: str | None = None
    nats_token_file: str | None = None
    certificates: str | None = None
    frontend_url: str | None = None
    runtime_dir: str | None = None
    log_dir: str | None = None
    target: str | None = None
    gpus: str | None = None
    command_line: dict[str, Any] | None = None
    servers: dict[Name, ServerEntry] | None = None
    on_arbiter_death: Literal["end", "keep"] | None = None
    planner: PlannerEntry | None = None
    follow: FollowEntry | None = None
    restarts: list[RestartEntry] | None = None
    retired: list[Name] | None = None
    revoked: dict[Name, str] | None = None
    spares: dict[Name, SpareEntry] | None = None

    @field_validator("etcd_endpoints", "nats_server", "frontend_url")
    @classmethod
    def _holds_no_credentials(cls, urls: str | None) -> str | None:
        for url in (urls or "").split(","):
            if "@" in urlsplit(url if "//" in url else f"//{url}").netloc:
                raise ValueError("holds credentials; only host and port belong here")
        return urls

    @field_validator("command_line")
    @classmethod
    def _says_no_secret(cls, sections: dict[str, Any] | None) -> dict[str, Any] | None:
        if mask_config(sections) != sections:
            raise ValueError("holds a secret in the clear; write it through core.secrets.mask_config")
        return sections

    @model_validator(mode="after")
    def _entries_fit(self) -> State:
        holders: dict[str, str] = {}
        for key, entry in self.components.items():
            if key != entry.watcher_name:
                raise ValueError(f"components.{key}.watcher_name is {entry.watcher_name!r}, not {key!r}")
            expected = rf"{re.escape(self.namespace)}_{re.escape(entry.component)}(_[1-9]\d*)?"
            if not re.fullmatch(expected, key):
                raise ValueError(
                    f"components.{key}.component is {entry.component!r}; "
                    f"its worker is called {self.namespace}_{entry.component}, or that with _<number>"
                )
            held = entry.resources
            for gpu in [*(f"GPU index {i}" for i in held.allocated_gpus or []), *(held.gpu_uuids or [])]:
                if gpu in holders:
                    raise ValueError(f"components.{key}.resources: {gpu} is held by {holders[gpu]} already")
                holders[gpu] = key
        return self

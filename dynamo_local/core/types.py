"""Values that several parts share. Frozen dataclasses and enums; nothing here does I/O."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.core.gpu_shares import Sharing

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names that circus takes for a watcher. A dot would break its events: their topics are separated by dots."""

LEASE = re.compile(r"[0-9a-f]{1,16}")
"""A lease as `lease_hex` writes it."""


class Role(enum.StrEnum):
    """How the planner and a drain treat a component."""

    FRONTEND = "frontend"
    DECODE = "decode"
    PREFILL = "prefill"
    AGGREGATED = "aggregated"
    OTHER = "other"


class WorkerState(enum.StrEnum):
    """States of a managed worker. `core.fleet.states.TRAITS` says what each means, `core.fleet.lifecycle.NEXT` how one
    follows another."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EXITED = "exited"
    CRASHED = "crashed"
    BACKING_OFF = "backing_off"
    FAULTED = "faulted"
    START_TIMED_OUT = "start_timed_out"
    DRAIN_TIMED_OUT = "drain_timed_out"
    FLIPPING = "flipping"
    FALLING_ASLEEP = "falling_asleep"
    SLEEPING = "sleeping"
    WAKING = "waking"


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that could not be had. It is never 0: whoever reads it must say what to do without."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one worker of a service. `gpu` counts whole devices, per worker."""

    gpu: int = 0
    cpu: str | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service of a graph after decorators, YAML and command line were merged.

    `config` is the service's section without `ServiceArgs`, keys with underscores;
    `drain_deadline_s`/`start_deadline_s` are None where the command line's default applies;
    `max_workers` is None where the class sets no bound. `runtime` is that of a service that is a command (None: a
    class); `target` is where its class is, if that is not the graph's. `flips_to` is the
    component whose role its workers can take over (`flippable` false: they shall not); where that is None,
    `cannot_flip` says why. `standby` is how many workers are kept asleep (None: its workers are not made to sleep).
    `guests` are the services that run in its workers' processes: they have no workers of their own. `sharing` is how
    its workers share the GPUs with other models (None: they do not).
    """

    name: str
    role: Role
    workers: int = 1
    resources: Resources = Resources()
    envs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    depends: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    start_deadline_s: float | None = None
    drain_deadline_s: float | None = None
    max_workers: int | None = None
    runtime: str | None = None
    target: str | None = None
    flippable: bool = True
    flips_to: str | None = None
    cannot_flip: str = "no other component has an engine like its own"
    standby: int | None = None
    guests: tuple[ServiceSpec, ...] = ()
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A graph that can run. `target` is `module:Service` as given to `dynamo serve`, or a file of commands.

    `services` have workers of their own.
    """

    namespace: str
    target: str
    services: tuple[ServiceSpec, ...]

    @property
    def components(self) -> tuple[ServiceSpec, ...]:
        """All that runs: each service, then those in its processes."""
        return tuple(each for spec in self.services for each in (spec, *spec.guests))

    def service(self, name: str) -> ServiceSpec:
        """The service of that exact name that has workers; KeyError if there is none."""
        for spec in self.services:
            if spec.name == name:
                return spec
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered endpoint of a worker: one etcd key under the worker's lease.

    `subject` is the NATS subject on which it takes requests. `instance_id` is the lease id.
    """

    namespace: str
    component: str
    endpoint: str
    lease_id: int
    subject: str

    @property
    def instance_id(self) -> int:
        """The lease's id, by which etcd and the request plane know the worker."""
        return self.lease_id


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load, as it publishes it, under Dynamo's names.

    `gpu_cache_usage_perc` and `gpu_prefix_cache_hit_rate` are fractions, 0..1; the first is `Missing` where a worker
    does not know it. `prefills_waiting` is of Dynamo 1.x: requests that wait for their prefill, in a frontend's router
    or in a worker (None: unknown).
    `remaining_tokens` counts the tokens that running requests may still generate (an upper bound),
    `itl_ms` is the live inter-token latency (None before the first).
    `unread` answers wait for a reader that has taken nothing for a while, the longest for `unread_s`. `abandoned`
    counts such answers that the worker has ended because it leaves.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float | Missing = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    remaining_tokens: int = 0
    itl_ms: float | None = None
    prefills_waiting: int | None = None
    unread: int = 0
    unread_s: float = 0.0
    abandoned: int = 0

    def numbers(self) -> dict[str, float | None]:
        """Its fields by name, as they travel and as `dynamo status` shows them: None for what is not known."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: None if isinstance(value, Missing) else value for name, value in values.items()}


def watcher_name(namespace: str, component: str, n: int = 0) -> str:
    """`dynamo_VllmWorker` for n = 0, `dynamo_VllmWorker_1` for n = 1, …"""
    base = f"{namespace}_{component}"
    return base if n == 0 else f"{base}_{n}"


def suffix_of(name: str, namespace: str, component: str) -> int:
    """The suffix of a watcher name: 0 for the bare one. ValueError for a name that is not of that component."""
    base = watcher_name(namespace, component)
    if name == base:
        return 0
    if not name.startswith(f"{base}_"):
        raise ValueError(f"{name} is no worker of {component} in namespace {namespace}")
    return int(name[len(base) + 1 :])


def lease_hex(lease_id: int) -> str:
    """The lease as it appears at the end of etcd keys: 694d967da694ea1a."""
    return f"{lease_id:x}"


LEASE_TTL_ENV = "DYN_LEASE_TTL_S"
LEASE_TTL_MAX_S = 3600
"""The longest lease: a hanging worker, or one on a lost host, stays in the registry for this long."""


def lease_ttl_s(environ: Mapping[str, str]) -> int:
    """The TTL of workers' leases by the environment. `ValueError` says how the variable is written."""
    text = environ.get(LEASE_TTL_ENV, "10")
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= LEASE_TTL_MAX_S:
        raise ValueError(f"{LEASE_TTL_ENV}={text[:40]!r}: whole seconds, 1 to {LEASE_TTL_MAX_S}")
    return int(text)


def instance_prefix(namespace: str, component: str | None = None, endpoint: str | None = None) -> str:
    """etcd prefix of a namespace's, component's or endpoint's instances."""
    prefix = f"{namespace}/components/"
    if component is not None:
        prefix += f"{component}/"
        if endpoint is not None:
            prefix += f"{endpoint}:"
    return prefix


def instance_key(namespace: str, component: str, endpoint: str, lease_id: int) -> str:
    """`dynamo/components/VllmWorker/generate:694d967da694ea1a`; an endpoint's name may hold a slash."""
    return instance_prefix(namespace, component, endpoint) + lease_hex(lease_id)


def lease_key(namespace: str, watcher_name: str, lease_id: int) -> str:
    """`dynamo/leases/dynamo_VllmWorker:694d967da694ea1a`: there from the grant of a worker's lease to its end."""
    return f"{namespace}/leases/{watcher_name}:{lease_hex(lease_id)}"


def ready_key(namespace: str, watcher_name: str, lease_id: int) -> str:
    """`dynamo/workers/dynamo_VllmWorker:694d967da694ea1a`: the worker is ready, all its endpoints are registered."""
    return f"{namespace}/workers/{watcher_name}:{lease_hex(lease_id)}"


# --- durations
# How long anything may be told to take. Past a year a number is a typing error, and some clocks overflow.

SECONDS_MAX = 365 * 24 * 3600.0


# --- actuators
# Ways to carry out a planner's numbers of workers. Pure.


class Actuator(enum.StrEnum):
    """Ways to carry out a planner's numbers of workers, beside starts and drains.

    `FLIP`: a worker that one component has too many takes a role that another has too few of. `WAKE`: a worker that is
    given up is put to sleep if it may be kept on standby, and woken when one more is wanted.
    """

    FLIP = "flip"
    WAKE = "wake"


EVERY = frozenset(Actuator)
"""Whatever the components are configured for."""
WAKES = frozenset({Actuator.WAKE})
"""Each component for itself."""


# --- floors
# The fewest workers of a component, from a number of GPUs. Pure.


def floor_workers(min_gpu_budget: int, gpus_per_worker: int) -> int:
    """The fewest workers that hold `min_gpu_budget` GPUs; never below one."""
    return max(1, -(-min_gpu_budget // max(1, gpus_per_worker)))


# --- exit_codes
# Exit codes of processes, in words.


def how_it_ended(code: int | None) -> str:
    """The end of a process that nobody asked to end, in words.

    `code` is negative for a signal, None if nobody could collect it.
    """
    if code is None:
        return "ended unasked"
    if code < 0:
        named = -code in signal.Signals.__members__.values()
        return f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"
    return f"exited with code {code} unasked"


# --- namespaces
# Which names a namespace may have. One place says it: the command line, a graph's declaration and paths ask here.

NAMESPACE_MAX = 64
"""It is a part of file names, of watcher names and of a unix socket's path."""
RESERVED = {
    "gpus": "the folder of the GPUs' locks, in releases before this one",
    "v1": "the root of Dynamo 1.x's keys in etcd",
}
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def namespace_fault(namespace: object) -> str | None:
    """Why this cannot be a namespace, in words; None if it can."""
    what = f"namespace {str(namespace)[: NAMESPACE_MAX + 1]!r}"
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        return f"{what} is not usable: begin with a letter or a digit, then letters, digits, '_' and '-'"
    if len(namespace) > NAMESPACE_MAX:
        return f"{what}… is not usable: it has {len(namespace)} characters, {NAMESPACE_MAX} are allowed"
    if namespace.lower() in RESERVED:
        return f"{what} is reserved: it is {RESERVED[namespace.lower()]}; choose another name"
    return None

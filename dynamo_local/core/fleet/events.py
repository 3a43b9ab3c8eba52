"""What goes into the machine: commands, observations, and time. Each says what caused it (`stimulus_id`).

A event is a fact or a wish, never an order to the world: what follows from it is `machine.step`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.backoff import DEFAULT_POLICY, RestartPolicy
from dynamo_local.core.fleet.fleet import StandbyFacts, Template
from dynamo_local.core.fleet.scaling import Change, VictimPolicy
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import WAKES, Actuator, Load, Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all. `stimulus_id` names the cause: `command:7`, `planner:17`, `exit:4711`."""

    stimulus_id: str


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll(Event):
    """`dynamo serve`: start every pending worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Event):
    """`dynamo scale`, or a planner: see `scaling.decide`, whose refusals `step` raises."""

    component: str
    change: Change
    force: bool = False
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX
    by_person: bool = True
    wait_for_gpus: bool = False
    wake: bool = True
    sleep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAll(Event):
    """A planner's numbers of workers for several components, all or nothing: see `deciding.scale_all`. By what they may
    be carried out beside starts and drains, `actuators` says."""

    targets: Mapping[str, int]
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX
    actuators: frozenset[Actuator] = WAKES


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Event):
    """`dynamo drain NAME`: see `scaling.decide_drain`."""

    name: str
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelDrain(Event):
    """`dynamo drain NAME --cancel`: see `scaling.decide_cancel`.

    A person waits for the answer: where it is no, the worker just leaves, and nothing is started instead.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Event):
    """`dynamo restart NAME|COMPONENT`: see `rolling.plan_restart`."""

    target: str
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip(Event):
    """`dynamo flip NAME`: see `flips.decide`."""

    name: str
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep(Event):
    """`dynamo sleep NAME`: see `decisions.standby.decide_sleep`, whose refusals `step` raises."""

    name: str
    level: int = 1
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFlip(Event):
    """`dynamo scale PrefillWorker -1 VllmWorker +1 --flip`: so many workers of one component go over to the
    other, or none does. See `flips.decide_scale`."""

    gives: str
    takes: str
    count: int = 1
    force: bool = False
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelFlip(Event):
    """`dynamo flip --cancel NAME`: see `flips.decide_cancel`. It may come too late."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake(Event):
    """`dynamo wake NAME`: see `decisions.standby.decide_wake`, whose refusals `step` raises."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Event):
    """`dynamo apply`: the components of now on (others are retired), how many workers of some of them, and what the
    arbiter itself goes by. See `applying`, whose refusals `step` raises.
    """

    templates: tuple[Template, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    policy: RestartPolicy = DEFAULT_POLICY
    health_bound_s: float = 30.0
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Event):
    """`dynamo down`: all workers drain, stage by stage. With `now` what still runs is ended at once."""

    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Event):
    """A successor has taken the fleet over: go on where its arbiter stood.

    `gone` are pids, by watcher name, of processes that have ended while nobody watched.
    """

    gone: Mapping[str, int] = field(default_factory=dict)


# --- observations: processes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnBegun(Event):
    """`Spawn` is being carried out: from now on there may be a process."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMade(Event):
    """The process that `Spawn` asked for exists. `started_at` is seconds since 1970, for people."""

    name: str
    pid: int
    start_time: float | None
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRefused(Event):
    """It could not be made (no such program, no memory). `unit` is a uniform random number, 0..1, for the back-off."""

    name: str
    why: str
    unit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGone(Event):
    """A process has ended. `code` is negative for a signal, None where nobody could collect it."""

    name: str
    pid: int
    code: int | None
    unit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept(Event):
    """What a process that is gone had left behind, outside of its session, is ended: nothing runs under its name."""

    name: str


# --- observations: the registry --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPut(Event):
    """The worker's ready key is in etcd, under `lease` (hex). `failed`: it says that its engine has died, and `why`.

    `standby` is what it says about sleeping (None: nothing).
    """

    name: str
    pid: int
    lease: str
    endpoints: tuple[str, ...] = ()
    other_leases: tuple[str, ...] = ()
    failed: bool = False
    why: str | None = None
    standby: StandbyFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGone(Event):
    """The worker's ready key, which was under that lease, has been removed."""

    name: str
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryListed(Event):
    """All ready keys that there are, as `(watcher name, lease)`: what is not among them is not there."""

    keys: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLookedUp(Event):
    """Whether the ready key of a worker whose process has ended was removed before; False also where nobody can tell.

    `pid` is that of the process, `lease` (hex) that of the key.
    """

    name: str
    pid: int
    lease: str
    removed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InfraSeen(Event):
    """Whether etcd and NATS both answer now. While they do not, failures are not the workers' own."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeFailed(Event):
    """The lease by which a worker was to be told to leave could not be revoked."""

    name: str
    lease: str
    why: str


# --- observations: what workers answer -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsHeard(Event):
    """All running workers were asked for their load; `loads` are the answers, by watcher name.

    `blameless`: who did not answer could not be asked (NATS is away, the request failed).
    """

    loads: Mapping[str, Load]
    blameless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledBack(Event):
    """What the worker answered when its drain was to be taken back; `error` is None where it has registered again.

    `asked_by` is the command whose person waits for the answer (None: nobody waits).
    """

    name: str
    pid: int
    error: str | None = None
    asked_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswered(Event):
    """What a worker answered to its order number `order`, to sleep or to wake; that it is done it says in its key.

    `refused` says why it will not carry it out; `error` why nobody knows whether the order arrived.
    """

    name: str
    pid: int
    order: int
    refused: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsCounted(Event):
    """What a worker past its drain deadline still holds: how many requests, and the ids of some."""

    name: str
    pid: int
    in_flight: int | Missing
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipAnswered(Event):
    """What a worker answered when it was to be called `to`, in another role: its registration there, or why not.

    `error` is None where it is registered under `lease` (hex). `unknown`: nobody could tell; it may have flipped.
    """

    name: str
    pid: int
    to: str
    lease: str | None = None
    endpoints: tuple[str, ...] = ()
    error: str | None = None
    unknown: bool = False


# --- observations: GPUs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusSeen(Event):
    """The devices of the host as they are now, and who has reserved which outside of this namespace.

    `stale` says why nobody could look: then the fleet goes by the last inventory. `host_free_bytes` is the main memory
    that a process could still take.
    """

    devices: tuple[GpuDevice, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    stale: str | None = None
    host_free_bytes: int | Missing = Missing("not sampled")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReserved(Event):
    """Another namespace holds that device's lock, though the last sample did not say so."""

    uuid: str
    who: str


# --- time --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed: whatever is due now, happens."""

    stimulus_id: str = "clock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(Event):
    """The arbiter itself stood still for so long (SIGSTOP, a suspended host): nobody is to blame for that time."""

    for_s: float
    stimulus_id: str = "stalled"

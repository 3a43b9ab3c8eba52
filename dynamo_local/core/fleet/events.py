"""Events: commands, observations, and time. `step` takes them. Each names its cause (`stimulus_id`).

A command is parsed once, at the edge, into one of the records below. The same record goes through the arbiter into
`step`, which answers it. A new flag is one field here, and one line of help in `circus_plugins.commands`.

An event is a fact or a request. `step` alone decides what follows from it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.backoff import DEFAULT_POLICY, RestartPolicy
from dynamo_local.core.fleet.fleet import StandbyFacts, Template
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import WAKES, Actuator, Load, Missing
from dynamo_local.errors import BadTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all."""

    #: The cause: `scale:1f0c9a3e`, `planner:17`, `exit:4711`. The event log, the statefile and the answers of commands
    #: have this name, too: it is public.
    stimulus_id: str

    @property
    def kind(self) -> str:
        """The event's name in the event log."""
        return type(self).__name__


# --- what commands are made of -------------------------------------------------------------------


class VictimPolicy(enum.StrEnum):
    """How a scale-down chooses among ready workers."""

    HIGHEST_SUFFIX = "highest-suffix"
    """The default: the newest name goes first, the unsuffixed one last."""
    LEAST_LOADED = "least-loaded"
    """The soonest gone: fewest remaining tokens, then fewest requests (running and waiting)."""
    COLDEST = "coldest"
    """The least prefix cache lost, see `scaling.cache_at_stake`."""


def parse_policy(text: str) -> VictimPolicy:
    """Raises `BadTarget` that lists the policies."""
    try:
        return VictimPolicy(text)
    except ValueError:
        known = ", ".join(VictimPolicy)
        raise BadTarget(f"victim policy {text!r} is not known; there are: {known}") from None


_TARGET = re.compile(r"([+\-=]?)([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Change:
    """`relative`: this many more (or, negative, fewer); else exactly this many."""

    count: int
    relative: bool

    def __str__(self) -> str:
        return f"{self.count:+d}" if self.relative else f"={self.count}"

    def delta(self, capacity: int) -> int:
        """How many to add to (or take from) so many workers."""
        return self.count if self.relative else self.count - capacity


def parse_target(text: str) -> Change:
    """`+1`, `-1`, `=3` or `3`. Raises `BadTarget` for anything else, and for a change by 0."""
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        raise BadTarget(f"{text!r} is no number of workers; write +1 or -1 for a change, =3 or 3 for a number")
    sign, count = match[1], int(match[2])
    if sign in ("+", "-") and count == 0:
        raise BadTarget(f"{text!r} changes nothing; write =0 for no worker at all")
    if sign == "-":
        return Change(-count, relative=True)
    return Change(count, relative=sign == "+")


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Event):
    """A person's, or a planner's. `step` raises the refusal of a command; then nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll(Command):
    """`dynamo serve`: start every pending worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Command):
    """`dynamo scale`, or a planner: `scaling.decide`."""

    component: str
    target: Change
    #: Also where the component is left without a ready worker.
    force: bool = False
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX
    #: A planner (False) starts no faulted worker, and takes none from a component whose restart is under way.
    by_person: bool = True
    #: A new worker may wait for the GPUs of workers that leave.
    wait_for_gpus: bool = False
    #: Wake workers on standby before new ones are started.
    wake: bool = True
    #: Put workers to sleep instead of draining them, where the component wants more on standby.
    sleep: bool = False
    #: Workers on these GPUs go first: a sleeper waits for them, or a new worker needs them together.
    frees: frozenset[str] = frozenset()
    #: Why, for people. None: `scale +1`.
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAll(Command):
    """A planner's numbers of workers for several components, all or nothing: `commands.scale_all`.

    A planner never forces, and an up may wait for the GPUs of workers that leave.
    """

    targets: Mapping[str, int]
    #: Why, by component, for people.
    reasons: Mapping[str, str] = field(default_factory=dict)
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX
    #: Actuators that may be used beside starts and drains.
    actuators: frozenset[Actuator] = WAKES


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Command):
    """`dynamo drain NAME [--cancel]`: `scaling.decide_drain`, `scaling.decide_cancel`.

    After a cancel a person waits for the worker's answer. If that is no, the worker just leaves.
    """

    name: str
    cancel: bool = False
    force: bool = False

    @property
    def kind(self) -> str:
        """A cancel has a name of its own in the event log."""
        return "CancelDrain" if self.cancel else "Drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Command):
    """`dynamo restart NAME|COMPONENT`: `restarting.plan_restart`."""

    name: str
    #: Workers are restarted one after the other with or without this flag.
    rolling: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip(Command):
    """`dynamo flip NAME [--cancel]`: `flipping.decide`, `flipping.decide_cancel`. A cancel may come too late."""

    name: str
    cancel: bool = False
    force: bool = False

    @property
    def kind(self) -> str:
        """A cancel has a name of its own in the event log."""
        return "CancelFlip" if self.cancel else "Flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFlip(Command):
    """`dynamo scale PrefillWorker -1 VllmWorker +1 --flip`: `flipping.decide_scale`. All of them flip, or none."""

    gives: str
    takes: str
    count: int = 1
    force: bool = False
    victim_policy: VictimPolicy = VictimPolicy.HIGHEST_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep(Command):
    """`dynamo sleep NAME`: `sleeping.decide_sleep`."""

    name: str
    level: int = 1
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake(Command):
    """`dynamo wake NAME`: `sleeping.decide_wake`."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Command):
    """`dynamo apply`: `applying.apply`. Components that are not among the templates are retired."""

    templates: tuple[Template, ...]
    #: How many workers some of the components get.
    counts: Mapping[str, int] = field(default_factory=dict)
    policy: RestartPolicy = DEFAULT_POLICY
    health_bound_s: float = 30.0
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Command):
    """`dynamo down`: all workers drain, stage by stage."""

    #: End what still runs at once.
    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Command):
    """A successor has adopted the fleet: go on where its arbiter stood."""

    #: Pids, by watcher name, of processes that ended while no arbiter watched.
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
    """Nothing runs under its name: processes that it had left behind outside of its session are ended."""

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
    """The worker's answer when its drain was to be taken back."""

    name: str
    pid: int
    #: None if it has registered again.
    error: str | None = None
    #: The command whose person waits for the answer. None: nobody waits.
    requested_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswered(Event):
    """A worker's answer to its order number `order`, to sleep or to wake. Its ready key says that the order is done.

    `refused` says why it will not carry the order out, `error` why nobody knows whether the order arrived.
    """

    name: str
    pid: int
    order: int
    refused: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsCounted(Event):
    """The requests that a worker past its drain deadline still holds: how many, and the ids of some."""

    name: str
    pid: int
    in_flight: int | Missing
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipAnswered(Event):
    """A worker's answer when it was to become `to`, in another role: its registration there, or why not.

    `error` is None if it is registered under `lease` (hex). `unknown`: nobody could tell, so it may have flipped.
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

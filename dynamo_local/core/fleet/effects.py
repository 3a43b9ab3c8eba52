"""Effects: `step` returns them, and the controller has them carried out (`arbiter.effects.EffectRunner`).

`Lock` is carried out before anything else; if it is refused, the step never happened. `CallOff` takes effect with the
step. `Commit` comes next: intent is written before it is acted on. The other effects are carried out once that is
written, in the order given for each worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.fleet.lifecycle import Transition
from dynamo_local.core.notes import About
from dynamo_local.core.types import WorkerState


@dataclass(frozen=True, slots=True)
class Note:
    """A step orders something about a worker whose state does not change: a line of its story in the event log.

    `event` is the kind of the event that the step was taken for. The log's record has `"aside": true`, which is public.
    """

    name: str
    component: str
    state: WorkerState
    event: str
    stimulus_id: str


@dataclass(frozen=True, slots=True)
class Lock:
    """Reserve these devices for that worker, host-wide; those that we hold already stay ours."""

    name: str
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unlock:
    """Give these devices back: our part of their locks ends."""

    name: str
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the entries of these workers (gone ones are removed), with `head` the run itself; log the rest.

    Without names and head there is nothing to write, and only the log is waited for.
    """

    names: tuple[str, ...]
    transitions: tuple[Transition, ...] = ()
    head: bool = False
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Spawn:
    """Make the worker's process. `first`: none has run under this name, so an old log file is put aside."""

    name: str
    stimulus_id: str
    first: bool = False


@dataclass(frozen=True, slots=True)
class CallOff:
    """Do not begin the worker's `Spawn`: it has not been begun yet."""

    name: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Revoke a lease (hex) of the worker.

    With `tells` that asks it to leave, and a failure is reported (`RevokeFailed`). Without, its process is gone, and a
    failure only means that the lease expires by itself.
    """

    name: str
    lease: str
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Signal:
    """Ask the worker to leave: SIGTERM to its process."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """SIGKILL to everything in the session of the worker's process."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class CallBack:
    """Have the worker take its drain back. `told`: it was given the sign to leave, and may not have seen it yet.

    `requested_by` is the command whose person waits for the answer (None: nobody waits).
    """

    name: str
    pid: int
    signalled: bool
    requested_by: str | None = None


@dataclass(frozen=True, slots=True)
class FlipRole:
    """Have the worker take over the role of that component, under the name `to`. Asked again it says how far it is."""

    name: str
    pid: int
    to: str
    component: str


@dataclass(frozen=True, slots=True)
class CallOffFlip:
    """Have the worker stay in its role, if it is not too late. The answer to `FlipRole` says whether it was."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Rename:
    """The supervisor's watcher `was`, whose process is `pid`, is the worker's from now on."""

    name: str
    was: str
    pid: int


@dataclass(frozen=True, slots=True)
class Order:
    """Tell the worker to sleep at that level, or (None) to wake: order number `order`.

    The worker itself says when it does. The same order may come twice.
    """

    name: str
    pid: int
    order: int
    level: int | None


@dataclass(frozen=True, slots=True)
class CountRequests:
    """Ask the worker what it still holds."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class LookUpKey:
    """Ask the registry whether the worker's ready key, which was under that lease, has been removed."""

    name: str
    pid: int
    lease: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """End what the worker's process left behind outside of its session; `born` is its name there where it is another
    one, since its role has changed."""

    name: str
    spawned_as: str | None = None


@dataclass(frozen=True, slots=True)
class LookAtGpus:
    """Sample the devices now."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the supervisor's watcher of a worker whose process is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class Tell:
    """A person should know; `about` says until when it is worth a note in the status."""

    text: str
    about: About = None


@dataclass(frozen=True, slots=True)
class Report:
    """A worker failed, for that reason, in that state: tell it with the end of its log. It may be past it by then."""

    name: str
    reason: str
    state: WorkerState


Effect = (
    Lock
    | Unlock
    | Commit
    | Spawn
    | CallOff
    | Revoke
    | Signal
    | EndSession
    | CallBack
    | FlipRole
    | CallOffFlip
    | Rename
    | Order
    | CountRequests
    | LookUpKey
    | Sweep
    | LookAtGpus
    | Forget
    | Tell
    | Report
)


def describe(effect: Effect) -> str:
    """For a person: `revoke 694d967d`, `spawn`."""
    match effect:
        case Commit():
            return "commit"
        case Lock(uuids=uuids) | Unlock(uuids=uuids):
            return f"{type(effect).__name__.lower()} {', '.join(uuids)}"
        case Revoke(lease=lease):
            return f"revoke {lease}"
        case Signal(pid=pid):
            return f"SIGTERM {pid}"
        case EndSession(pid=pid):
            return f"end session {pid}"
        case CallOff():
            return "call off spawn"
        case CallBack():
            return "call back"
        case FlipRole(to=to):
            return f"flip to {to}"
        case CallOffFlip():
            return "call off flip"
        case Rename(was=was):
            return f"rename {was}"
        case Order(level=level):
            return "order to wake" if level is None else f"order to sleep at level {level}"
        case CountRequests():
            return "count requests"
        case LookUpKey(lease=lease):
            return f"look up key of {lease}"
        case LookAtGpus():
            return "look at GPUs"
        case Tell(text=text):
            return f"tell: {text}"
        case Report(reason=reason):
            return f"report: {reason}"
    return type(effect).__name__.lower()

"""The life of a managed worker, as one table.

The rules, in prose:

* An entry begins *pending*: it exists, its process does not; it may wait for a GPU to be returned.
* `SpawnRequested` is committed before the process is made, so *starting* means "there may be a process".
  `Spawned` then only adds the pid.
* *ready* is observed (`Registered`: its keys are in etcd and it publishes load), never assumed.
* Leaving politely is *draining*, whoever began it: `DrainRequested` by us, `LeaseRevoked` from outside.
  A drain that is taken back ends in `DrainCancelled` once the worker has registered again.
  Whatever the exit code, a draining worker that is gone has *exited*: it was leaving and is not restarted.
* A process that goes unasked has *crashed*, exit code 0 included; so has one that hangs (`HealthFailed`), also
  where its lease has expired of that first, which looked like a drain; and so has one that was silent when its lease
  ended, was not asked to leave by us, and ended by a signal or with another code than 0.
* A crash, and a start past its deadline, end in *backing off* (then *starting* again) or *faulted*. So does the exit
  of a worker whose lease somebody else revoked, under `on-foreign-revoke: restart`.
  `BackoffStarted`, `Faulted` and `Removed` are given only when no process is left: the GPU goes with the
  process, not with the state.
* Past its deadline a drain is *drain timed out* until the killed session is gone, then *exited*.
* `RestartRequested` by a person clears a fault, skips a back-off, and brings an exited entry back.
* *flipping* is committed before the worker is asked to change its role (`FlipRequested`). It ends as *ready* in the
  new role, under its new name (`Flipped`, observed), or in the old one (`FlipFailed`, what the worker answered).
* A worker on standby is *falling asleep* from `SleepRequested` on (it finishes its streams, then its engine lets go of
  the GPU), *sleeping* once it says so (`Slept`), *waking* from `WakeRequested` to `Woken`. What its lease's end means
  there (`LeaseRevoked`) is known only when its process ends: it serves nobody who would have to be told.
* Observations that may arrive late (`Spawned`, `Registered`, `LeaseRevoked`, `ProcessExited`) are legal
  wherever a race can bring them; a command that makes no sense is illegal.

Illegal events raise `IllegalTransition` and change nothing. Each event carries the `stimulus_id` of what caused it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynamo_local.core.types import Missing
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError


class IllegalTransition(DynamoError):
    """The event makes no sense in this state; nothing was changed."""

    code: ClassVar[str] = "illegal_transition"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleEvent:
    """Base of all events. `stimulus_id` names the cause: a command, a planner tick, an observation."""

    stimulus_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequested(LifecycleEvent):
    """We are about to make the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned(LifecycleEvent):
    """The process exists."""

    pid: int
    pid_start_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed(LifecycleEvent):
    """The process could not be made (no such program, no memory), or was called off before it was begun."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(LifecycleEvent):
    """All its endpoints are in etcd under `lease` (hex) and it publishes load."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(LifecycleEvent):
    """We ask it to leave: take nothing new, finish what streams, exit."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRevoked(LifecycleEvent):
    """Its lease is gone because somebody revoked it (ours included), not because etcd lost it."""

    lease: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCancelled(LifecycleEvent):
    """The drain was taken back, and the worker has registered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(LifecycleEvent):
    """The process is gone. `exit_code` is negative for a signal, None where nobody could collect it."""

    exit_code: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFailed(LifecycleEvent):
    """It lives and does not answer: treated as crashed, its session is being ended. Or it has died like that."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDeadlinePassed(LifecycleEvent):
    """Not ready within its start deadline; its session is being ended."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDeadlinePassed(LifecycleEvent):
    """Not gone within its drain deadline; its session is being ended."""

    deadline_s: float
    requests_cut: int | Missing = Missing("not counted")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffStarted(LifecycleEvent):
    """It will be started again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffElapsed(LifecycleEvent):
    """The back-off is over; we are about to make the process again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(LifecycleEvent):
    """It failed too often; only a person restarts it now."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipRequested(LifecycleEvent):
    """We ask it to change its role; it `becomes` a worker of that name."""

    becomes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flipped(LifecycleEvent):
    """It has registered in its new role under `lease` (hex); until now it was called `was`."""

    was: str
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipFailed(LifecycleEvent):
    """It has stayed in its role, or has gone back to it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRequested(LifecycleEvent):
    """We ask it to sleep: take nothing new, finish what streams, let go of the GPU. `level` is the engine's, 1 or 2."""

    level: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept(LifecycleEvent):
    """It sleeps: nothing is sent to it, and its engine has let go of the GPU."""

    level: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepCancelled(LifecycleEvent):
    """It does not sleep after all, and serves as before."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeRequested(LifecycleEvent):
    """We ask it to wake, and to take requests again."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken(LifecycleEvent):
    """Its engine answers as it did before it slept, and its endpoints are in etcd again."""


STARTS = (SpawnRequested, BackoffElapsed)
"""The events that commit that a process is about to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested(LifecycleEvent):
    """A person (or `scale +1`) wants it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(LifecycleEvent):
    """It is wanted no more and has no process to wait for."""


NEXT: dict[tuple[S, type[LifecycleEvent]], S] = {
    (S.PENDING, SpawnRequested): S.STARTING,
    (S.PENDING, StartDeadlinePassed): S.START_TIMED_OUT,
    (S.PENDING, Removed): S.EXITED,
    (S.STARTING, Spawned): S.STARTING,
    (S.STARTING, SpawnFailed): S.CRASHED,
    (S.STARTING, Registered): S.READY,
    (S.STARTING, DrainRequested): S.DRAINING,
    (S.STARTING, LeaseRevoked): S.DRAINING,
    (S.STARTING, ProcessExited): S.CRASHED,
    (S.STARTING, StartDeadlinePassed): S.START_TIMED_OUT,
    (S.READY, Registered): S.READY,
    (S.READY, DrainRequested): S.DRAINING,
    (S.READY, LeaseRevoked): S.DRAINING,
    (S.READY, ProcessExited): S.CRASHED,
    (S.READY, HealthFailed): S.CRASHED,
    (S.DRAINING, Spawned): S.DRAINING,
    (S.DRAINING, Registered): S.DRAINING,
    (S.DRAINING, LeaseRevoked): S.DRAINING,
    (S.DRAINING, DrainCancelled): S.READY,
    (S.DRAINING, ProcessExited): S.EXITED,
    (S.DRAINING, SpawnFailed): S.EXITED,
    (S.DRAINING, DrainDeadlinePassed): S.DRAIN_TIMED_OUT,
    (S.DRAINING, HealthFailed): S.CRASHED,
    (S.DRAIN_TIMED_OUT, LeaseRevoked): S.DRAIN_TIMED_OUT,
    (S.DRAIN_TIMED_OUT, ProcessExited): S.EXITED,
    (S.CRASHED, LeaseRevoked): S.CRASHED,
    (S.CRASHED, ProcessExited): S.CRASHED,
    (S.CRASHED, BackoffStarted): S.BACKING_OFF,
    (S.CRASHED, Faulted): S.FAULTED,
    (S.CRASHED, Removed): S.EXITED,
    (S.START_TIMED_OUT, LeaseRevoked): S.START_TIMED_OUT,
    (S.START_TIMED_OUT, ProcessExited): S.START_TIMED_OUT,
    (S.START_TIMED_OUT, BackoffStarted): S.BACKING_OFF,
    (S.START_TIMED_OUT, Faulted): S.FAULTED,
    (S.START_TIMED_OUT, RestartRequested): S.PENDING,
    (S.START_TIMED_OUT, Removed): S.EXITED,
    (S.BACKING_OFF, BackoffElapsed): S.STARTING,
    (S.BACKING_OFF, RestartRequested): S.PENDING,
    (S.BACKING_OFF, Removed): S.EXITED,
    (S.FAULTED, RestartRequested): S.PENDING,
    (S.FAULTED, Removed): S.EXITED,
    (S.EXITED, RestartRequested): S.PENDING,
    (S.READY, SleepRequested): S.FALLING_ASLEEP,
    (S.READY, Slept): S.SLEEPING,
    (S.FALLING_ASLEEP, Slept): S.SLEEPING,
    (S.FALLING_ASLEEP, SleepCancelled): S.READY,
    (S.FALLING_ASLEEP, WakeRequested): S.WAKING,
    (S.FALLING_ASLEEP, DrainRequested): S.DRAINING,
    (S.FALLING_ASLEEP, LeaseRevoked): S.DRAINING,
    (S.FALLING_ASLEEP, ProcessExited): S.CRASHED,
    (S.FALLING_ASLEEP, HealthFailed): S.CRASHED,
    (S.SLEEPING, WakeRequested): S.WAKING,
    (S.SLEEPING, DrainRequested): S.DRAINING,
    (S.SLEEPING, LeaseRevoked): S.DRAINING,
    (S.SLEEPING, ProcessExited): S.CRASHED,
    (S.SLEEPING, HealthFailed): S.CRASHED,
    (S.WAKING, Woken): S.READY,
    (S.WAKING, SleepRequested): S.FALLING_ASLEEP,
    (S.WAKING, DrainRequested): S.DRAINING,
    (S.WAKING, LeaseRevoked): S.DRAINING,
    (S.WAKING, ProcessExited): S.CRASHED,
    (S.WAKING, HealthFailed): S.CRASHED,
    (S.EXITED, BackoffStarted): S.BACKING_OFF,
    (S.EXITED, Faulted): S.FAULTED,
    (S.READY, FlipRequested): S.FLIPPING,
    (S.FLIPPING, Flipped): S.READY,
    (S.FLIPPING, FlipFailed): S.READY,
    (S.FLIPPING, Registered): S.FLIPPING,
    (S.FLIPPING, LeaseRevoked): S.FLIPPING,
    (S.FLIPPING, DrainRequested): S.DRAINING,
    (S.FLIPPING, ProcessExited): S.CRASHED,
    (S.FLIPPING, HealthFailed): S.CRASHED,
}


def apply(state: S, event: LifecycleEvent) -> S:
    """The state after the event. Raises `IllegalTransition`, which names both and what would be legal."""
    try:
        return NEXT[state, type(event)]
    except KeyError:
        legal = ", ".join(kind.__name__ for kind in legal_events(state))
        raise IllegalTransition(
            f"{type(event).__name__} (cause {event.stimulus_id}) is not possible for a worker that is "
            f"{state.value}; possible are: {legal}",
            state=state.value,
            event=type(event).__name__,
        ) from None


def legal_events(state: S) -> tuple[type[LifecycleEvent], ...]:
    """What may happen in this state, in the table's order."""
    return tuple(kind for (source, kind) in NEXT if source is state)


def mermaid() -> str:
    """The table as a mermaid state diagram, for the docs; events that lead to the same state are joined."""
    arrows: dict[tuple[S, S], list[str]] = {}
    for (source, kind), target in NEXT.items():
        arrows.setdefault((source, target), []).append(kind.__name__)
    lines = ["stateDiagram-v2", f"    [*] --> {S.PENDING.value}"]
    for (source, target), kinds in arrows.items():
        lines.append(f"    {source.value} --> {target.value}: {', '.join(kinds)}")
    lines.append(f"    {S.EXITED.value} --> [*]")
    return "\n".join(lines) + "\n"

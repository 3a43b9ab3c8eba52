"""The life of a managed worker, as one table.

The rules, in prose:

* An entry begins *pending*: the entry exists, its process does not. It may wait for a GPU to be returned.
* `SpawnRequested` is committed before the process is made, so *starting* means "there may be a process".
  `Spawned` then only adds the pid.
* *ready* is observed (`Registered`: its keys are in etcd and it publishes load), never assumed.
* Leaving politely is *draining*, whoever began it: `DrainRequested` by us, `LeaseRevoked` from outside.
  A drain that is taken back ends in `DrainCancelled` once the worker has registered again.
  Whatever the exit code, a draining worker that is gone has *exited*: it was leaving and is not restarted.
* A process that ends unasked has *crashed*, also with exit code 0. So has one that hangs (`HealthFailed`), even if its
  lease expired of that first, which looked like a drain. So has one that was silent when its lease ended, was not asked
  to leave by us, and ended by a signal or with another code than 0.
* A crash, and a start past its deadline, end in *backing off* (then *starting* again) or *faulted*. So does the exit
  of a worker whose lease somebody else revoked, under `on-foreign-revoke: restart`.
  `BackoffStarted`, `Faulted` and `Removed` are given only when no process is left: the GPU goes with the
  process, not with the state.
* Past its deadline a drain is *drain timed out* until the killed session is gone, then *exited*.
* `RestartRequested` by a person clears a fault, skips a back-off, and brings an exited entry back.
* *flipping* is committed before the worker is asked to change its role (`FlipRequested`). It ends as *ready* in the
  new role, under its new name (`Flipped`, observed), or in the old one (`FlipFailed`, what the worker answered).
* A worker on standby is *falling asleep* from `SleepRequested` on: it finishes its streams, then its engine releases
  the GPU. It is *sleeping* once it says so (`Slept`), and *waking* from `WakeRequested` to `Woken`. If its lease ends
  (`LeaseRevoked`), only the end of its process shows what that meant: it serves no request.
* Observations that may arrive late (`Spawned`, `Registered`, `LeaseRevoked`, `ProcessExited`) are legal
  wherever a race can bring them; a command that makes no sense is illegal.

An illegal transition raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError


class IllegalTransition(DynamoError):
    """The event makes no sense in this state; nothing was changed."""

    code: ClassVar[str] = "illegal_transition"


class TransitionKind(enum.StrEnum):
    """Everything that may happen to a worker. The values are names in the event log: they are public.

    Behind each kind stand the details that its record has beside the names, the states and the cause.
    """

    SPAWN_REQUESTED = "SpawnRequested"
    """We are about to make the process."""
    SPAWNED = "Spawned"
    """The process exists: `pid`, `pid_start_time`."""
    SPAWN_FAILED = "SpawnFailed"
    """The process could not be made (no such program, no memory), or was called off before it was begun: `reason`."""
    REGISTERED = "Registered"
    """All its endpoints are in etcd under `lease` (hex), and it publishes load."""
    DRAIN_REQUESTED = "DrainRequested"
    """We ask it to leave: take nothing new, finish what streams, exit. `reason`."""
    LEASE_REVOKED = "LeaseRevoked"
    """Its `lease` is gone because somebody revoked it (ours included), not because etcd lost it."""
    DRAIN_CANCELLED = "DrainCancelled"
    """The drain was taken back, and the worker has registered again."""
    PROCESS_EXITED = "ProcessExited"
    """The process is gone. `exit_code` is negative for a signal, None where nobody could collect it.
    `requests_abandoned`: requests that it ended in its drain because their clients did not read, if any."""
    HEALTH_FAILED = "HealthFailed"
    """It lives and does not answer (`reason`): it counts as crashed, its session is being ended. Or it has died so."""
    START_DEADLINE_PASSED = "StartDeadlinePassed"
    """Not ready within `deadline_s`; its session is being ended."""
    DRAIN_DEADLINE_PASSED = "DrainDeadlinePassed"
    """Not gone within `deadline_s`; its session is being ended. `requests_cut` may be Missing."""
    BACKOFF_STARTED = "BackoffStarted"
    """It will be started again after `delay_s`."""
    BACKOFF_ELAPSED = "BackoffElapsed"
    """The back-off is over; we are about to make the process again."""
    FAULTED = "Faulted"
    """It failed too often (`reason`); only a person restarts it now."""
    FLIP_REQUESTED = "FlipRequested"
    """We ask it to change its role. The name that it gets is in `becomes`."""
    FLIPPED = "Flipped"
    """It has registered in its new role under `lease` (hex); until now its name `was` another."""
    FLIP_FAILED = "FlipFailed"
    """It has stayed in its role, or has gone back to it: `reason`."""
    SLEEP_REQUESTED = "SleepRequested"
    """We ask it to sleep: take nothing new, finish what streams, release the GPU. `level` (1 or 2), `reason`."""
    SLEPT = "Slept"
    """It sleeps at that `level`: nothing is sent to it, and its engine has released the GPU."""
    SLEEP_CANCELLED = "SleepCancelled"
    """It does not sleep after all, and serves as before: `reason`."""
    WAKE_REQUESTED = "WakeRequested"
    """We ask it to wake, and to take requests again: `reason`."""
    WOKEN = "Woken"
    """Its engine answers as it did before it slept, and its endpoints are in etcd again."""
    RESTART_REQUESTED = "RestartRequested"
    """A person (or `scale +1`) wants it again."""
    REMOVED = "Removed"
    """It is wanted no more and has no process to wait for."""


K = TransitionKind

STARTS = (K.SPAWN_REQUESTED, K.BACKOFF_ELAPSED)
"""The kinds that commit that a process is about to be made."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of one worker: a line of the event log. `stimulus_id` is its cause."""

    name: str
    component: str
    before: S
    after: S
    kind: TransitionKind
    stimulus_id: str
    #: As `TransitionKind` lists them.
    details: Mapping[str, Any] = field(default_factory=dict)


NEXT: dict[tuple[S, K], S] = {
    (S.PENDING, K.SPAWN_REQUESTED): S.STARTING,
    (S.PENDING, K.START_DEADLINE_PASSED): S.START_TIMED_OUT,
    (S.PENDING, K.REMOVED): S.EXITED,
    (S.STARTING, K.SPAWNED): S.STARTING,
    (S.STARTING, K.SPAWN_FAILED): S.CRASHED,
    (S.STARTING, K.REGISTERED): S.READY,
    (S.STARTING, K.DRAIN_REQUESTED): S.DRAINING,
    (S.STARTING, K.LEASE_REVOKED): S.DRAINING,
    (S.STARTING, K.PROCESS_EXITED): S.CRASHED,
    (S.STARTING, K.START_DEADLINE_PASSED): S.START_TIMED_OUT,
    (S.READY, K.REGISTERED): S.READY,
    (S.READY, K.DRAIN_REQUESTED): S.DRAINING,
    (S.READY, K.LEASE_REVOKED): S.DRAINING,
    (S.READY, K.PROCESS_EXITED): S.CRASHED,
    (S.READY, K.HEALTH_FAILED): S.CRASHED,
    (S.DRAINING, K.SPAWNED): S.DRAINING,
    (S.DRAINING, K.REGISTERED): S.DRAINING,
    (S.DRAINING, K.LEASE_REVOKED): S.DRAINING,
    (S.DRAINING, K.DRAIN_CANCELLED): S.READY,
    (S.DRAINING, K.PROCESS_EXITED): S.EXITED,
    (S.DRAINING, K.SPAWN_FAILED): S.EXITED,
    (S.DRAINING, K.DRAIN_DEADLINE_PASSED): S.DRAIN_TIMED_OUT,
    (S.DRAINING, K.HEALTH_FAILED): S.CRASHED,
    (S.DRAIN_TIMED_OUT, K.LEASE_REVOKED): S.DRAIN_TIMED_OUT,
    (S.DRAIN_TIMED_OUT, K.PROCESS_EXITED): S.EXITED,
    (S.CRASHED, K.LEASE_REVOKED): S.CRASHED,
    (S.CRASHED, K.PROCESS_EXITED): S.CRASHED,
    (S.CRASHED, K.BACKOFF_STARTED): S.BACKING_OFF,
    (S.CRASHED, K.FAULTED): S.FAULTED,
    (S.CRASHED, K.REMOVED): S.EXITED,
    (S.START_TIMED_OUT, K.LEASE_REVOKED): S.START_TIMED_OUT,
    (S.START_TIMED_OUT, K.PROCESS_EXITED): S.START_TIMED_OUT,
    (S.START_TIMED_OUT, K.BACKOFF_STARTED): S.BACKING_OFF,
    (S.START_TIMED_OUT, K.FAULTED): S.FAULTED,
    (S.START_TIMED_OUT, K.RESTART_REQUESTED): S.PENDING,
    (S.START_TIMED_OUT, K.REMOVED): S.EXITED,
    (S.BACKING_OFF, K.BACKOFF_ELAPSED): S.STARTING,
    (S.BACKING_OFF, K.RESTART_REQUESTED): S.PENDING,
    (S.BACKING_OFF, K.REMOVED): S.EXITED,
    (S.FAULTED, K.RESTART_REQUESTED): S.PENDING,
    (S.FAULTED, K.REMOVED): S.EXITED,
    (S.EXITED, K.RESTART_REQUESTED): S.PENDING,
    (S.READY, K.SLEEP_REQUESTED): S.FALLING_ASLEEP,
    (S.READY, K.SLEPT): S.SLEEPING,
    (S.FALLING_ASLEEP, K.SLEPT): S.SLEEPING,
    (S.FALLING_ASLEEP, K.SLEEP_CANCELLED): S.READY,
    (S.FALLING_ASLEEP, K.WAKE_REQUESTED): S.WAKING,
    (S.FALLING_ASLEEP, K.DRAIN_REQUESTED): S.DRAINING,
    (S.FALLING_ASLEEP, K.LEASE_REVOKED): S.DRAINING,
    (S.FALLING_ASLEEP, K.PROCESS_EXITED): S.CRASHED,
    (S.FALLING_ASLEEP, K.HEALTH_FAILED): S.CRASHED,
    (S.SLEEPING, K.WAKE_REQUESTED): S.WAKING,
    (S.SLEEPING, K.DRAIN_REQUESTED): S.DRAINING,
    (S.SLEEPING, K.LEASE_REVOKED): S.DRAINING,
    (S.SLEEPING, K.PROCESS_EXITED): S.CRASHED,
    (S.SLEEPING, K.HEALTH_FAILED): S.CRASHED,
    (S.WAKING, K.WOKEN): S.READY,
    (S.WAKING, K.SLEEP_REQUESTED): S.FALLING_ASLEEP,
    (S.WAKING, K.DRAIN_REQUESTED): S.DRAINING,
    (S.WAKING, K.LEASE_REVOKED): S.DRAINING,
    (S.WAKING, K.PROCESS_EXITED): S.CRASHED,
    (S.WAKING, K.HEALTH_FAILED): S.CRASHED,
    (S.EXITED, K.BACKOFF_STARTED): S.BACKING_OFF,
    (S.EXITED, K.FAULTED): S.FAULTED,
    (S.READY, K.FLIP_REQUESTED): S.FLIPPING,
    (S.FLIPPING, K.FLIPPED): S.READY,
    (S.FLIPPING, K.FLIP_FAILED): S.READY,
    (S.FLIPPING, K.REGISTERED): S.FLIPPING,
    (S.FLIPPING, K.LEASE_REVOKED): S.FLIPPING,
    (S.FLIPPING, K.DRAIN_REQUESTED): S.DRAINING,
    (S.FLIPPING, K.PROCESS_EXITED): S.CRASHED,
    (S.FLIPPING, K.HEALTH_FAILED): S.CRASHED,
}


def apply(state: S, kind: TransitionKind, cause: str = "") -> S:
    """The state afterwards. Raises `IllegalTransition`, which names both and what would be legal."""
    try:
        return NEXT[state, kind]
    except KeyError:
        legal = ", ".join(legal_kinds(state))
        raise IllegalTransition(
            f"{kind} (cause {cause}) is not possible for a worker that is {state.value}; possible are: {legal}",
            state=state.value,
            event=str(kind),
        ) from None


def legal_kinds(state: S) -> tuple[TransitionKind, ...]:
    """The kinds that are possible in this state, in the table's order."""
    return tuple(kind for (source, kind) in NEXT if source is state)


def mermaid() -> str:
    """The table as a mermaid state diagram, for the docs; kinds that lead to the same state are joined."""
    arrows: dict[tuple[S, S], list[str]] = {}
    for (source, kind), target in NEXT.items():
        arrows.setdefault((source, target), []).append(kind)
    lines = ["stateDiagram-v2", f"    [*] --> {S.PENDING.value}"]
    for (source, target), kinds in arrows.items():
        lines.append(f"    {source.value} --> {target.value}: {', '.join(kinds)}")
    lines.append(f"    {S.EXITED.value} --> [*]")
    return "\n".join(lines) + "\n"

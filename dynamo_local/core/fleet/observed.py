"""Observations: workers' keys in etcd, their answers, and whether etcd and NATS answer at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet import flipping, sleeping, starting
from dynamo_local.core.fleet.backoff import NOTICED_LATE_S, forgive
from dynamo_local.core.fleet.builder import STARTED_AGAIN, StepBuilder
from dynamo_local.core.fleet.events import (
    FlipAnswered,
    InfraSeen,
    KeyGone,
    KeyLookedUp,
    KeyPut,
    LoadsHeard,
    RegistryListed,
    Stalled,
)
from dynamo_local.core.fleet.fleet import Intent, Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import Load, Missing
from dynamo_local.core.types import WorkerState as S

STALE_S = 3.0
"""A load older than three samples is none."""
SILENCE_COUNTED_MAX_S = 3.0
"""Between two samples no more than this is held against who did not answer the second: if more time has passed, it was
the arbiter that did not ask."""
ABSENT_FOR_S = 10.0
"""Wait for keys that are missing after an outage of etcd. A worker renews its lease every few seconds, and writes its
keys again if etcd lost them. After a lease's time to live no worker does."""


# --- the registry ----------------------------------------------------------------------------------


def key_put(builder: StepBuilder, seen: KeyPut) -> None:
    """It has registered: it is ready, or has come back from a drain, or was asked to leave in that moment."""
    turned = flipping.awaited(builder, seen.name, seen.pid)
    if turned is not None and not seen.failed:
        flipping.become(builder, turned, seen.lease, seen.endpoints, seen.other_leases)
        return
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid:
        return  # a key of a worker that is gone, or has another name now, until its lease is
    if seen.failed:
        # Its exit is a crash, its key's end no drain.
        builder.change(seen.name, engine_failed=True, engine_said=seen.why)
        return
    new = worker.lease != seen.lease
    keys: dict[str, Any] = {"lease": seen.lease, "endpoints": seen.endpoints, "other_leases": seen.other_leases}
    builder.change(seen.name, **keys, absent_s=None)
    if sleeping.heard(builder, builder.worker(seen.name), seen):
        builder.change(seen.name, lease_gone=False)
        return
    registered = {"lease": seen.lease}
    returned = new and worker.intent is Intent.RETURNING and worker.leave.calls <= 1
    if worker.state is S.DRAINING and (worker.leave.requested_at_s is None or returned):
        # Its lease had only expired (it was suspended, or etcd was away) and it has come back by itself. Or it was
        # called back, and this is seen before its answer, or instead of that. If it was called back twice, this may be
        # the first time, and the signal to leave that came between is still on its way.
        builder.apply(seen.name, K.DRAIN_CANCELLED, **leaving.stays(worker))
    elif worker.state is S.DRAINING and new:
        # It was asked to leave and has registered again: it came back from a drain that was ordered once more.
        builder.apply(seen.name, K.REGISTERED, registered)
        leaving.ask(builder, seen.name)
    elif worker.state is S.STARTING or (TRAITS[worker.state].registers and new):
        builder.apply(seen.name, K.REGISTERED, registered, **({"due_s": None} if worker.state is S.STARTING else {}))


def key_gone(builder: StepBuilder, seen: KeyGone) -> None:
    """Its key is gone while the process lives: nothing is routed to it any more."""
    worker = builder.get(seen.name)
    if worker is not None and worker.runs and worker.lease == seen.lease:
        unregistered(builder, worker, seen.lease, "its lease was revoked or has expired")


def key_looked_up(builder: StepBuilder, seen: KeyLookedUp) -> None:
    """Its process had ended in order before anything was heard of its key: now it is known which came first."""
    worker = builder.get(seen.name)
    if worker is None or worker.pid != seen.pid or worker.ended.exit is None:
        return
    if seen.removed and worker.lease == seen.lease:
        unregistered(builder, worker, seen.lease, "its lease was revoked or has expired")
    starting.exited(builder, builder.worker(seen.name), worker.ended.exit)


def unregistered(builder: StepBuilder, worker: Worker, lease: str, why: str) -> None:
    """Nothing of it is in the registry any more: it leaves, unless its engine has died, which its exit will tell."""
    gone: dict[str, Any] = {"lease": None, "endpoints": (), "absent_s": None}
    if worker.health.engine_failed or not TRAITS[worker.state].registers:
        builder.change(worker.name, **gone, lease_gone=worker.leave.lease_gone or TRAITS[worker.state].standby)
        return
    revoked, cause = {"lease": lease}, f"etcd:{lease}"
    if worker.state is S.FLIPPING:  # it gives it back itself; what becomes of it, its answer or its new key will tell
        builder.apply(worker.name, K.LEASE_REVOKED, revoked, by=cause, **gone)
        return
    ours = worker.state is S.DRAINING
    guess: dict[str, Any] = {} if ours else {"due_s": None, "silent_at_expiry": _unheard(worker)}
    if not ours and _comes_back(builder, worker):
        guess["intent"] = Intent.RESTARTING
        why += STARTED_AGAIN
    guess |= {"lease_gone": not ours, "reason": worker.reason or why}
    builder.apply(worker.name, K.LEASE_REVOKED, revoked, by=cause, **gone, **guess)


def _comes_back(builder: StepBuilder, worker: Worker) -> bool:
    """Whether one whose lease somebody else has revoked is started again once it has left."""
    return builder.fleet.restart_revoked and worker.intent is Intent.STEADY and builder.fleet.leaving is None


def left_unseen(builder: StepBuilder, worker: Worker) -> None:
    """It has written itself that it drains because its lease is gone; no arbiter has decided what follows that."""
    if (
        worker.leave.lease_gone
        and worker.leave.requested_at_s is None
        and worker.state is S.DRAINING
        and _comes_back(builder, worker)
    ):
        reason = (worker.reason or "its lease was revoked, or has expired, while nobody watched") + STARTED_AGAIN
        builder.change(worker.name, intent=Intent.RESTARTING, reason=reason)


def registry_listed(builder: StepBuilder, seen: RegistryListed) -> None:
    """The whole registry, as it is after etcd could not be watched: a key that is not in it may have been removed."""
    for worker in builder.workers():
        if not worker.runs or worker.lease is None:
            continue
        there = (worker.name, worker.lease) in seen.keys
        if there and worker.registration.absent_s is not None:
            builder.change(worker.name, absent_s=None)
        elif not there and worker.registration.absent_s is None:
            builder.change(worker.name, absent_s=builder.now_s)


def absent(builder: StepBuilder, worker: Worker) -> None:
    """Nobody has written its key again: its lease was revoked while etcd could not be watched."""
    unregistered(
        builder, worker, worker.lease or "", "its lease was revoked, or expired, while etcd could not be watched"
    )


def infra_seen(builder: StepBuilder, seen: InfraSeen) -> None:
    """etcd or NATS went away, or both are back."""
    if seen.ok == builder.fleet.infra_ok:
        return
    builder.set(infra_ok=seen.ok)
    if seen.ok:
        starting.infra_is_back(builder)
        return
    since_s = builder.now_s - NOTICED_LATE_S
    for worker in builder.workers():
        history = forgive(worker.history, since_s=since_s)
        if history == worker.history:
            continue
        builder.change(worker.name, history=history)
        if worker.state is S.BACKING_OFF and worker.due_s is not None:
            builder.change(worker.name, due_s=None, waiting_for_infra=True)


# --- answers ---------------------------------------------------------------------------------------


def loads_heard(builder: StepBuilder, seen: LoadsHeard) -> None:
    """Loads of those who answered. One that stays silent while it could be asked is hung.

    Only time in which it was asked counts: an arbiter that was suspended itself has asked nobody.
    """
    now_s, before_s = builder.now_s, builder.fleet.sampled_s
    passed_s = 0.0 if before_s is None else min(now_s - before_s, SILENCE_COUNTED_MAX_S)
    builder.set(sampled_s=now_s)
    for worker in builder.workers():
        load = _load_of(seen, worker)
        if load is not None:
            if (
                load != worker.load or worker.health.unheard_s or worker.health.heard_s is None
            ):  # else there is nothing new
                heard_s = now_s if worker.health.heard_s is None else worker.health.heard_s
                builder.change(worker.name, load=load, heard_s=heard_s, unheard_s=0.0, silent_s=0.0)
            continue
        if not worker.runs:
            continue
        counted = worker.health.heard_s is not None and not seen.blameless
        silent_s = worker.health.silent_s + passed_s if counted else 0.0
        builder.change(worker.name, unheard_s=worker.health.unheard_s + passed_s, silent_s=silent_s)
        if _unheard(builder.worker(worker.name)):
            builder.change(worker.name, load=Missing("no answer"))
        if silent_s > builder.fleet.health_bound_s and builder.fleet.leaving is None:
            reason = f"is hung: it has answered nothing for {silent_s:.0f} s"
            leaving.hung(builder, builder.worker(worker.name), reason)


def _load_of(seen: LoadsHeard, worker: Worker) -> Load | None:
    """Its answer. One that has changed its role answers under its new name before anybody has heard of that."""
    load = seen.loads.get(worker.name)
    return seen.loads.get(worker.flip.name) if load is None and worker.flip is not None else load


def _unheard(worker: Worker) -> bool:
    """For longer than a load is good for. A lease outlives a worker that is stopped by more than that."""
    return worker.health.heard_s is None or worker.health.unheard_s > STALE_S


def flip_answered(builder: StepBuilder, seen: FlipAnswered) -> None:
    """It has changed its role, or has not. One that stays, and is not registered any more, leaves."""
    flipping.answered(builder, seen)
    worker = builder.get(seen.name)
    if worker is not None and worker.runs and worker.ready and worker.lease is None:
        unregistered(builder, worker, "", "its lease was revoked or has expired")


# --- time ------------------------------------------------------------------------------------------


def stalled(builder: StepBuilder, seen: Stalled) -> None:
    """Nothing could be seen for that long, so no deadline that waits for something to be seen may have run on."""
    for worker in builder.workers():
        if worker.due_s is not None and worker.state is not S.BACKING_OFF:
            builder.change(worker.name, due_s=worker.due_s + seen.for_s)
        if worker.leave.requested_at_s is not None:
            builder.change(worker.name, requested_at_s=worker.leave.requested_at_s + seen.for_s)
        if worker.registration.absent_s is not None:
            builder.change(worker.name, absent_s=worker.registration.absent_s + seen.for_s)
        if worker.ended.gpus_pending_release is not None:
            later = replace(
                worker.ended.gpus_pending_release, since_s=worker.ended.gpus_pending_release.since_s + seen.for_s
            )
            builder.change(worker.name, gpus_pending_release=later)
    builder.set(sampled_s=builder.now_s)

"""Entries of a statefile as the workers that they were, for the arbiter's successor."""

from __future__ import annotations

import logging
from dataclasses import replace

from dynamo_local.control.standby import standby_of_entry
from dynamo_local.core.life.fleet import Course, Process, Worker
from dynamo_local.core.life.moving import FlipTarget
from dynamo_local.core.life.restarts import RestartHistory
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import WorkerState, suffix_of
from dynamo_local.state import ComponentEntry
from dynamo_local.system.processes import age_s, start_time_s

log = logging.getLogger(__name__)


def worker_of(namespace: str, entry: ComponentEntry, gpus: tuple[str, ...], now_s: float) -> Worker:
    """An entry of the statefile as a worker without a process."""
    flip = _flip(namespace, entry)
    unasked = _leaves_unasked(entry)
    return Worker(
        entry.watcher_name,
        entry.component,
        entry.role,
        suffix_of(entry.watcher_name, namespace, entry.component),
        WorkerState.READY if entry.state is WorkerState.FLIPPING and flip is None else entry.state,
        since_s=now_s,
        gpus=gpus,
        course=_course(entry),
        asked_s=None if unasked else _asked_s(entry, now_s),
        lease_gone=unasked,
        reason=entry.reason,
        starts=entry.restarts + 1,
        launched=entry.launched or "",
        history=_history(entry, now_s),
        lease=entry.lease,
        other_leases=tuple(entry.other_leases or ()),
        flip=flip,
        born=entry.born,
        standby=standby_of_entry(entry.standby),
    )


def _flip(namespace: str, entry: ComponentEntry) -> FlipTarget | None:
    if entry.flip is None or entry.state is not WorkerState.FLIPPING:
        return None
    target = entry.flip
    return FlipTarget(
        target.watcher_name, target.component, suffix_of(target.watcher_name, namespace, target.component)
    )


def with_process(worker: Worker, entry: ComponentEntry, pid: int, now_s: float) -> Worker:
    """The worker with its process. Its running time is not taken from the wall clock, which may have been set since."""
    traits = TRAITS[entry.state]
    served = traits.serves or traits.leaves or traits.standby or entry.state is WorkerState.FLIPPING
    began_s = now_s - age_s(pid)
    return replace(
        worker,
        process=Process(pid, start_time_s(pid), began_s, entry.started_at),
        lease=None,  # comes from the registry, for this very pid
        served=served,
        ready_s=began_s if served else None,
        heard_s=now_s if served else None,  # its silence counts from here on
    )


def _leaves_unasked(entry: ComponentEntry) -> bool:
    """Somebody else has revoked its lease: it drains, or has left, without the dead arbiter's having asked it.

    A worker that we ask has `asked_s`, but for one that was to leave before its process was there. One that is called
    back is ours, however its drain began.
    """
    if entry.asked_s is not None or entry.course == Course.RETURNING:
        return False
    if entry.state is WorkerState.DRAINING:  # else nobody had seen its process yet
        return entry.pid_start_time is not None
    return entry.state is WorkerState.EXITED and entry.course == Course.RESTARTING


def _asked_s(entry: ComponentEntry, now_s: float) -> float | None:
    """Its deadline still counts from when it was asked."""
    if not TRAITS[entry.state].drains:
        return None
    return now_s if entry.asked_s is None else min(now_s, entry.asked_s)


def _history(entry: ComponentEntry, now_s: float) -> RestartHistory:
    """The failures by which its next restart is decided; times in the future (from before a reboot, or edited) are
    left out."""
    failures_s = tuple(at_s for at_s in entry.failures_s or () if at_s <= now_s)
    return RestartHistory(failures_s, entry.failures_streak or 0)


def _course(entry: ComponentEntry) -> Course:
    """One that is ready takes no course: that its lease was gone was a guess, and will be seen anew."""
    if TRAITS[entry.state].serves:
        return Course.STEADY
    try:
        return Course(entry.course or Course.STEADY)
    except ValueError:
        log.warning("%s: its course %r is of a newer version; left out", entry.watcher_name, entry.course)
        return Course.STEADY

"""Entries of a statefile as the workers that they were, for the arbiter's successor."""

from __future__ import annotations

import logging
from dataclasses import replace

from dynamo_local.core.life.fleet import Course, FlipTarget, Process, Worker
from dynamo_local.core.life.restarts import RestartHistory
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import WorkerState, suffix_of
from dynamo_local.state import ComponentEntry
from dynamo_local.system.processes import age_s, start_time_s

log = logging.getLogger(__name__)


def worker_of(namespace: str, entry: ComponentEntry, gpus: tuple[str, ...], now_s: float) -> Worker:
    """An entry of the statefile as a worker without a process."""
    flip = _flip(namespace, entry)
    return Worker(
        entry.watcher_name,
        entry.component,
        entry.role,
        suffix_of(entry.watcher_name, namespace, entry.component),
        WorkerState.READY if entry.state is WorkerState.FLIPPING and flip is None else entry.state,
        since_s=now_s,
        gpus=gpus,
        course=_course(entry),
        reason=entry.reason,
        starts=entry.restarts + 1,
        launched=entry.launched or "",
        history=_history(entry, now_s),
        lease=entry.lease,
        other_leases=tuple(entry.other_leases or ()),
        flip=flip,
        born=entry.born,
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
    served = TRAITS[entry.state].serves or TRAITS[entry.state].leaves or entry.state is WorkerState.FLIPPING
    began_s = now_s - age_s(pid)
    asked_s = None
    if TRAITS[entry.state].drains:  # its deadline still counts from when it was asked
        asked_s = now_s if entry.asked_s is None else min(now_s, entry.asked_s)
    return replace(
        worker,
        process=Process(pid, start_time_s(pid), began_s, entry.started_at),
        lease=None,  # comes from the registry, for this very pid
        served=served,
        ready_s=began_s if served else None,
        heard_s=now_s if served else None,  # its silence counts from here on
        asked_s=asked_s,
    )


def _history(entry: ComponentEntry, now_s: float) -> RestartHistory:
    """The failures by which its next restart is decided; times in the future (from before a reboot, or edited) are
    left out."""
    failures_s = tuple(at_s for at_s in entry.failures_s or () if at_s <= now_s)
    return RestartHistory(failures_s, entry.failures_streak or 0)


def _course(entry: ComponentEntry) -> Course:
    try:
        return Course(entry.course or Course.STEADY)
    except ValueError:
        log.warning("%s: its course %r is of a newer version; left out", entry.watcher_name, entry.course)
        return Course.STEADY

"""Counts the workers for a planner: from the fleet to two pools."""

from __future__ import annotations

from collections.abc import Collection

from dynamo_local.core.fleet import flipping, sleeping
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.types import WAKES, Actuator
from dynamo_local.planner.values import Pool, WorkerPools


def pools_of(
    fleet: Fleet,
    *,
    decode: str,
    prefill: str | None = None,
    routed: Collection[str] = (),
    actuators: frozenset[Actuator] = WAKES,
) -> WorkerPools:
    """Count the workers of the decode (or aggregated) component and of the prefill one.

    `routed` names the draining workers that still can be given a request (their key is in etcd; a prefill worker
    still pulls). Times are those of the fleet (`since_s`). One that changes its role counts where it goes to. Raises
    `UnknownWorker` for an unknown component.
    """
    return WorkerPools(
        prefill=None if prefill is None else _pool(fleet, prefill, routed, actuators),
        decode=_pool(fleet, decode, routed, actuators),
    )


def _pool(fleet: Fleet, component: str, routed: Collection[str], actuators: frozenset[Actuator]) -> Pool:
    size = fleet.template(component).gpus_per_worker
    workers = [worker for worker in fleet.workers.values() if worker.target_component == component]
    ready = [worker for worker in workers if worker.ready]
    coming = [worker for worker in workers if worker.on_its_way]
    leaving = [w for w in workers if not (w.counts or w.stands_by) and TRAITS[w.state].process is not HasProcess.NO]
    draining = [worker for worker in leaving if TRAITS[worker.state].drains]
    return Pool(
        component=component,
        gpus_per_worker=size,
        ready=len(ready),
        coming=len(coming),
        waiting=sum(_waits(worker, size) for worker in coming),
        leaving=len(leaving),
        cancellable=sum(worker.cancellable for worker in draining),
        routed=sum(worker.name in routed for worker in draining),
        gpus_held=sum(len(worker.gpus) for worker in workers),
        gpus_leaving=sum(len(worker.gpus) for worker in workers if not (worker.counts or worker.stands_by)),
        gpus_lacking=sum(max(0, size - len(worker.gpus)) for worker in coming),
        added_at_s=max((worker.since_s for worker in ready), default=None),
        coming_since_s=min((worker.since_s for worker in coming), default=None),
        leaving_since_s=min((worker.since_s for worker in leaving), default=None),
        flippable=_flippable(fleet, component) if Actuator.FLIP in actuators else 0,
        asleep=_asleep(fleet, component) if Actuator.WAKE in actuators else 0,
    )


def _flippable(fleet: Fleet, component: str) -> int:
    """One that serves stays."""
    return min(len(flipping.able_to_flip(fleet, component)), max(0, len(fleet.ready(component)) - 1))


def _asleep(fleet: Fleet, component: str) -> int:
    """Those that a wake would bring. One that is only started to sleep would take the rest of its start."""
    if not any(worker.stands_by for worker in fleet.workers.values()):
        return 0
    found = sleeping.woken_first(fleet, component, len(fleet.workers), "counted")
    return sum(TRAITS[fleet.workers[move.name].state].standby for move in found)


def _waits(worker: Worker, size: int) -> bool:
    """Whether it waits for GPUs that another worker still holds, or for the end of its back-off, to be started."""
    traits = TRAITS[worker.state]
    return traits.failed or (traits.waits and len(worker.gpus) < size)

"""The fleet as the load planner counts it: a view of all workers in, two pools out."""

from __future__ import annotations

from collections.abc import Collection

from dynamo_local.core.fleet_view import FleetView, WorkerView
from dynamo_local.core.types import WorkerState
from dynamo_local.planner.values import Fleet, Pool

_FAILED = frozenset({WorkerState.CRASHED, WorkerState.BACKING_OFF, WorkerState.START_TIMED_OUT})
"""Will be started again by itself, at a time that its back-off says: no adjustment, but capacity on its way."""


def fleet_of(view: FleetView, *, decode: str, prefill: str | None = None, routed: Collection[str] = ()) -> Fleet:
    """Count the workers of the decode (or aggregated) component and of the prefill one.

    `routed` names the draining workers that still can be given a request (their key is in etcd; a prefill worker
    still pulls). Times are those of the view (`since_s`). Raises `UnknownWorker` for a component that there is not.
    """
    return Fleet(
        prefill=None if prefill is None else _pool(view, prefill, routed),
        decode=_pool(view, decode, routed),
    )


def _pool(view: FleetView, component: str, routed: Collection[str]) -> Pool:
    size = view.template(component).gpus_per_worker
    workers = view.of(component)
    ready = [worker for worker in workers if worker.ready]
    coming = [worker for worker in workers if worker.on_its_way]
    leaving = [worker for worker in workers if not worker.counts and worker.state is not WorkerState.FAULTED]
    draining = [worker for worker in leaving if worker.state is WorkerState.DRAINING]
    return Pool(
        component=component,
        gpus_per_worker=size,
        ready=len(ready),
        coming=len(coming),
        waiting=sum(_waits(worker, size) for worker in coming),
        leaving=sum(worker.state is not WorkerState.EXITED for worker in leaving),
        cancellable=sum(worker.cancellable for worker in draining),
        routed=sum(worker.name in routed for worker in draining),
        gpus_held=sum(len(worker.gpus) for worker in workers),
        gpus_leaving=sum(len(worker.gpus) for worker in workers if not worker.counts),
        gpus_lacking=sum(max(0, size - len(worker.gpus)) for worker in coming),
        added_at_s=max((worker.since_s for worker in ready), default=None),
    )


def _waits(worker: WorkerView, size: int) -> bool:
    """For GPUs that another one still holds, or for the end of its back-off."""
    lacks = worker.state is WorkerState.PENDING and len(worker.gpus) < size
    return lacks or worker.state in _FAILED

"""Workers as a person is told of them: the start's progress, and `dynamo status`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dynamo_local.core import drains
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.serve.fleet import Worker
from dynamo_local.serve.progress import Row


def row(worker: Worker, now_s: float) -> Row:
    active = worker.load.request_active_slots if worker.load is not None else 0
    return Row(
        name=worker.name,
        state=str(worker.state),
        gpus=",".join(str(device.index) for device in worker.gpus),
        since_s=now_s - worker.since_s,
        note=f"{active} in flight" if active else worker.reason or "",
    )


def _drain_status(worker: Worker, now_s: float) -> dict[str, Any] | None:
    """What a draining worker has left, and how long it may and will probably take, seconds from now."""
    if worker.state is not WorkerState.DRAINING:
        return None
    allowed_s = drains.leave_deadline_s(worker.plan.drain_deadline_s, served=worker.served)
    deadline_s = None if worker.asked_s is None else round(worker.asked_s + allowed_s - now_s, 3)
    left = drains.left(worker.load if worker.load is not None else Missing("not sampled"))
    if isinstance(left, Missing):
        return {"left_requests": None, "left_tokens": None, "eta_s": None, "deadline_s": deadline_s}
    return {
        "left_requests": left.running + left.waiting,
        "left_tokens": left.tokens,
        "eta_s": None if isinstance(left.eta_s, Missing) else left.eta_s,
        "deadline_s": deadline_s,
    }


def worker_status(worker: Worker, now_s: float) -> dict[str, Any]:
    return {
        "watcher_name": worker.name,
        "component": worker.plan.component,
        "role": str(worker.plan.role),
        "state": str(worker.state),
        "pid": worker.pid,
        "gpus": [str(device.index) for device in worker.gpus],
        "lease": worker.lease,
        "endpoints": list(worker.endpoints),
        "uptime_s": None if worker.started_s is None else round(now_s - worker.started_s, 3),
        "restarts": worker.restarts,
        "reason": worker.reason,
        "drain": _drain_status(worker, now_s),
        "log_file": str(worker.plan.log_file),
        "load": None if worker.load is None else asdict(worker.load),
    }

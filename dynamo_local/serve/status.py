"""What `dynamo status --json` says of one worker and one GPU, and a start's progress: from the arbiter's memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dynamo_local.core import drains
from dynamo_local.core.gpus import GpuSnapshot
from dynamo_local.core.types import Load, Missing, WorkerState
from dynamo_local.serve.fleet import Worker
from dynamo_local.serve.progress import Row


def row(worker: Worker, now_s: float) -> Row:
    """Its line while the graph starts or leaves."""
    active = worker.load.request_active_slots if worker.load is not None else 0
    return Row(
        name=worker.name,
        state=str(worker.state),
        gpus=",".join(str(device.index) for device in worker.gpus),
        since_s=now_s - worker.since_s,
        note=f"{active} in flight" if active else worker.reason or "",
    )


def worker_status(worker: Worker, now_s: float) -> dict[str, Any]:
    """Its part of `workers`; `now_s` is of the arbiter's monotonic clock."""
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
        "load": None if worker.load is None else load_status(worker.load),
    }


def load_status(load: Load) -> dict[str, Any]:
    """Its numbers by name; None where one is not known: JSON has no NaN."""
    return {name: None if value != value else value for name, value in asdict(load).items()}


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


def gpu_status(gpus: GpuSnapshot) -> list[dict[str, Any]]:
    """`gpus`: every device by index, in which of the ledger's four places it is, and who has it or why."""
    holder = {device.uuid: name for name, held in gpus.held.items() for device in held}
    rows = []
    for device in gpus.devices:
        why = gpus.quarantined.get(device.uuid) or gpus.taken.get(device.uuid)
        if device.uuid in gpus.quarantined:
            state = "quarantined"
        elif device.uuid in holder:
            state = "held"
        else:
            state = "taken" if why else "free"
        rows.append(
            {
                "index": device.index,
                "uuid": device.uuid,
                "name": device.name,
                "state": state,
                "worker": holder.get(device.uuid),
                "reason": why,
            }
        )
    return rows

"""What `dynamo status --json` says of one worker and one GPU, and a start's progress: from the arbiter's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.core.gpu_residue import sleepers_on
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.life.decisions import drains
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.states import TRAITS
from dynamo_local.core.types import Load, Missing, WorkerState
from dynamo_local.telemetry.progress import Row


def row(worker: Worker, fleet: Fleet, now_s: float, waits_for: str | None = None) -> Row:
    """Its line while the graph starts or leaves."""
    active = 0 if isinstance(worker.load, Missing) else worker.load.request_active_slots
    return Row(
        name=worker.name,
        state=str(worker.state),
        gpus=",".join(_gpus(worker, fleet)),
        since_s=now_s - worker.since_s,
        note=f"{active} in flight" if active else _reason(worker, waits_for) or "",
    )


def worker_status(
    worker: Worker,
    fleet: Fleet,
    log_file: Path,
    now_s: float,
    waits_for: str | None = None,
    dispatch: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Its part of `workers`; `now_s` is of the arbiter's monotonic clock, `waits_for` what it told at its start, and
    `dispatch` the counters that it told last."""
    process = worker.process
    return {
        "watcher_name": worker.name,
        "component": worker.component,
        "guests": list(fleet.template_of(worker).guests),
        "role": str(worker.role),
        "state": str(worker.state),
        "pid": worker.pid,
        "gpus": _gpus(worker, fleet),
        "lease": worker.lease,
        "endpoints": list(worker.endpoints),
        "uptime_s": None if process is None else round(now_s - process.started_s, 3),
        "restarts": worker.restarts,
        "standby": standby_status(worker, fleet),
        "outdated": fleet.outdated(worker),
        "reason": _reason(worker, waits_for),
        "drain": _drain_status(worker, fleet, now_s),
        "log_file": str(log_file),
        "load": None if isinstance(worker.load, Missing) else load_status(worker.load),
        "dispatch": None if dispatch is None else {name: round(value, 6) for name, value in dispatch.items()},
    }


def _reason(worker: Worker, waits_for: str | None) -> str | None:
    """Why it is in its state; of one that takes long to start, what it waits for."""
    if worker.state is WorkerState.STARTING and waits_for is not None:
        return f"waits for {waits_for}"
    return worker.reason


def _gpus(worker: Worker, fleet: Fleet) -> list[str]:
    """The indices of its devices."""
    return [str(fleet.gpus.by_uuid[uuid].index) for uuid in worker.gpus]


def standby_status(worker: Worker, fleet: Fleet) -> dict[str, Any] | None:
    """Of one that sleeps, or is to; None for others. What it keeps is in bytes, None where it is not known."""
    sleeper = fleet.gpus.sleepers.get(worker.name)
    if sleeper is None and not worker.standby.wanted and not TRAITS[worker.state].standby:
        return None
    vram, host = (None, None) if sleeper is None else (sleeper.vram_bytes, sleeper.host_bytes)
    return {
        "wanted": worker.standby.wanted,
        "level": worker.standby.level,
        "gpus": [] if sleeper is None else [str(fleet.gpus.by_uuid[uuid].index) for uuid in sleeper.uuids],
        "vram_bytes": None if isinstance(vram, Missing) else vram,
        "host_bytes": None if isinstance(host, Missing) else host,
    }


def load_status(load: Load) -> dict[str, Any]:
    """Its numbers by name; None where one is not known."""
    return load.numbers()


def _drain_status(worker: Worker, fleet: Fleet, now_s: float) -> dict[str, Any] | None:
    """What a draining worker has left, and how long it may and will probably take, seconds from now."""
    if not TRAITS[worker.state].drains:
        return None
    allowed_s = drains.leave_deadline_s(fleet.template_of(worker).drain_deadline_s, served=worker.served)
    deadline_s = None if worker.asked_s is None else round(worker.asked_s + allowed_s - now_s, 3)
    left = drains.left(worker.load)
    if isinstance(left, Missing):
        return {"left_requests": None, "left_tokens": None, "eta_s": None, "deadline_s": deadline_s}
    return {
        "left_requests": left.running + left.waiting,
        "left_tokens": left.tokens,
        "eta_s": None if isinstance(left.eta_s, Missing) else left.eta_s,
        "deadline_s": deadline_s,
    }


def gpu_status(gpus: GpuLedger) -> list[dict[str, Any]]:
    """`gpus`: every device by index, in which of the ledger's four places it is, and who has it or why."""
    holder = gpus.holder_of
    rows = []
    for device in gpus.devices:
        asleep = sleepers_on(device.uuid, gpus.sleepers)
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
                "sleepers": list(asleep),
                "reason": why,
            }
        )
    return rows

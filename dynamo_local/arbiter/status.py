"""The values of `dynamo status --json`, from the arbiter's memory, without waiting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.composition import Parts
from dynamo_local.arbiter.deployment import WatcherFactory
from dynamo_local.arbiter.planner_following import DecisionFollower
from dynamo_local.arbiter.progress import Row
from dynamo_local.core.fleet import draining as drains
from dynamo_local.core.fleet.degraded import READY, lacking, shown_state
from dynamo_local.core.fleet.fleet import Fleet, RestartPlan, Worker
from dynamo_local.core.fleet.states import ROLES, TRAITS
from dynamo_local.core.gpus import GpuLedger, sleepers_on
from dynamo_local.core.types import Load, Missing, WorkerState
from dynamo_local.transport.certificates import Certificates


def row(worker: Worker, fleet: Fleet, now_s: float, waits_for: str | None = None) -> Row:
    """The worker's line while the graph starts or leaves."""
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
    model: str | None = None,
) -> dict[str, Any]:
    """The worker's part of `workers`.

    `now_s` is on the arbiter's monotonic clock. `waits_for` is the worker's own answer during a start, `dispatch` its
    last counters.
    """
    process = worker.process
    return {
        "watcher_name": worker.name,
        "component": worker.component,
        "guests": list(fleet.template_of(worker).guests),
        "role": str(worker.role),
        "model": model,
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
    """The reason of its state. For a long start it is what the worker waits for."""
    if worker.state is WorkerState.STARTING and waits_for is not None:
        return f"waits for {waits_for}"
    return worker.reason


def _gpus(worker: Worker, fleet: Fleet) -> list[str]:
    """The indices of its devices."""
    return [str(fleet.gpus.by_uuid[uuid].index) for uuid in worker.gpus]


def standby_status(worker: Worker, fleet: Fleet) -> dict[str, Any] | None:
    """For a sleeping worker, or one that is to sleep, else None. Kept memory is in bytes, None if unknown."""
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
    """Its load by name, None for unknown values."""
    return load.numbers()


def _drain_status(worker: Worker, fleet: Fleet, now_s: float) -> dict[str, Any] | None:
    """The remaining requests of a draining worker, and how long the drain may and probably will take, in seconds."""
    if not TRAITS[worker.state].drains:
        return None
    allowed_s = drains.leave_deadline_s(fleet.template_of(worker).drain_deadline_s, served=worker.health.served)
    deadline_s = (
        None if worker.leave.requested_at_s is None else round(worker.leave.requested_at_s + allowed_s - now_s, 3)
    )
    load = worker.load
    left = drains.left(load)
    if isinstance(load, Missing) or isinstance(left, Missing):
        return {"left_requests": None, "left_tokens": None, "eta_s": None, "deadline_s": deadline_s}
    return {
        "left_requests": left.running + left.waiting,
        "left_tokens": left.tokens,
        "eta_s": None if isinstance(left.eta_s, Missing) else left.eta_s,
        "deadline_s": deadline_s,
        "unread": load.unread,
        "unread_s": load.unread_s,
    }


def gpu_status(gpus: GpuLedger) -> list[dict[str, Any]]:
    """`gpus`: every device by index, its place in the ledger, and its holder or the reason."""
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


def _change(plan: RestartPlan) -> dict[str, Any]:
    """A restart or an apply that is under way: finished and remaining workers."""
    return {
        "stimulus_id": plan.stimulus_id,
        "left": [*plan.awaited, *plan.removed, *(name for name, _ in plan.todo)],
        "done": list(plan.done),
        "substitutes": dict(plan.substitutes),
    }


def ready_facts(parts: Parts, seconds: float) -> dict[str, Any]:
    """The facts to show when a run is ready, after so many seconds."""
    namespace, url = parts.deployment.graph.namespace, parts.registrations.frontend_url
    return {"namespace": namespace, "frontend_url": url, "seconds": round(seconds, 3)}


def run_status(parts: Parts, state: str, following: DecisionFollower | None) -> dict[str, Any]:
    """`state` is the run's: starting, adopting, ready (shown as degraded if something is missing), leaving."""
    head, fleet = parts.statefile.head, parts.controller.fleet
    waits_for = parts.starts.waits_for.get
    now_s, log_file = parts.clock.now_s(), parts.deployment.paths.log_file
    return {
        "namespace": head.namespace,
        "run_id": head.run_id,
        "state": shown_state(state, fleet),
        "missing": [lack.what for lack in lacking(fleet)] if state == READY else [],
        "arbiter_pid": os.getpid(),
        "guardian_pid": parts.guardian.pid,
        "on_arbiter_death": head.on_arbiter_death,
        "circus_endpoint": head.circus_endpoint,
        "etcd_endpoints": head.etcd_endpoints,
        "etcd_shell_file": _etcd_shell_file(parts),
        "nats_server": head.nats_server,
        "servers": parts.servers.status(),
        "frontend_url": parts.registrations.frontend_url,
        "prefill_queue": parts.sampling.queue.as_json() if parts.links.queues is not None else None,
        "metrics_url": parts.exporter.url,
        "dashboard": parts.dashboard.status(),
        "keeps_dashboard": parts.deployment.settings.dashboard is not None,
        "gpus": gpu_status(fleet.gpus),
        "gpu_inventory": parts.pool.freshness().as_json(),
        "quarantined_gpus": dict(fleet.gpus.quarantined),
        "changes": [_change(plan) for plan in fleet.restarts],
        "planner": parts.planning.status(),
        "models": parts.shares.status(),
        "targets": parts.sampling.kept.status(),
        "components": {
            component: parts.sampling.last_minute.figures(component, now_s)
            for component in dict.fromkeys(worker.component for worker in fleet.workers.values())
        },
        "follow": None if following is None else following.status(),
        "spares": parts.prewarmed.status(),
        "lead_times": parts.lead_times.status(),
        "tasks": parts.tasks.status(),
        "notes": parts.notes.as_json(fleet),
        "workers": [
            worker_status(
                each,
                fleet,
                log_file(each.spawn_name),
                now_s,
                waits_for(each.name),
                parts.sampling.dispatch.get(each.name),
                _model(parts.launcher.factory, each),
            )
            for each in fleet.workers.values()
        ],
    }


def _model(factory: WatcherFactory, worker: Worker) -> str | None:
    """The model that the worker's engine serves, by its configuration; None for one without an engine of its own."""
    if not ROLES[worker.role].computes:
        return None
    config = factory.service(worker.component).config
    name = config.get("served_model_name") or config.get("model")
    return str(name) if isinstance(name, str) else None


def _etcd_shell_file(parts: Parts) -> str | None:
    """The file that a controller reads before `etcdctl`. None for the user's etcd."""
    folder = parts.statefile.head.certificates
    if folder is None or parts.deployment.etcd_endpoints is not None:
        return None
    return str(Certificates(Path(folder)).etcd_shell_file)

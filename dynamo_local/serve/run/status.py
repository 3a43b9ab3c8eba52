"""What `dynamo status --json` says of a run: put together from the arbiter's memory, without waiting for anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dynamo_local.autoscale.following import Following
from dynamo_local.core.life.lacking import READY, lacking, shown_state
from dynamo_local.core.life.restart_plan import RestartPlan
from dynamo_local.infra.certificates import Certificates
from dynamo_local.serve.composition import Parts
from dynamo_local.telemetry.status import gpu_status, worker_status


def _change(plan: RestartPlan) -> dict[str, Any]:
    """A restart or an apply that is under way: which workers it has come to, and which it has not."""
    return {
        "stimulus_id": plan.stimulus_id,
        "left": [*plan.awaited, *plan.removed, *(name for name, _ in plan.todo)],
        "done": list(plan.done),
        "substitutes": dict(plan.substitutes),
    }


def ready_facts(parts: Parts, seconds: float) -> dict[str, Any]:
    """What is told when a run is ready, after so many seconds."""
    namespace, url = parts.deployment.graph.namespace, parts.registrations.frontend_url
    return {"namespace": namespace, "frontend_url": url, "seconds": round(seconds, 3)}


def run_status(parts: Parts, state: str, following: Following | None) -> dict[str, Any]:
    """`state` is the run's own: starting, adopting, ready (told as degraded where something is missing), leaving."""
    head, fleet = parts.statefile.head, parts.shell.fleet
    waits_for = parts.starts.waits_for.get
    now_s, log_file = parts.clock.now_s(), parts.deployment.paths.log_file
    return {
        "namespace": head.namespace,
        "run_id": head.run_id,
        "state": shown_state(state, fleet),
        "missing": [lack.what for lack in lacking(fleet)] if state == READY else [],
        "arbiter_pid": os.getpid(),
        "guardian_pid": parts.guarding.pid,
        "on_arbiter_death": head.on_arbiter_death,
        "circus_endpoint": head.circus_endpoint,
        "etcd_endpoints": head.etcd_endpoints,
        "etcd_shell_file": _etcd_shell_file(parts),
        "nats_server": head.nats_server,
        "servers": parts.servers.status(),
        "frontend_url": parts.registrations.frontend_url,
        "prefill_queue": parts.sampling.queue.as_json() if parts.links.queue is not None else None,
        "metrics_url": parts.exporter.url,
        "gpus": gpu_status(fleet.gpus),
        "gpu_inventory": parts.pool.freshness().as_json(),
        "quarantined_gpus": dict(fleet.gpus.quarantined),
        "changes": [_change(plan) for plan in fleet.restarts],
        "planner": parts.planning.status(),
        "follow": None if following is None else following.status(),
        "spares": parts.spared.status(),
        "lead_times": parts.leads.status(),
        "tasks": parts.tasks.status(),
        "notes": parts.notes.as_json(fleet),
        "workers": [
            worker_status(
                each, fleet, log_file(each.born_as), now_s, waits_for(each.name), parts.sampling.dispatch.get(each.name)
            )
            for each in fleet.workers.values()
        ],
    }


def _etcd_shell_file(parts: Parts) -> str | None:
    """What a shell reads before `etcdctl`; None where etcd is the user's, who knows how."""
    folder = parts.statefile.head.certificates
    if folder is None or parts.deployment.etcd_endpoints is not None:
        return None
    return str(Certificates(Path(folder)).etcd_shell_file)

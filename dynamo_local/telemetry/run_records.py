"""What stands in the event log beside workers' events: where a run begins and ends, and its servers' deaths and starts.

A run's records are its arbiter's. One that is killed writes no end: its guardian does, or whoever comes next says so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.core.types import watcher_name
from dynamo_local.telemetry.event_log import EventLog, EventRecorder, event_log_path, read

if TYPE_CHECKING:  # `dynamo events` imports this module, and must answer at once
    from dynamo_local.control.deployment import Deployment
    from dynamo_local.infra.embedded import ServerEvent

ARBITER = "arbiter"
RUN_STARTED, RUN_ADOPTED, RUN_NOT_ADOPTED, RUN_ENDED = "RunStarted", "RunAdopted", "RunNotAdopted", "RunEnded"
RUN_EVENTS = frozenset({RUN_STARTED, RUN_ADOPTED, RUN_NOT_ADOPTED, RUN_ENDED})


def arbiter_name(namespace: str) -> str:
    """`watcher_name` of a run's own records."""
    return watcher_name(namespace, ARBITER)


def server_record(event: ServerEvent, wall_s: float) -> dict[str, Any]:
    """A server's event as a record without its `seq`."""
    return {
        "time": wall_s,
        "watcher_name": event.watcher_name,
        "component": event.kind,
        "event": event.event,
        "from": event.before,
        "to": event.after,
        "stimulus_id": event.cause,
        "pid": event.pid,
        "next_try_s": event.next_try_s,
        "reason": event.reason,
    }


class RunRecords:
    """Writes the records of one arbiter's life."""

    def __init__(self, deployment: Deployment, events: EventRecorder, wall_s: Callable[[], float]) -> None:
        self._deployment = deployment
        self._events = events
        self._wall_s = wall_s

    async def began(self, *, adopted: bool) -> None:
        """The arbiter is there; nothing of the run is started or taken back yet."""
        namespace = self._deployment.graph.namespace
        log = event_log_path(self._deployment.paths.logs)
        killed = await asyncio.to_thread(_without_end, log, namespace)
        event = RUN_ADOPTED if adopted else RUN_STARTED
        await self._write(event, "", "starting", target=self._deployment.graph.target, killed_pid=killed)

    async def ended(self, why: str, exit_code: int, *, ours: bool) -> None:
        """Nothing of the run is left but the arbiter. Not `ours`: it was not taken back, and all of it is left."""
        event, reason = RUN_ENDED if ours else RUN_NOT_ADOPTED, why.partition("\n")[0]
        await self._write(event, "leaving", "", reason=reason, exit_code=exit_code)

    async def _write(self, event: str, before: str, after: str, **more: Any) -> None:
        await self._events.record(
            {
                "time": self._wall_s(),
                "watcher_name": arbiter_name(self._deployment.graph.namespace),
                "component": ARBITER,
                "event": event,
                "from": before,
                "to": after,
                "stimulus_id": "serve",
                "run_id": self._deployment.run_id,
                "arbiter_pid": os.getpid(),
                **more,
            }
        )


def ended_in_its_place(events: EventLog, namespace: str, run_id: str, arbiter_pid: int, wall_s: float) -> None:
    """What a killed arbiter could not write. Whoever calls holds the namespace's lock. Raises `StateError`."""
    events.append(
        [
            {
                "time": wall_s,
                "watcher_name": arbiter_name(namespace),
                "component": ARBITER,
                "event": RUN_ENDED,
                "from": "ready",
                "to": "",
                "stimulus_id": "guardian",
                "run_id": run_id,
                "arbiter_pid": arbiter_pid,
                "reason": "its arbiter was killed, and the guardian ended what it left",
            }
        ]
    )


def _without_end(log: Path, namespace: str) -> int | None:
    """The pid of the arbiter before, if it has written no end: it was killed."""
    for last in read(log, last=1, of={arbiter_name(namespace)}):
        pid = last.get("arbiter_pid")
        return pid if last["event"] in (RUN_STARTED, RUN_ADOPTED) and isinstance(pid, int) else None
    return None

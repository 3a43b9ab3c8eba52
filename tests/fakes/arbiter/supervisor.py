"""A supervisor that carries nothing out: it records what it is asked and answers, fails or waits as told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from dynamo_local.core.fleet.events import Command, Drain, Restart, Scale


def status_row(name: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    """One worker of `dynamo_status`, complete."""
    component = name.split("_")[1]
    row = {
        "watcher_name": name,
        "component": component,
        "role": "decode",
        "state": state,
        "pid": 100,
        "gpus": [],
        "lease": None,
        "endpoints": [],
        "uptime_s": 1.0,
        "reason": None,
        "log_file": None,
        "load": None,
        "drain": None,
        "restarts": 0,
    }
    return {**row, **more}


class FakeSupervisor:
    """Shows what commands speak to. `error` is raised by every coroutine; `hold` (an unset event) makes them wait."""

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self.rows = {name: status_row(name) for name in workers}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.commands: list[Any] = []
        self.error: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.result: dict[str, Any] | None = None

    def status(self) -> dict[str, Any]:
        return {
            "namespace": "dynamo",
            "run_id": "01J",
            "state": "ready",
            "etcd_endpoints": "http://127.0.0.1:1",
            "nats_server": "nats://127.0.0.1:2",
            "frontend_url": None,
            "notes": [],
            "workers": list(self.rows.values()),
        }

    def request_down(self, why: str, *, now: bool = False) -> int:
        self.calls.append(("request_down", (why,), {"now": now}))
        return 4711

    async def down(self, why: str) -> None:
        self.calls.append(("down", (why,), {}))
        await self._waited()

    async def run(self, command: Command) -> dict[str, Any]:
        self.commands.append(command)
        await self._waited()
        match command:
            case Scale(component=component):
                moves = [{"kind": "spawn", "watcher_name": f"dynamo_{component}_1"}]
                return {"component": component, "instructions": moves, "ready": 1, "target": 2}
            case Drain(name=name):
                if name in self.rows:
                    self.rows[name]["state"] = "draining"
                return {"watcher_name": name, "state": "draining"}
            case Restart(name=name):
                return {"workers": [name]}
        return {"changes": []}

    async def _waited(self) -> None:
        if self.error is not None:
            raise self.error
        if self.hold is not None:
            await self.hold.wait()

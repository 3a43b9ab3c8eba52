"""The running graph, as this benchmark sees and commands it: control endpoint, registry, and (for others' policies)
SIGKILL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.deployment import Running
from benchmarks.drain.facts import OURS, Asked, Down, Facts, Policy, Up
from dynamo_local.arbiter.event_log import event_log_path
from dynamo_local.arbiter.event_log import read as event_records
from dynamo_local.cli.common import ask_arbiter
from dynamo_local.core.types import instance_prefix
from dynamo_local.ports import DeleteEvent
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import kill_session
from dynamo_local.transport.access import EtcdAccess
from dynamo_local.transport.etcd import EtcdStore

NAMESPACE = "dynamo"
POLL_S = 0.1
COMMAND_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 120.0
UNWANTED = ("HealthFailed", "StartDeadlinePassed", "DrainDeadlinePassed", "Faulted", "SpawnFailed", "BackoffStarted")

Row = dict[str, Any]


class Host:
    """Scales components of one graph and writes down what happened, into `facts`."""

    def __init__(self, running: Running, facts: Facts) -> None:
        self._paths = Paths.of(NAMESPACE, running.folders.env)
        self._facts = facts
        self._deregistered: dict[int, float] = {}
        self._at_first = len(running.status["workers"])

    async def ask(self, command: str, **properties: Any) -> dict[str, Any]:
        """One command over the control endpoint. Raises `ArbiterRefused`."""
        return await asyncio.to_thread(ask_arbiter, self._paths, command, COMMAND_TIMEOUT_S, **properties)

    async def workers(self) -> dict[str, Row]:
        """The rows of `dynamo status` by worker."""
        graph = (await self.ask("dynamo_status"))["graph"]
        return {row["watcher_name"]: row for row in graph["workers"]}

    async def follow(self, env: Mapping[str, str]) -> None:
        """Note when leases leave the registry, until cancelled. `env` says where that is."""
        kv = await EtcdStore.connect(env["ETCD_ENDPOINTS"], access=EtcdAccess.of(env))
        try:
            async for event in kv.watch_prefix(instance_prefix(NAMESPACE)):
                if isinstance(event, DeleteEvent):
                    lease = event.key.rpartition(":")[2]
                    self._deregistered.setdefault(int(lease, 16), time.monotonic())
        finally:
            await kv.close()

    # --- scaling -------------------------------------------------------------------------------

    async def down(self, component: str, policy: Policy, speed: float) -> Down:
        """`scale -1`, and for a policy that is not ours SIGKILL at the end of its budget (shrunk by `speed`).

        So that only the budget is compared, every policy is given our victim's first step: out of routing at once.
        """
        rows = await self.workers()
        asked_s = time.monotonic()
        reply = await self.ask("dynamo_scale", component=component, target="-1")
        [instruction] = reply["instructions"]
        if instruction["kind"] != "drain":
            raise RuntimeError(f"scale {component} -1 did not drain a ready worker: {instruction}")
        row = rows[instruction["watcher_name"]]
        down = Down(policy.name, component, row["watcher_name"], row["pid"], int(row["lease"], 16), asked_s)
        self._facts.downs.append(down)
        if policy.budget_s is not None:
            await asyncio.sleep(asked_s + policy.budget_s / speed - time.monotonic())
            if await self._still_runs(down):
                down.killed_s = time.monotonic()
                kill_session(down.pid)
        return down

    async def _still_runs(self, down: Down) -> bool:
        row = (await self.workers()).get(down.worker)
        return row is not None and row["pid"] == down.pid

    async def gone(self, down: Down) -> None:
        """Wait until the process is gone, or the drain was taken back. TimeoutError after `GONE_TIMEOUT_S`."""
        if down.taken_back_s is None:
            await self._until(lambda rows: _is_gone(rows.get(down.worker), down.pid), GONE_TIMEOUT_S)
            down.gone_s = time.monotonic()
        down.deregistered_s = self._deregistered.get(down.lease)

    async def up(self, component: str, policy: str = OURS) -> Up:
        """`scale +1`, until the worker is ready. TimeoutError after `READY_TIMEOUT_S`."""
        asked_s = time.monotonic()
        reply = await self.ask("dynamo_scale", component=component, target="+1")
        [instruction] = reply["instructions"]
        name, took_back = instruction["watcher_name"], instruction["kind"] == "cancel_drain"
        await self._until(lambda rows: rows[name]["state"] == "ready" and rows[name]["lease"], READY_TIMEOUT_S)
        up = Up(component, name, took_back, asked_s, time.monotonic(), policy)
        self._facts.ups.append(up)
        return up

    async def take_back(self, down: Down) -> None:
        """`scale +1` while the worker of `down` still drains: the same process serves on."""
        up = await self.up(down.component)
        row = (await self.workers())[up.worker]
        if up.took_back and row["pid"] != down.pid:
            raise RuntimeError(f"{up.worker} was taken back with another pid: {down.pid}, now {row['pid']}")
        if up.took_back:
            down.taken_back_s = up.ready_s

    async def _until(self, done: Callable[[dict[str, Row]], object], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not done(await self.workers()):  # noqa: ASYNC110  # another process's state: only asking helps
                await asyncio.sleep(POLL_S)

    # --- beside the scaling --------------------------------------------------------------------

    async def probe(self, every_s: float) -> None:
        """Ask for the status, and for a number of workers that there is already, until cancelled."""
        while True:
            began_s = time.monotonic()
            rows = await self.workers()
            status_s = time.monotonic()
            await self.ask("dynamo_scale", component="Frontend", target="=1")
            draining = sum(row["state"] == "draining" for row in rows.values())
            self._facts.asked.append(Asked("status", status_s - began_s, draining))
            self._facts.asked.append(Asked("scale", time.monotonic() - status_s, draining))
            await asyncio.sleep(every_s)

    async def crash(self, component: str) -> None:
        """SIGKILL one ready worker, and wait until its replacement is ready."""
        row = next(row for row in (await self.workers()).values() if row["component"] == component and row["pid"])
        name, pid = row["watcher_name"], row["pid"]
        log = event_log_path(self._paths.logs)
        seen = event_records(log, last=1)[-1]["seq"]
        kill_session(pid)
        await self._until(lambda rows: rows[name]["state"] == "ready" and rows[name]["pid"] != pid, READY_TIMEOUT_S)
        records = {record["event"]: record for record in event_records(log, since_seq=seen, of={name})}
        apart_s = records["Spawned"]["time"] - records["ProcessExited"]["time"]
        self._facts.over_s.append(apart_s - records["BackoffStarted"]["delay_s"])

    # --- what nobody asked for -----------------------------------------------------------------

    def unasked(self) -> list[str]:
        """From the arbiter's event log: processes that died or were started although no command of ours says so."""
        ended = {(down.worker, down.pid) for down in self._facts.downs}
        found, starts, pids = [], 0, dict[str, int]()
        for record in event_records(event_log_path(self._paths.logs)):
            name, event = record["watcher_name"], record["event"]
            if event == "Spawned":
                starts += 1
                pids[name] = record["pid"]
            elif event == "ProcessExited" and (name, pids.get(name)) not in ended:
                found.append(f"{name} (pid {pids.get(name)}) exited with code {record['exit_code']}")
            elif event in UNWANTED:
                found.append(f"{name}: {event}")
        asked = self._at_first + sum(not up.took_back for up in self._facts.ups)
        if starts != asked:
            found.append(f"{starts} processes were started where {asked} were asked for")
        return found


def _is_gone(row: Row | None, pid: int) -> bool:
    """Its process has ended and its GPU is free again."""
    return row is None or (row["pid"] is None and not row["gpus"]) or row["pid"] not in (None, pid)

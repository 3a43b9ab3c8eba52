"""Carries a plan out on a served graph, watches it, and knows what of that which we broke is still broken."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import NotRunning
from dynamo_local.serve.processes import is_alive
from tests.chaos.checks import process_faults, statefile_faults
from tests.chaos.load import Attempt
from tests.chaos.plan import BASE, Action, Kind
from tests.fakes.scaled import command, events
from tests.fakes.served import Served

STATEFILE_EVERY_S = 0.05
PROCESSES_EVERY_S = 0.5
LOOK_EVERY_S = 0.2
GRACE_S = 3.0
"""After all is whole again: until every client of etcd and NATS has connected anew."""
RESTART_TAKES_S = 60.0
"""How long after a restart was asked for it may still be under way."""
HEAL_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 60.0
ADOPT_TIMEOUT_S = 120.0
"""A second or two on an idle machine; on one that is twentyfold overcommitted more than half a minute was seen."""
WHOLE = ("ready", "draining", "exited")
BUGS = ("illegal_transition", "error", None)
"""Codes of refusals that no command of ours deserves."""

Status = Mapping[str, Any]


@dataclass(slots=True)
class Fault:
    """Something we broke, from `began_s` until `healed` says so of a status; `ended_s` includes the grace."""

    what: str
    began_s: float
    healed: Callable[[Status], bool]
    ended_s: float | None = None


class Chaos:
    """One run. `story` says what was done, `wrong` what must not have been."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.story: list[str] = []
        self.wrong: list[str] = []
        self.faults: list[Fault] = []
        self.hurt: set[int] = set()
        self.refused: dict[str, int] = {}
        self._stopped: set[int] = set()
        self._restarted_s: dict[str, float] = {}
        self._begin_s = self._looked_s = time.monotonic()
        self._adopting = asyncio.Lock()
        self._arbiter_pid = int(served.status()["arbiter_pid"])
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what is broken ------------------------------------------------------------------------

    async def excused(self, found: Attempt) -> bool:
        """A failure while something was broken, of a kind that a retry can save.

        Judged after the next look at the graph: that a restart took the last worker is only seen then.
        """
        deadline_s = time.monotonic() + HEAL_TIMEOUT_S
        while self._looked_s <= found.ended_s and not self.wrong and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)
        frontend = any("Frontend" in fault.what for fault in self._during(found))
        if found.code == "connection":
            return frontend  # a killed server can say nothing
        return found.retryable and bool(self._during(found))

    def _during(self, found: Attempt) -> list[Fault]:
        return [
            fault
            for fault in self.faults
            if fault.began_s <= found.ended_s and (fault.ended_s is None or found.began_s <= fault.ended_s)
        ]

    def outage(self, wall_s: float) -> bool:
        """Whether etcd or NATS was broken at that time, seconds since 1970."""
        at_s = wall_s - time.time() + time.monotonic()
        servers = [fault for fault in self.faults if fault.what in ("etcd", "nats")]
        return any(fault.began_s <= at_s <= (fault.ended_s or at_s) for fault in servers)

    async def calm(self) -> None:
        """Return when nothing is broken. It is a failure of the run if that takes too long."""
        deadline_s = time.monotonic() + HEAL_TIMEOUT_S
        while any(fault.ended_s is None or fault.ended_s > time.monotonic() for fault in self.faults):
            if self.wrong or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def broken(self) -> list[str]:
        """What we broke and what has not healed yet."""
        return [fault.what for fault in self.faults if fault.ended_s is None]

    def _break(self, what: str, healed: Callable[[Status], bool], since_s: float | None = None) -> None:
        self.faults.append(Fault(what, since_s or time.monotonic(), healed))

    # --- watching ------------------------------------------------------------------------------

    @property
    def watches(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """All that is to run beside the plan."""
        return (self.watch_statefile, self.watch_processes, self.watch_status)

    async def guarded(self, watch: Callable[[], Awaitable[None]]) -> None:
        """Run it; its own failure is a failure of the run."""
        try:
            await watch()
        except Exception as error:
            self._wrong([f"{watch}: {type(error).__name__}: {error}"])

    async def watch_statefile(self) -> None:
        """Until cancelled."""
        while True:
            self._wrong(await asyncio.to_thread(statefile_faults, self.served.paths.statefile))
            await asyncio.sleep(STATEFILE_EVERY_S)

    async def watch_processes(self) -> None:
        """Until cancelled."""
        while True:
            self._wrong(await asyncio.to_thread(process_faults, self.served.paths))
            await asyncio.sleep(PROCESSES_EVERY_S)

    async def watch_status(self) -> None:
        """Note what has healed, and that the arbiter is the one that we know; until cancelled."""
        while True:
            look_s = time.monotonic()
            async with self._adopting:
                status = await self.status()
            if status["arbiter_pid"] != self._arbiter_pid:
                self._wrong([f"the arbiter's pid is {status['arbiter_pid']}, it was {self._arbiter_pid}"])
                self._arbiter_pid = status["arbiter_pid"]
            for fault in self.faults:
                if fault.ended_s is None and fault.healed(status):
                    fault.ended_s = time.monotonic() + GRACE_S
            self._note_gaps(status, self._looked_s)
            self._looked_s = look_s
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_gaps(self, status: Status, since_s: float) -> None:
        """A restart may take a component's only ready worker (docs/operations.md): until it is back, that is broken."""
        for name in BASE:
            gap = f"{name} is restarted, its last"
            asked_s = self._restarted_s.get(name)
            recent = asked_s is not None and time.monotonic() - asked_s < RESTART_TAKES_S
            if recent and not _ready(status["workers"], name) and gap not in self.broken():
                self._break(gap, lambda status, name=name: _ready(status["workers"], name) > 0, since_s)  # type: ignore[misc]

    async def status(self) -> dict[str, Any]:
        """`dynamo status`, beside other tasks, with the pids of `etcd` and `nats`."""
        return await asyncio.to_thread(self._status)

    def _status(self) -> dict[str, Any]:
        status = self.served.status()
        return {**status, **{name: self.served.server_pid(name) for name in ("etcd", "nats")}}

    def _wrong(self, found: list[str]) -> None:
        self.wrong += [f"{self._now()} {what}" for what in found]
        for what in found:
            self.note(f"WRONG: {what}")

    def _now(self) -> str:
        return f"{time.monotonic() - self._begin_s:7.2f} s"

    def note(self, what: str) -> None:
        """Into the story."""
        self.story.append(f"{self._now()} ({time.strftime('%H:%M:%S')}) {what}")
        print(self.story[-1], file=sys.__stdout__, flush=True)

    # --- doing ---------------------------------------------------------------------------------

    async def carry_out(self, plan: tuple[Action, ...]) -> None:
        """Each action when it is due; none waits for the end of those before, but all for an adoption."""
        self._begin_s = time.monotonic()
        for action in plan:
            await asyncio.sleep(self._begin_s + action.at_s - time.monotonic())
            self.note(str(action))
            task = asyncio.create_task(self._do(action))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if action.kind is Kind.ADOPT:
                await asyncio.wait({task})
            if self.wrong:
                break
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _do(self, action: Action) -> None:
        try:
            async with self._adopting:
                status = await self.status()
                if action.kind is Kind.ADOPT:
                    await self._adopt(status)
                    return
            await self._act(action, status)
        except ArbiterRefused as refusal:
            code = refusal.details.get("code")
            self.refused[str(code)] = self.refused.get(str(code), 0) + 1
            self.note(f"  refused: {refusal}")
            if code in BUGS:
                self._wrong([f"{action}: refused with {code}: {refusal}"])
        except NotRunning as error:
            if not self._adopting.locked():
                self._wrong([f"{action}: {error}"])
        except Exception as error:
            self._wrong([f"{action}: {type(error).__name__}: {error}"])

    async def _act(self, action: Action, status: Status) -> None:
        kind = action.kind
        if kind in (Kind.ETCD, Kind.NATS):
            self._kill_server(kind.name.lower(), status)
        elif kind is Kind.SCALE:
            reply = await self._ask("scale", component=action.component, target=action.target)
            self.note("  " + ", ".join(f"{i['kind']} {i['watcher_name']}" for i in reply["instructions"]))
        elif kind is Kind.ROLLING:
            self._restarted_s[action.component] = time.monotonic()
            await self._ask("restart", name=action.component, rolling=True)
        elif (row := _chosen(action, status)) is None:
            self.note("  nobody to do it to")
        elif kind in (Kind.KILL, Kind.STOP, Kind.HANG):
            await self._hurt(action, row)
        elif kind is Kind.RESTART:
            self.note(f"  {row['watcher_name']}")
            self._restarted_s[action.component] = time.monotonic()
            await self._ask("restart", name=row["watcher_name"])
        else:
            await self._drain(action, row)

    async def _ask(self, name: str, /, **properties: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: command(self.served, name, **properties))

    async def _drain(self, action: Action, row: Mapping[str, Any]) -> None:
        self.note(f"  {row['watcher_name']}, pid {row['pid']}")
        await self._ask("drain", name=row["watcher_name"])
        if action.kind is Kind.DRAIN_CANCEL:
            await asyncio.sleep(action.seconds)
            await self._ask("drain", name=row["watcher_name"], cancel=True)

    def _kill_server(self, name: str, status: Status) -> None:
        old = status[name]
        if old is None:
            self.note("  it is away already")
            return
        self._break(name, lambda status: status[name] not in (None, old))
        _signal(old, signal.SIGKILL)

    async def _hurt(self, action: Action, row: Mapping[str, Any]) -> None:
        name, pid = row["watcher_name"], row["pid"]
        self.note(f"  {name}, pid {pid}, {row['state']}")
        lasting = action.kind is not Kind.STOP
        if not lasting and pid in self.hurt:
            return  # it is stopped for good already: to let it go on would heal it
        if lasting:
            self.hurt.add(pid)
            self._break(name, lambda status: _replaced(status, name, pid))
        else:
            self._stopped.add(pid)
            self._break(name, lambda status: pid not in self._stopped)
        _signal(pid, signal.SIGKILL if action.kind is Kind.KILL else signal.SIGSTOP)
        if not lasting:
            await asyncio.sleep(action.seconds)
            if pid not in self.hurt:
                _signal(pid, signal.SIGCONT)
            self._stopped.discard(pid)

    async def _adopt(self, status: Status) -> None:
        """kill -9 of the arbiter; its workers, etcd and NATS serve on, and its successor takes them back."""
        self._break("the arbiter is away", lambda status: status["state"] == "ready")
        _signal(status["arbiter_pid"], signal.SIGKILL)
        while is_alive(status["arbiter_pid"]):
            await asyncio.sleep(0.01)
        words = self.served.serve_words("--adopt", "--detach")
        done = await asyncio.to_thread(lambda: self.served.cli(*words, timeout_s=ADOPT_TIMEOUT_S))
        if done.returncode != 0:
            self._wrong([f"--adopt: exit {done.returncode}: {done.stdout}\n{done.stderr}"])
            return
        self._arbiter_pid = (await self.status())["arbiter_pid"]
        self.note(f"  adopted by {self._arbiter_pid}")

    # --- the end -------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Back to the numbers of the start: every worker ready, within a bound."""
        await self.calm()
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        self._wrong([f"has not healed: {what}" for what in self.broken()])
        if self.wrong:
            return  # the report is of now, and there may be no arbiter to ask
        wanted: list[str] = []
        while time.monotonic() < deadline_s:
            status = await self.status()
            rows = status["workers"]
            if all(row["state"] in ("ready", "exited") for row in rows):
                wanted = [name for name, count in BASE.items() if _ready(rows, name) != count]
                if not wanted:
                    return
                for name in wanted:
                    await self._ask("scale", component=name, target=f"={BASE[name]}")
            await asyncio.sleep(LOOK_EVERY_S)
        states = {row["watcher_name"]: (row["state"], row["reason"]) for row in (await self.status())["workers"]}
        self._wrong([f"not settled within {SETTLE_TIMEOUT_S:g} s: {states}, notes {status['notes']}"])

    def last_events(self, count: int = 60) -> list[str]:
        """Of the event log, in short."""
        return [
            f"{time.strftime('%H:%M:%S', time.localtime(r['time']))} {r['seq']} {r['watcher_name']} {r['event']} "
            f"{r['from']}->{r['to']} {r['stimulus_id']}"
            for r in events(self.served)[-count:]
        ]


def _chosen(action: Action, status: Status) -> Mapping[str, Any] | None:
    rows = [row for row in status["workers"] if row["component"] == action.component and row["pid"]]
    if action.kind is Kind.HANG:  # one that hangs while it starts has its start deadline: five minutes
        rows = [row for row in rows if row["state"] != "starting"]
    return rows[int(action.unit * len(rows))] if rows else None


def _replaced(status: Status, name: str, pid: int) -> bool:
    """It is gone, and if it was to stay, another process is there."""
    row = next((row for row in status["workers"] if row["watcher_name"] == name), None)
    return row is None or (row["pid"] != pid and row["state"] in WHOLE)


def _ready(rows: list[Mapping[str, Any]], component: str) -> int:
    return sum(row["component"] == component and row["state"] == "ready" for row in rows)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has gone by itself meanwhile

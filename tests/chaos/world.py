"""Carries a plan out on a served graph, watches it, and knows what of that which we broke is still broken."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.event_log import EventTail, event_log_path, is_aside
from dynamo_local.arbiter.marks import marked
from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import NotRunning
from dynamo_local.system.processes import is_alive
from tests.chaos.checks import process_faults, statefile_faults
from tests.chaos.faults import Fault, Status, chosen, during, ready, replaced, send_signal
from tests.chaos.growth import EVERY_S, Growth
from tests.chaos.load import Attempt
from tests.chaos.plan import BASE, Action, Kind
from tests.drivers.scaled import command
from tests.drivers.served import Served
from tests.tools.host_faults import full_disk, no_descriptors

STATEFILE_EVERY_S = 0.05
PROCESSES_EVERY_S = 0.5
LOOK_EVERY_S = 0.2
EVENTS_EVERY_S = 20.0
"""The log of events is read so often: it keeps the last 32 MiB only."""
GRACE_S = 3.0
"""After all is whole again: until every client of etcd and NATS has connected anew."""
HEAL_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 60.0
ADOPT_TIMEOUT_S = 120.0
"""A second or two on an idle machine; on one that is twentyfold overcommitted more than half a minute was seen."""
DISK, DESCRIPTORS = "the disk is full", "the arbiter has no file descriptors"
NEEDED = ("etcd", "nats", DISK, DESCRIPTORS)
"""A start may fail for want of these."""
ALONE = (Kind.ADOPT, Kind.STOP_ARBITER, Kind.DESCRIPTORS)
"""Nobody can ask the arbiter meanwhile: what comes next in the plan waits."""
BUGS = ("illegal_transition", "error", None)
"""Codes of refusals that no command of ours deserves."""


class Chaos:
    """One run. `story` says what was done, `wrong` what must not have been, `events` are those of the event log.

    `disk` is where the statefile and the logs are, on a small disk of their own; None where there could be none.
    """

    def __init__(self, served: Served, disk: Path | None) -> None:
        self.served = served
        self._disk = disk
        self._room = asyncio.Lock()
        self.story: list[str] = []
        self.wrong: list[str] = []
        self.events: list[Mapping[str, Any]] = []
        self.growth = Growth()
        self._tail = EventTail(event_log_path(served.paths.logs), 0)
        self.faults: list[Fault] = []
        self.hurt: set[int] = set()
        self.refused: dict[str, int] = {}
        self._stopped: set[int] = set()
        self._begin_s = time.monotonic()
        self._adopting = asyncio.Lock()
        self._arbiter_pid = int(served.status()["arbiter_pid"])
        self._tasks: set[asyncio.Task[None]] = set()

    def excused(self, found: Attempt) -> bool:
        """A failure while something was broken, of a kind that a retry can save."""
        frontend = any("Frontend" in fault.what for fault in self._during(found))
        if found.code == "connection":
            return frontend  # a killed server can say nothing
        return found.retryable and bool(self._during(found))

    def _during(self, found: Attempt) -> list[Fault]:
        return [
            fault
            for fault in self.faults
            if fault.excuses
            and fault.began_s <= found.ended_s
            and (fault.ended_s is None or found.began_s <= fault.ended_s)
        ]

    def outage(self, wall_s: float) -> bool:
        """Whether something that a start needs was broken at that time, seconds since 1970."""
        at_s = wall_s - time.time() + time.monotonic()
        servers = [fault for fault in self.faults if fault.what in NEEDED]
        return any(fault.began_s <= at_s <= (fault.ended_s or at_s) for fault in servers)

    async def calm(self) -> None:
        """Return when nothing is broken. It is a failure of the run if that takes too long."""
        deadline_s = time.monotonic() + HEAL_TIMEOUT_S
        while any(fault.ended_s is None or fault.ended_s > time.monotonic() for fault in self.faults):
            if self.wrong or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def broken(self) -> list[str]:
        return [fault.what for fault in self.faults if fault.ended_s is None]

    def _break(self, what: str, healed: Callable[[Status], bool], *, excuses: bool = True) -> None:
        self.faults.append(Fault(what, time.monotonic(), healed, excuses=excuses))

    @contextmanager
    def _broken(self, what: str, *, excuses: bool) -> Iterator[None]:
        """Something is broken for as long as the block lasts."""
        over: list[bool] = []
        self._break(what, lambda status: bool(over), excuses=excuses)
        try:
            yield
        finally:
            over.append(True)

    @property
    def watches(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return (self.watch_statefile, self.watch_processes, self.watch_status, self.watch_events, self.watch_growth)

    async def guarded(self, watch: Callable[[], Awaitable[None]]) -> None:
        """Run it; its own failure is a failure of the run."""
        try:
            await watch()
        except Exception as error:
            self._wrong([f"{watch}: {type(error).__name__}: {error}"])

    async def watch_statefile(self) -> None:
        while True:
            self._wrong(await asyncio.to_thread(statefile_faults, self.served.paths.statefile))
            await asyncio.sleep(STATEFILE_EVERY_S)

    async def watch_processes(self) -> None:
        while True:
            self._wrong(await asyncio.to_thread(process_faults, self.served.paths))
            await asyncio.sleep(PROCESSES_EVERY_S)

    async def watch_events(self) -> None:
        while True:
            self.read_events()
            await asyncio.sleep(EVENTS_EVERY_S)

    def read_events(self) -> None:
        """Add the events since the last call."""
        self.events += (record for record in self._tail.poll() if not is_aside(record))

    async def watch_growth(self) -> None:
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(EVERY_S)

    def _sample(self) -> None:
        names = {found.pid: found.name for found in marked(self.served.paths)}
        self.growth.sample({**names, self._arbiter_pid: "arbiter"}, time.monotonic())

    async def watch_status(self) -> None:
        """Note what has healed, and that the arbiter is the one that we know; until cancelled."""
        while True:
            async with self._adopting:
                status = await self.status()
            if status["arbiter_pid"] != self._arbiter_pid:
                self._wrong([f"the arbiter's pid is {status['arbiter_pid']}, it was {self._arbiter_pid}"])
                self._arbiter_pid = status["arbiter_pid"]
            for fault in self.faults:
                if fault.ended_s is None and fault.healed(status):
                    fault.ended_s = time.monotonic() + GRACE_S
            await asyncio.sleep(LOOK_EVERY_S)

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
        self.story.append(f"{self._now()} ({time.strftime('%H:%M:%S')}) {what}")
        print(self.story[-1], file=sys.__stdout__, flush=True)

    async def carry_out(self, plan: tuple[Action, ...]) -> None:
        """Each action when it is due; none waits for the end of those before, but all for an adoption."""
        self._begin_s = time.monotonic()
        for action in plan:
            await asyncio.sleep(self._begin_s + action.at_s - time.monotonic())
            self.note(str(action))
            task = asyncio.create_task(self._do(action))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if action.kind in ALONE:
                await asyncio.wait({task})
            if self.wrong:
                break
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _do(self, action: Action) -> None:
        try:
            if action.kind is Kind.DESCRIPTORS and (others := self._tasks - {asyncio.current_task()}):
                await asyncio.wait(others)
            async with self._adopting:
                status = await self.status()
                if action.kind in ALONE:
                    await self._alone(action, status)
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
        elif kind in (Kind.STOP_ETCD, Kind.STOP_NATS):
            await self._stop_server(kind.name.lower().removeprefix("stop_"), status, action.seconds)
        elif kind is Kind.DISK:
            await self._fill_disk(action.seconds)
        elif kind is Kind.SPARE:
            self._kill_spare(action, status)
        elif kind is Kind.SCALE:
            reply = await self._ask("scale", component=action.component, target=action.target)
            self.note("  " + ", ".join(f"{i['kind']} {i['watcher_name']}" for i in reply["instructions"]))
        elif kind is Kind.ROLLING:
            await self._ask("restart", name=action.component, rolling=True)
        elif (row := chosen(action, status)) is None:
            self.note("  nobody to do it to")
        elif kind in (Kind.KILL, Kind.STOP, Kind.HANG):
            await self._hurt(action, row)
        elif kind is Kind.RESTART:
            self.note(f"  {row['watcher_name']}")
            await self._ask("restart", name=row["watcher_name"])
        elif kind in (Kind.SLEEP, Kind.WAKE):
            self.note(f"  {row['watcher_name']}, pid {row['pid']}, {row['state']}")
            await self._ask(kind.value, name=row["watcher_name"])
        elif kind in (Kind.FLIP, Kind.FLIP_CANCEL):
            await self._flip(action, row)
        else:
            await self._drain(action, row, status)

    async def _flip(self, action: Action, row: Mapping[str, Any]) -> None:
        reply = await self._ask("flip", name=row["watcher_name"])
        self.note(f"  {row['watcher_name']}, pid {row['pid']}, becomes {reply['becomes']}")
        if action.kind is Kind.FLIP_CANCEL:
            await asyncio.sleep(action.seconds)
            await self._ask("flip", name=row["watcher_name"], cancel=True)

    async def _ask(self, name: str, /, **properties: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: command(self.served, name, **properties))

    async def _drain(self, action: Action, row: Mapping[str, Any], status: Status) -> None:
        self.note(f"  {row['watcher_name']}, pid {row['pid']}")
        others = [each for each in status["workers"] if each["pid"] not in self.hurt]
        if row["pid"] in self.hurt and not ready(others, row["component"]):
            self.note("  left out: nobody would take its place, which is no fault but an order")
            return
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
        send_signal(old, signal.SIGKILL)

    def _kill_spare(self, action: Action, status: Status) -> None:
        """Nobody is served by it, so nothing is broken; it may be a worker by now."""
        pids = [spare["pid"] for spare in status["spares"]["spares"] if spare["pid"] is not None]
        if not pids:
            self.note("  there is none")
            return
        pid = pids[int(action.unit * len(pids))]
        self.note(f"  pid {pid}")
        self.hurt.add(pid)
        send_signal(pid, signal.SIGKILL)

    async def _stop_server(self, name: str, status: Status, seconds: float) -> None:
        pid = status[name]
        if pid is None:
            self.note("  it is away already")
            return
        with self._broken(name, excuses=True):
            send_signal(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            send_signal(pid, signal.SIGCONT)

    async def _fill_disk(self, seconds: float) -> None:
        if self._disk is None:
            self.note("  left out: no disk of its own could be mounted here (only root may)")
            return
        async with self._room:
            with self._broken(DISK, excuses=False):
                await asyncio.to_thread(during, full_disk(self._disk), seconds)

    async def _alone(self, action: Action, status: Status) -> None:
        if action.kind is Kind.ADOPT:
            async with self._room:  # an adoption that cannot write is refused, rightly
                await self._adopt(status)
        elif action.kind is Kind.STOP_ARBITER:
            send_signal(status["arbiter_pid"], signal.SIGSTOP)
            await asyncio.sleep(action.seconds)
            send_signal(status["arbiter_pid"], signal.SIGCONT)
        else:
            with self._broken(DESCRIPTORS, excuses=False):
                await asyncio.to_thread(during, no_descriptors(self.served), action.seconds)

    async def _hurt(self, action: Action, row: Mapping[str, Any]) -> None:
        name, pid = row["watcher_name"], row["pid"]
        self.note(f"  {name}, pid {pid}, {row['state']}")
        lasting = action.kind is not Kind.STOP
        if not lasting and pid in self.hurt:
            return  # it is stopped for good already: to let it go on would heal it
        if lasting:
            self.hurt.add(pid)
            self._break(name, lambda status: replaced(status, row))
        else:
            self._stopped.add(pid)
            self._break(name, lambda status: pid not in self._stopped)
        send_signal(pid, signal.SIGKILL if action.kind is Kind.KILL else signal.SIGSTOP)
        if not lasting:
            await asyncio.sleep(action.seconds)
            if pid not in self.hurt:
                send_signal(pid, signal.SIGCONT)
            self._stopped.discard(pid)

    async def _adopt(self, status: Status) -> None:
        """kill -9 of the arbiter; its workers, etcd and NATS serve on, and its successor takes them back."""
        self._break("the arbiter is away", lambda status: status["state"] == "ready")
        send_signal(status["arbiter_pid"], signal.SIGKILL)
        while is_alive(status["arbiter_pid"]):
            await asyncio.sleep(0.01)
        words = self.served.serve_words("--adopt", "--detach")
        done = await asyncio.to_thread(lambda: self.served.cli(*words, timeout_s=ADOPT_TIMEOUT_S))
        if done.returncode != 0:
            self._wrong([f"--adopt: exit {done.returncode}: {done.stdout}\n{done.stderr}"])
            return
        self._arbiter_pid = (await self.status())["arbiter_pid"]
        self.note(f"  adopted by {self._arbiter_pid}")

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
            for row in rows:
                if row["state"] == "sleeping":
                    await self._up(row["watcher_name"])
            if all(row["state"] in ("ready", "exited") for row in rows):
                wanted = [name for name, count in BASE.items() if ready(rows, name) != count]
                if not wanted:
                    return
                for name in wanted:
                    await self._ask("scale", component=name, target=f"={BASE[name]}")
            await asyncio.sleep(LOOK_EVERY_S)
        states = {row["watcher_name"]: (row["state"], row["reason"]) for row in (await self.status())["workers"]}
        self._wrong([f"not settled within {SETTLE_TIMEOUT_S:g} s: {states}, notes {status['notes']}"])

    async def _up(self, name: str) -> None:
        """One that sleeps serves again; where somebody holds its GPU it leaves."""
        try:
            await self._ask("wake", name=name)
        except ArbiterRefused as refusal:
            self.note(f"  {name} is not woken: {refusal}")
            with suppress(ArbiterRefused):  # it has gone meanwhile
                await self._ask("drain", name=name)

    def last_events(self, count: int = 60) -> list[str]:
        return [
            f"{time.strftime('%H:%M:%S', time.localtime(r['time']))} {r['seq']} {r['watcher_name']} {r['event']} "
            f"{r['from']}->{r['to']} {r['stimulus_id']}"
            for r in self.events[-count:]
        ]

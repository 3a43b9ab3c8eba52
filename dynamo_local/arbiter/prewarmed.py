"""Spares, joined to a run: whom they serve, what they are marked with, and when they are started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from dynamo_local.arbiter.controller import Shell
from dynamo_local.arbiter.deployment import Deployment, Launcher
from dynamo_local.arbiter.marks import marks
from dynamo_local.arbiter.prewarmed_kinds import Kind, Kinds, secrets_of
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.events import Stimulus
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.notes import Elsewhere, Tell
from dynamo_local.core.prewarmed import SOCKET_FD, SPARE
from dynamo_local.core.types import how_it_ended, watcher_name
from dynamo_local.state.schema import SpareEntry
from dynamo_local.system import fd_messages
from dynamo_local.system.log_files import set_aside
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ExitCallback, PrewarmingHost, ProcessHost, ProcessSpec
from dynamo_local.system.processes import aend_session, start_time_s, wait_exit

# --- pool
# Keeps spares running, and makes workers of them.
#
# A new spare is started when no worker is coming up: its imports would take the processors from that one. One that
# dies,
# or cannot be started, is replaced with back-off. Whoever takes one gets it at once, or none.

log = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 10.0
"""To change the environment and to answer takes milliseconds."""
ENDED_TIMEOUT_S = 5.0
DELAY_S, DELAY_MAX_S = 1.0, 60.0
RAN_WELL_S = 60.0
CALM_BOUND_S = 10.0
"""Where workers come up all the time, or one takes its time, spares are started all the same."""


@dataclass(slots=True, eq=False)
class Spare:
    """One process. `warm_s` is when its modules were imported, of the arbiter's clock."""

    name: str
    kind: Kind
    connection: socket.socket
    started_s: float
    pid: int | None = None
    warm_s: float | None = None
    taken: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        """`warming`, `warm` or `taken`, for people."""
        return "taken" if self.taken else "warming" if self.warm_s is None else "warm"


@dataclass(frozen=True, slots=True)
class SpareRules:
    """How spares are run: so many of each kind, with these marks by which a run's processes are found."""

    count: int
    marks: Callable[[str], Mapping[str, str]]
    visible: str | None
    log_level: str | None
    death_signal: int | None
    start_deadline_s: float


async def end_process(pid: int) -> None:
    """End it with its session; returns when it is gone, or has not gone for some seconds."""
    await aend_session(pid)
    await wait_exit(pid, ENDED_TIMEOUT_S)


class Spares:
    """`wanted` are the kinds, `calm` says that no worker is coming up; `on_change` is called, as a task of
    `background`, when there is another spare, or one less. `end` ends a process, and returns when it is gone."""

    def __init__(
        self,
        host: PrewarmingHost,
        paths: Paths,
        rules: SpareRules,
        clock: Clock,
        *,
        wanted: Callable[[], tuple[Kind, ...]],
        calm: Callable[[], bool],
        background: Callable[[Coroutine[Any, Any, None]], object],
        tell: Tell,
        end: Callable[[int], Awaitable[None]] = end_process,
    ) -> None:
        self._host = host
        self._paths = paths
        self._rules = rules
        self._clock = clock
        self._wanted = wanted
        self._calm = calm
        self._background = background
        self._tell = tell
        self._end_process = end
        self.on_change: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._spares: dict[str, Spare] = {}
        self._failures = 0
        self._next_try_s = 0.0
        self._reason: str | None = None
        self._woken = asyncio.Event()
        self._leaving = False

    # --- keeping them ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Start what is missing, for as long as the run lives."""
        while not self._leaving:
            self._woken.clear()
            missing = self._missing()
            if missing is None:
                await self._woken.wait()
                continue
            await self._clock.sleep_until(max(self._next_try_s, await self._until_calm()))
            if missing in self._wanted() and not self._leaving:
                await self._start(missing)

    def wake(self) -> None:
        """What is wanted may have changed."""
        self._woken.set()

    def _missing(self) -> Kind | None:
        wanted = self._wanted()
        for spare in list(self._spares.values()):
            if spare.kind not in wanted and not spare.taken:
                self._dismiss(spare)
        for kind in wanted:
            if sum(spare.kind == kind and not spare.taken for spare in self._spares.values()) < self._rules.count:
                return kind
        return None

    async def _until_calm(self) -> float:
        """Now, once no worker is coming up, or has been for long."""
        bound_s = self._clock.now_s() + CALM_BOUND_S
        while not self._calm() and self._clock.now_s() < bound_s:
            await self._clock.sleep_until(self._clock.now_s() + 0.1)
        return self._clock.now_s()

    def _free_name(self) -> str:
        n = 0
        while (name := watcher_name(self._paths.namespace, SPARE, n)) in self._spares:
            n += 1
        return name

    async def _start(self, kind: Kind) -> None:
        """One spare, until it is warm or has failed."""
        name = self._free_name()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        spare = self._spares[name] = Spare(name, kind, ours, self._clock.now_s())
        rules = self._rules
        env = kind.environment(rules.marks(name), rules.visible, rules.log_level)
        log_file = self._paths.log_file(name)
        try:
            with theirs:
                await asyncio.to_thread(set_aside, log_file)
                spare.pid = await self._host.start_process(
                    ProcessSpec(
                        name,
                        kind.argv,
                        env={**env, SOCKET_FD: str(theirs.fileno())},
                        cwd=kind.cwd,
                        log_file=log_file,
                        death_signal=rules.death_signal,
                        asks_itself=True,
                        inherited_fds=(theirs.fileno(),),
                    )
                )
            await self._changed()
            async with asyncio.timeout(rules.start_deadline_s):
                answer = await fd_messages.areceive(ours)
            if "error" in answer:
                raise OSError(answer["error"])
        except (OSError, ValueError, TimeoutError) as error:
            why = f"it was not warm within {rules.start_deadline_s:g} s" if isinstance(error, TimeoutError) else error
            await self._give_up(spare, f"{why}")
            return
        spare.warm_s = self._clock.now_s()
        await self._changed()

    async def _give_up(self, spare: Spare, why: str) -> None:
        """It is of no use: end it, and try again later."""
        if self._spares.get(spare.name) is spare:
            self._failed(f"{spare.name}: {why}")
        await self._end(spare)

    def _failed(self, why: str) -> None:
        delay_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self._failures, 10))
        self._failures, self._reason = self._failures + 1, why
        self._next_try_s = self._clock.now_s() + delay_s
        if not self._leaving:
            self._tell(f"a spare failed ({why}); the next one is started in {delay_s:g} s", Elsewhere())

    def exited(self, name: str, pid: int, code: int | None) -> bool:
        """Called with every exit. False if it was no spare."""
        spare = self._spares.get(name)
        if spare is None:
            return False
        del self._spares[name]
        spare.ended.set()
        spare.connection.close()
        if spare.warm_s is not None and self._clock.now_s() - spare.warm_s > RAN_WELL_S:
            self._failures = 0
        if not spare.taken and not self._leaving:
            self._failed(f"{name} {how_it_ended(code)}")
        self._woken.set()
        self._background(self._forgotten(name))
        return True

    async def _forgotten(self, name: str) -> None:
        await self._host.forget(name)
        await self._changed()

    def _dismiss(self, spare: Spare) -> None:
        """It is not wanted any more: it ends when its socket is closed."""
        spare.taken = True
        spare.connection.close()

    async def _end(self, spare: Spare) -> None:
        """End it, and return when it is gone."""
        spare.taken = True
        if spare.pid is not None:
            await self._end_process(spare.pid)
        spare.connection.close()
        if self._spares.get(spare.name) is spare and spare.pid is None:
            del self._spares[spare.name]
        self._woken.set()

    async def _changed(self) -> None:
        if self.on_change is not None:
            await self.on_change()

    async def close(self) -> None:
        """End all of them."""
        self._leaving = True
        self._woken.set()
        for spare in list(self._spares.values()):
            await self._end(spare)

    # --- using one -------------------------------------------------------------------------------

    async def become(self, spec: ProcessSpec, kind: Kind) -> int | None:
        """The pid of a process that is that worker now, and was a spare; None if there is none, or it failed."""
        spare = next((each for each in self._spares.values() if each.kind == kind and each.state == "warm"), None)
        if spare is None or self._leaving:
            return None
        spare.taken = True
        try:
            await self._order(spare, spec)
            pid = self._host.rename_process(spare.name, spec)
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("%s did not become %s (%s): another process is started", spare.name, spec.name, error)
            self._failed(f"{spare.name} did not become {spec.name}: {error or 'it did not answer'}")
            await self._end(spare)
            return None
        except BaseException:  # given up: a process that may be a worker by now must not run without an owner
            await asyncio.shield(self._end(spare))
            raise
        self._spares.pop(spare.name, None)
        spare.connection.close()
        self._woken.set()
        self._background(self._changed())
        return pid

    async def _order(self, spare: Spare, spec: ProcessSpec) -> None:
        """Tell it what it is now, and hear that it is. Raises OSError, TimeoutError, ValueError."""
        order = {"argv": list(spec.argv), "env": dict(spec.env), "cwd": spec.cwd, "secret": secrets_of(spec.env)}
        log_fd = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                await fd_messages.asend(spare.connection, order, [log_fd, *spec.inherited_fds])
                answer = await fd_messages.areceive(spare.connection)
        finally:
            os.close(log_fd)
        if answer.get("became") != spec.name:
            raise OSError(str(answer.get("error", answer)))

    # --- answering -------------------------------------------------------------------------------

    def records(self) -> dict[str, SpareEntry]:
        """For the statefile."""
        return {
            spare.name: SpareEntry(engine=spare.kind.engine, pid=spare.pid, pid_start_time=start_time_s(spare.pid))
            for spare in self._spares.values()
            if spare.pid is not None
        }

    def status(self) -> dict[str, Any]:
        """For `dynamo status --json`: each spare, and why the latest failed."""
        now_s = self._clock.now_s()
        return {
            "count": self._rules.count,
            "spares": [_status(spare, now_s) for spare in self._spares.values()],
            "failures": self._failures,
            "reason": self._reason if self._failures else None,
            "next_try_s": round(left_s, 3) if (left_s := self._next_try_s - now_s) > 0 else None,
        }

    def counts(self) -> dict[tuple[str, str], int]:
        """How many there are, by engine and state."""
        found: dict[tuple[str, str], int] = {
            (kind.engine, state): 0 for kind in self._wanted() for state in ("warming", "warm")
        }
        for spare in self._spares.values():
            if not spare.taken:
                found[spare.kind.engine, spare.state] = found.get((spare.kind.engine, spare.state), 0) + 1
        return found


def _status(spare: Spare, now_s: float) -> dict[str, Any]:
    return {
        "watcher_name": spare.name,
        "engine": spare.kind.engine,
        "state": spare.state,
        "pid": spare.pid,
        "uptime_s": round(now_s - spare.started_s, 3),
        "warm_after_s": None if spare.warm_s is None else round(spare.warm_s - spare.started_s, 3),
        "memory_bytes": None if spare.pid is None else resident_bytes(spare.pid),
    }


def resident_bytes(pid: int) -> int | None:
    """The memory of a process that is in RAM, shared pages included; None where it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


# --- starting
# Starts processes for the shell: of a spare where one fits, else anew.

REMEMBERED = 1024


class SparedHost:
    """A `ProcessHost` before another one. `kind_of` says of which kind of spare a worker of that name can be made."""

    def __init__(self, host: ProcessHost, spares: Spares | None, kind_of: Callable[[str], Kind | None]) -> None:
        self._host = host
        self._spares = spares
        self._kind_of = kind_of
        self._warm: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def on_exit(self) -> ExitCallback | None:
        """Who hears of exits: of this host and of the other one alike."""
        return self._host.on_exit

    @on_exit.setter
    def on_exit(self, callback: ExitCallback | None) -> None:
        """Hear of exits."""
        self._host.on_exit = callback

    async def start_process(self, spec: ProcessSpec) -> int:
        """See `ProcessHost`."""
        kind = None if self._spares is None else self._kind_of(spec.name)
        if self._spares is not None and kind is not None:
            pid = await self._spares.become(spec, kind)
            if pid is not None:
                self._warm.append(pid)
                return pid
        return await self._host.start_process(spec)

    async def forget(self, name: str) -> None:
        """See `ProcessHost`."""
        await self._host.forget(name)

    def rename(self, was: str, name: str, pid: int) -> None:
        """See `ProcessHost`."""
        self._host.rename(was, name, pid)

    def was_spare(self, pid: int | None) -> bool:
        """Whether that process was a spare before it became a worker."""
        return pid in self._warm


class Spared:
    """The spares of one run, and the host of its workers, which uses them. An observer of its shell."""

    def __init__(
        self, deployment: Deployment, launcher: Launcher, host: ProcessHost, clock: Clock, tasks: Tasks, tell: Tell
    ) -> None:
        self._launcher = launcher
        self._shell: Shell | None = None
        self._env: Callable[[], Mapping[str, str]] = dict
        self._kinds = Kinds(launcher, lambda: self._env(), deployment.gpus)
        self._impossible = not hasattr(host, "rename_process")
        self._tell = tell
        self.spares = self._pool(deployment, host, clock, tasks, tell) if deployment.settings.spares else None
        self.host = SparedHost(host, self.spares, self._kind_of)

    def _pool(self, deployment: Deployment, host: ProcessHost, clock: Clock, tasks: Tasks, tell: Tell) -> Spares | None:
        if self._impossible:
            return None
        settings, paths = deployment.settings, deployment.paths
        rules = SpareRules(
            count=settings.spares,
            marks=partial(marks, deployment.graph.namespace, paths.statefile, deployment.run_id),
            visible=self._kinds.visible,
            log_level=os.environ.get("DYN_LOG"),
            death_signal=None if settings.keep_on_arbiter_death else signal.SIGKILL,
            start_deadline_s=settings.start_deadline_s,
        )
        spare_host = cast(PrewarmingHost, host)
        return Spares(
            spare_host,
            paths,
            rules,
            clock,
            wanted=self._kinds.wanted,
            calm=self._calm,
            background=tasks.run,
            tell=tell,
        )

    def connect(self, shell: Shell, env: Callable[[], Mapping[str, str]]) -> None:
        """Whose workers these are, and what those are told of etcd and NATS."""
        self._shell, self._env = shell, env
        shell.observers.append(self)

    def begin(self, tasks: Tasks, on_change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The run is ready: from now on spares are started. `on_change` writes them down."""
        if self.spares is not None:
            self.spares.on_change = on_change
            tasks.keep("spares", self.spares.run)
        elif self._launcher.factory.settings.spares:
            self._tell("Host: spares has no effect under a stock circusd, whose watchers cannot be renamed")

    def exited(self, name: str, pid: int, code: int | None) -> bool:
        """Called with every exit. False if it was no spare."""
        return self.spares is not None and self.spares.exited(name, pid, code)

    def records(self) -> dict[str, SpareEntry]:
        """For the statefile."""
        return {} if self.spares is None else self.spares.records()

    def status(self) -> dict[str, Any] | None:
        """For `dynamo status --json`; None where there are none."""
        return None if self.spares is None else self.spares.status()

    def counts(self) -> dict[tuple[str, str], int]:
        """How many there are, by engine and state."""
        return {} if self.spares is None else self.spares.counts()

    async def close(self) -> None:
        """End them."""
        if self.spares is not None:
            await self.spares.close()

    def _kind_of(self, name: str) -> Kind | None:
        worker = None if self._shell is None else self._shell.fleet.workers.get(name)
        return None if worker is None else self._kinds.of(self._launcher.factory.service(worker.component))

    def _calm(self) -> bool:
        return self._shell is None or not any(
            TRAITS[worker.state].comes_up and TRAITS[worker.state].runs for worker in self._shell.fleet.workers.values()
        )

    # --- control.effects.Observer ------------------------------------------------------------------

    def on_stimulus(self, stimulus: Stimulus) -> None:
        """Of no interest here."""

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Of no interest here."""

    def on_fleet(self, fleet: Fleet) -> None:
        """An apply may have changed what is wanted."""
        if self.spares is not None:
            self.spares.wake()

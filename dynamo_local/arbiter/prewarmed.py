"""Prewarmed processes: started in advance with their modules imported, they become workers within milliseconds.

A new one is started when no worker is starting, because its imports would take the processors from that worker. A dead
one is replaced with back-off. A start that needs one takes it at once, or starts a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from dynamo_local.arbiter.deployment import Deployment, Launcher
from dynamo_local.arbiter.marks import marks
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import Clock
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.states import ROLES, TRAITS
from dynamo_local.core.gpus import GpuDevice, cuda_visible_devices
from dynamo_local.core.notes import Elsewhere, Tell
from dynamo_local.core.prewarmed import PADDING, PADDING_BYTES, SOCKET_FD, SPARE, EngineName, early, engine_of
from dynamo_local.core.secrets import is_secret_variable
from dynamo_local.core.types import ServiceSpec, how_it_ended, watcher_name
from dynamo_local.state.schema import SpareEntry
from dynamo_local.system import fd_messages
from dynamo_local.system.log_files import set_aside
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import LaunchSpec, PrewarmingHost, ProcessHost
from dynamo_local.system.processes import aend_session, start_time_s, wait_exit

log = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 10.0
"""Changing the environment and answering takes milliseconds."""
ENDED_TIMEOUT_S = 5.0
DELAY_S, DELAY_MAX_S = 1.0, 60.0
RAN_WELL_S = 60.0
CALM_BOUND_S = 10.0
"""If workers start all the time, prewarmed processes are started after this time anyway."""


@dataclass(slots=True, eq=False)
class PrewarmedProcess:
    """One prewarmed process. `warm_s` is when its modules were imported, on the arbiter's clock."""

    name: str
    kind: PrewarmedKind
    connection: socket.socket
    started_s: float
    pid: int | None = None
    warm_s: float | None = None
    taken: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        """`warming`, `warm` or `taken`."""
        return "taken" if self.taken else "warming" if self.warm_s is None else "warm"


@dataclass(frozen=True, slots=True)
class PrewarmedRules:
    """How prewarmed processes run: `count` of each kind, with the `marks` of a run's processes."""

    count: int
    marks: Callable[[str], Mapping[str, str]]
    visible: str | None
    log_level: str | None
    death_signal: int | None
    start_deadline_s: float


async def end_process(pid: int) -> None:
    """End a process with its session. Returns when it is gone, or after `ENDED_TIMEOUT_S`."""
    await aend_session(pid)
    await wait_exit(pid, ENDED_TIMEOUT_S)


class PrewarmedProcesses:
    """Keeps prewarmed processes of the `wanted` kinds.

    `calm` says that no worker is starting. `on_change` is called when a process is added or removed. `end` ends a
    process and returns when it is gone.
    """

    def __init__(
        self,
        host: PrewarmingHost,
        paths: Paths,
        rules: PrewarmedRules,
        clock: Clock,
        *,
        wanted: Callable[[], tuple[PrewarmedKind, ...]],
        calm: Callable[[], bool],
        background: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[], Coroutine[Any, Any, None]],
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
        self._on_change = on_change
        self._processes: dict[str, PrewarmedProcess] = {}
        self._failures = 0
        self._next_try_s = 0.0
        self._reason: str | None = None
        self._woken = asyncio.Event()
        self._leaving = False

    async def run(self) -> None:
        """Start missing processes, for as long as the run lives."""
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
        """The wanted kinds may have changed."""
        self._woken.set()

    def _missing(self) -> PrewarmedKind | None:
        wanted = self._wanted()
        for process in list(self._processes.values()):
            if process.kind not in wanted and not process.taken:
                self._dismiss(process)
        for kind in wanted:
            if (
                sum(process.kind == kind and not process.taken for process in self._processes.values())
                < self._rules.count
            ):
                return kind
        return None

    async def _until_calm(self) -> float:
        """Returns when no worker is starting, or after `CALM_BOUND_S`."""
        bound_s = self._clock.now_s() + CALM_BOUND_S
        while not self._calm() and self._clock.now_s() < bound_s:
            await self._clock.sleep_until(self._clock.now_s() + 0.1)
        return self._clock.now_s()

    def _free_name(self) -> str:
        n = 0
        while (name := watcher_name(self._paths.namespace, SPARE, n)) in self._processes:
            n += 1
        return name

    async def _start(self, kind: PrewarmedKind) -> None:
        """Start one process and wait until it is warm or has failed."""
        name = self._free_name()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = self._processes[name] = PrewarmedProcess(name, kind, ours, self._clock.now_s())
        rules = self._rules
        env = kind.environment(rules.marks(name), rules.visible, rules.log_level)
        log_file = self._paths.log_file(name)
        try:
            with theirs:
                await asyncio.to_thread(set_aside, log_file)
                process.pid = await self._host.start_process(
                    LaunchSpec(
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
            await self._on_change()
            async with asyncio.timeout(rules.start_deadline_s):
                answer = await fd_messages.areceive(ours)
            if "error" in answer:
                raise OSError(answer["error"])
        except (OSError, ValueError, TimeoutError) as error:
            why = f"it was not warm within {rules.start_deadline_s:g} s" if isinstance(error, TimeoutError) else error
            await self._give_up(process, f"{why}")
            return
        process.warm_s = self._clock.now_s()
        await self._on_change()

    async def _give_up(self, process: PrewarmedProcess, why: str) -> None:
        """End a useless process, and try again later."""
        if self._processes.get(process.name) is process:
            self._failed(f"{process.name}: {why}")
        await self._end(process)

    def _failed(self, why: str) -> None:
        delay_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self._failures, 10))
        self._failures, self._reason = self._failures + 1, why
        self._next_try_s = self._clock.now_s() + delay_s
        if not self._leaving:
            self._tell(f"a spare failed ({why}); the next one is started in {delay_s:g} s", Elsewhere())

    def exited(self, name: str, pid: int, code: int | None) -> bool:
        """The host calls this for every exit. Returns False if the process was not prewarmed."""
        process = self._processes.get(name)
        if process is None:
            return False
        del self._processes[name]
        process.ended.set()
        process.connection.close()
        if process.warm_s is not None and self._clock.now_s() - process.warm_s > RAN_WELL_S:
            self._failures = 0
        if not process.taken and not self._leaving:
            self._failed(f"{name} {how_it_ended(code)}")
        self._woken.set()
        self._background(self._forgotten(name))
        return True

    async def _forgotten(self, name: str) -> None:
        await self._host.forget(name)
        await self._on_change()

    def _dismiss(self, process: PrewarmedProcess) -> None:
        """Its kind is not wanted any more. It ends when its socket is closed."""
        process.taken = True
        process.connection.close()

    async def _end(self, process: PrewarmedProcess) -> None:
        process.taken = True
        if process.pid is not None:
            await self._end_process(process.pid)
        process.connection.close()
        if self._processes.get(process.name) is process and process.pid is None:
            del self._processes[process.name]
        self._woken.set()

    async def close(self) -> None:
        self._leaving = True
        self._woken.set()
        for process in list(self._processes.values()):
            await self._end(process)

    async def become(self, spec: LaunchSpec, kind: PrewarmedKind) -> int | None:
        """Make a prewarmed process that worker. Returns its pid, or None without a suitable process."""
        process = next((each for each in self._processes.values() if each.kind == kind and each.state == "warm"), None)
        if process is None or self._leaving:
            return None
        process.taken = True
        try:
            await self._order(process, spec)
            pid = self._host.rename_process(process.name, spec)
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("%s did not become %s (%s): another process is started", process.name, spec.name, error)
            self._failed(f"{process.name} did not become {spec.name}: {error or 'it did not answer'}")
            await self._end(process)
            return None
        except BaseException:  # cancelled: a process that may be a worker by now must not run without an owner
            await asyncio.shield(self._end(process))
            raise
        self._processes.pop(process.name, None)
        process.connection.close()
        self._woken.set()
        self._background(self._on_change())
        return pid

    async def _order(self, process: PrewarmedProcess, spec: LaunchSpec) -> None:
        """Send its new identity, and wait for its confirmation. Raises OSError, TimeoutError, ValueError."""
        order = {"argv": list(spec.argv), "env": dict(spec.env), "cwd": spec.cwd, "secret": secrets_of(spec.env)}
        log_fd = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                await fd_messages.asend(process.connection, order, [log_fd, *spec.inherited_fds])
                answer = await fd_messages.areceive(process.connection)
        finally:
            os.close(log_fd)
        if answer.get("became") != spec.name:
            raise OSError(str(answer.get("error", answer)))

    def records(self) -> dict[str, SpareEntry]:
        """For the statefile."""
        return {
            process.name: SpareEntry(
                engine=process.kind.engine, pid=process.pid, pid_start_time=start_time_s(process.pid)
            )
            for process in self._processes.values()
            if process.pid is not None
        }

    def status(self) -> dict[str, Any]:
        """For `dynamo status --json`: each process, and why the latest failed."""
        now_s = self._clock.now_s()
        return {
            "count": self._rules.count,
            "spares": [_status(process, now_s) for process in self._processes.values()],
            "failures": self._failures,
            "reason": self._reason if self._failures else None,
            "next_try_s": round(left_s, 3) if (left_s := self._next_try_s - now_s) > 0 else None,
        }

    def counts(self) -> dict[tuple[str, str], int]:
        """Counts by engine and state."""
        found: dict[tuple[str, str], int] = {
            (kind.engine, state): 0 for kind in self._wanted() for state in ("warming", "warm")
        }
        for process in self._processes.values():
            if not process.taken:
                found[process.kind.engine, process.state] = found.get((process.kind.engine, process.state), 0) + 1
        return found


def _status(process: PrewarmedProcess, now_s: float) -> dict[str, Any]:
    return {
        "watcher_name": process.name,
        "engine": process.kind.engine,
        "state": process.state,
        "pid": process.pid,
        "uptime_s": round(now_s - process.started_s, 3),
        "warm_after_s": None if process.warm_s is None else round(process.warm_s - process.started_s, 3),
        "memory_bytes": None if process.pid is None else resident_bytes(process.pid),
    }


def resident_bytes(pid: int) -> int | None:
    """The resident memory of a process, shared pages included. None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


REMEMBERED = 1024


class PrewarmedHost:
    """A `ProcessHost` that takes a prewarmed process where one fits. `kind_of` gives the kind for a watcher's name."""

    def __init__(
        self, host: ProcessHost, spares: PrewarmedProcesses | None, kind_of: Callable[[str], PrewarmedKind | None]
    ) -> None:
        self._host = host
        self._processes = spares
        self._kind_of = kind_of
        self._warm: deque[int] = deque(maxlen=REMEMBERED)

    async def start_process(self, spec: LaunchSpec) -> int:
        kind = None if self._processes is None else self._kind_of(spec.name)
        if self._processes is not None and kind is not None:
            pid = await self._processes.become(spec, kind)
            if pid is not None:
                self._warm.append(pid)
                return pid
        return await self._host.start_process(spec)

    async def forget(self, name: str) -> None:
        await self._host.forget(name)

    def rename(self, was: str, name: str, pid: int) -> None:
        self._host.rename(was, name, pid)

    def was_prewarmed(self, pid: int | None) -> bool:
        """Whether that process was prewarmed before it became a worker."""
        return pid in self._warm


class PrewarmedPool:
    """The prewarmed processes of one run, and the host of its workers, which uses them.

    `fleet` and `env` are called after the run has begun. `env` has the variables for etcd and NATS.
    """

    def __init__(
        self,
        deployment: Deployment,
        launcher: Launcher,
        host: ProcessHost,
        clock: Clock,
        tasks: Tasks,
        tell: Tell,
        *,
        fleet: Callable[[], Fleet],
        env: Callable[[], Mapping[str, str]],
        on_change: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._launcher = launcher
        self._fleet = fleet
        self._kinds = PrewarmedKinds(launcher, env, deployment.gpus)
        self._impossible = not hasattr(host, "rename_process")
        self._tell = tell
        settings, paths = deployment.settings, deployment.paths
        self.spares: PrewarmedProcesses | None = None
        if settings.spares and not self._impossible:
            rules = PrewarmedRules(
                count=settings.spares,
                marks=partial(marks, deployment.graph.namespace, paths.statefile, deployment.run_id),
                visible=self._kinds.visible,
                log_level=os.environ.get("DYN_LOG"),
                death_signal=None if settings.keep_on_arbiter_death else signal.SIGKILL,
                start_deadline_s=settings.start_deadline_s,
            )
            self.spares = PrewarmedProcesses(
                cast(PrewarmingHost, host),
                paths,
                rules,
                clock,
                wanted=self._kinds.wanted,
                calm=self._calm,
                background=tasks.run,
                on_change=on_change,
                tell=tell,
            )
        self.host = PrewarmedHost(host, self.spares, self._kind_of)

    def begin(self, tasks: Tasks) -> None:
        """The run is ready: start prewarmed processes from now on."""
        if self.spares is not None:
            tasks.keep("spares", self.spares.run)
        elif self._launcher.factory.settings.spares:
            self._tell("Host: spares has no effect under a stock circusd, whose watchers cannot be renamed")

    def wake(self) -> None:
        """The fleet has changed: an apply may want other kinds."""
        if self.spares is not None:
            self.spares.wake()

    def exited(self, name: str, pid: int, code: int | None) -> bool:
        """The host calls this for every exit. Returns False if the process was not prewarmed."""
        return self.spares is not None and self.spares.exited(name, pid, code)

    def records(self) -> dict[str, SpareEntry]:
        """For the statefile."""
        return {} if self.spares is None else self.spares.records()

    def status(self) -> dict[str, Any] | None:
        """For `dynamo status --json`. None without prewarmed processes."""
        return None if self.spares is None else self.spares.status()

    def counts(self) -> dict[tuple[str, str], int]:
        """Counts by engine and state."""
        return {} if self.spares is None else self.spares.counts()

    async def close(self) -> None:
        if self.spares is not None:
            await self.spares.close()

    def _kind_of(self, name: str) -> PrewarmedKind | None:
        worker = self._fleet().workers.get(name)
        return None if worker is None else self._kinds.of(self._launcher.factory.service(worker.component))

    def _calm(self) -> bool:
        workers = self._fleet().workers.values()
        return not any(TRAITS[worker.state].comes_up and TRAITS[worker.state].runs for worker in workers)


MODULE = "dynamo_local.worker.prewarmed"
ARGUMENT_PADDING = 160
"""Padding after the command line, so that `ps` can show the worker's."""


@dataclass(frozen=True, slots=True)
class PrewarmedKind:
    """The properties of a prewarmed process that cannot be changed later. `env` is its early environment."""

    engine: EngineName
    cwd: str
    env: tuple[tuple[str, str], ...]

    @property
    def argv(self) -> tuple[str, ...]:
        return (sys.executable, "-m", MODULE, self.engine, "." * ARGUMENT_PADDING)

    def environment(self, marks: Mapping[str, str], visible: str | None, log_level: str | None) -> dict[str, str]:
        """The environment of such a process. `visible` are the run's devices (None: the user pins GPUs)."""
        env = {**dict(self.env), **marks, PADDING: "." * PADDING_BYTES}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        if log_level is not None:
            env["DYN_LOG"] = log_level
        return env


class PrewarmedKinds:
    """The kinds that a run's services need. `env` has the variables that every worker gets besides the factory's."""

    def __init__(self, launcher: Launcher, env: Callable[[], Mapping[str, str]], gpus: Sequence[GpuDevice]) -> None:
        self._launcher = launcher
        self._env = env
        self._alike = len({device.name for device in gpus}) <= 1
        self.visible = cuda_visible_devices(gpus) if launcher.factory.settings.pin_gpus else None

    def wanted(self) -> tuple[PrewarmedKind, ...]:
        """One kind for each engine and environment of the graph's services, in its order."""
        found = (self.of(spec) for spec in self._launcher.factory.graph.services)
        return tuple(dict.fromkeys(kind for kind in found if kind is not None))

    def of(self, spec: ServiceSpec) -> PrewarmedKind | None:
        """The kind that can become a worker of that service, or None.

        None fits a command, or a service without an engine. None fits vLLM on different devices, because its imports
        keep facts of one device.
        """
        if spec.runtime is not None or not ROLES[spec.role].computes:
            return None
        named = cast("EngineName | None", spec.config.get("engine"))
        engine = engine_of(named, spec.config.get("model"), TINY_MODEL)
        if engine == "vllm" and not self._alike:
            return None
        factory = self._launcher.factory
        plan = factory.plan(spec, "", ())
        kept = early({**plan.env, **self._env()}, factory.key_env.get(spec.name, {}))
        return PrewarmedKind(engine, plan.cwd, tuple(sorted(kept.items())))


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that /proc must not show."""
    return [name for name in env if is_secret_variable(name)]

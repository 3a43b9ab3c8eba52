"""circus's Arbiter, adapted to supervise GPU workers. Every override answers a measured fault of circus 0.19.

circus keeps watchers, the control endpoint, the event stream and `circusctl`. Ours are signals, spawning (own log file,
death signal), exits (by pidfd, not by a one-second poll), ending and restarting.
`tests/contract/test_circus_arbiter.py` checks each behaviour of circus that this relies on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from circus.arbiter import Arbiter
from circus.process import Process
from circus.watcher import Watcher
from psutil import NoSuchProcess, Popen
from psutil import Process as RunningProcess
from tornado.ioloop import IOLoop
from zmq import Context

from dynamo_local.circus_plugins.controller import WorkerController
from dynamo_local.circus_plugins.gate import gate_of, listen_again
from dynamo_local.core.secrets import mask_env
from dynamo_local.system.prctl import asking_to_die, set_parent_death_signal
from dynamo_local.system.process_host import ExitCallback, LaunchSpec

# circus has no command that renames a watcher.


def rename(arbiter: Any, was: str, name: str, pid: int) -> bool:
    """Rename the watcher `was` to `name`. A watcher of that name without a process is replaced.

    Returns False, with nothing changed, if its process is not `pid` any more. Listeners to circus's events get the old
    name's `remove` and the new one's `add`.
    """
    watchers = arbiter._watchers_names
    watcher = watchers.get(was.lower())
    if watcher is None or watcher.pid != pid:
        return False
    del watchers[was.lower()]
    former = watchers.pop(name.lower(), None)
    if former is not None:
        arbiter.watchers.remove(former)
    watcher.notify_event("remove", {"time": time.time()})
    watcher.name, watcher.res_name = name, name.lower()
    for process in watcher.processes.values():
        process.name = name
    watchers[name.lower()] = watcher
    watcher.notify_event("add", {"time": time.time()})
    return True


log = logging.getLogger(__name__)


class WorkerProcess(Process):  # type: ignore[misc]
    """A process in its own session, with its own log file. The kernel ends it when the arbiter dies."""

    def spawn(self) -> None:
        """Start it. circus would give it our stdout, or a pipe whose end kills the worker by SIGPIPE."""
        watcher: WorkerWatcher = self.watcher
        death_signal, parent, env = watcher.death_signal, os.getpid(), self.env
        in_child: Callable[[], None] | None = None
        if death_signal is not None and watcher.asks_itself:
            env = {**env, **asking_to_die(death_signal, parent)}
        elif death_signal is not None:
            in_child = partial(set_parent_death_signal, death_signal, parent)

        self.started = time.time()
        watcher.refused = None
        try:
            self._start(watcher, env, in_child)
        except OSError as error:
            watcher.refused = error  # circus only logs it
            raise

    def _start(self, watcher: WorkerWatcher, env: dict[str, str], in_child: Callable[[], None] | None) -> None:
        fd = os.open(watcher.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._worker = Popen(
                self.format_args(),
                cwd=self.working_dir,
                env=env,
                stdin=DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
                close_fds=True,
                pass_fds=tuple(watcher.inherited_fds),
                # None: a vfork, 0.2 ms; else a fork, 3 ms at 75 MB. Beside live gRPC channels 21 % of forked children
                # died; with GRPC_ENABLE_FORK_SUPPORT=0 none of 800 did.
                preexec_fn=in_child,
            )
        finally:
            os.close(fd)

    def format_args(self, sockets_fds: Any = None) -> list[str]:
        """The command as given: circus would expand `$(...)` and braces inside of it."""
        watcher: WorkerWatcher = self.watcher
        return list(watcher.argv)

    def exit_code(self) -> int | None:
        """The process is dead, so this returns at once, and reaps it."""
        code: int | None = self._worker.wait()
        return code


class AdoptedProcess(Process):  # type: ignore[misc]
    """A process that a killed arbiter started. It is no child of ours, so nobody can collect its exit code."""

    def __init__(self, watcher: WorkerWatcher, pid: int) -> None:
        super().__init__(watcher.name, 1, watcher.cmd, watcher=watcher, working_dir=watcher.working_dir, spawn=False)
        self._worker = RunningProcess(pid)
        self.started = self._worker.create_time()

    def exit_code(self) -> None:
        """Unknown. (psutil would wait until its present parent has reaped it.)"""

    def returncode(self) -> None:
        """Unknown."""

    def stop(self) -> None:
        """Nothing: circus calls this for what is dead."""


class WorkerWatcher(Watcher):  # type: ignore[misc]
    """One watcher per worker: a singleton that circus neither restarts nor kills.

    We restart with back-off and GPU checks. circus has neither (53 spawns in 10 s) and would hold its lock.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.refused: OSError | None = None
        """Why the latest start failed."""
        self._keep(spec)
        super().__init__(
            spec.name,
            shlex.join(spec.argv),
            env=dict(spec.env),
            working_dir=spec.cwd,
            singleton=True,
            respawn=False,
            copy_env=False,
            stop_children=False,  # circus would SIGTERM an engine's own processes at once and break a drain
            graceful_timeout=spec.graceful_timeout_s,
            max_retry=1,
        )

    def _keep(self, spec: LaunchSpec) -> None:
        self.argv = spec.argv
        self.log_file = spec.log_file
        self.death_signal = spec.death_signal
        self.asks_itself = spec.asks_itself
        self.inherited_fds = spec.inherited_fds

    def becomes(self, spec: LaunchSpec) -> None:
        """Its running process becomes that of `spec`. `rename` changes its name."""
        self._keep(spec)
        self.cmd, self.env = shlex.join(spec.argv), dict(spec.env)
        self.working_dir, self.graceful_timeout = spec.cwd, spec.graceful_timeout_s
        for process in self.processes.values():
            process.cmd, process.env = self.cmd, dict(spec.env)

    @property
    def _process_class(self) -> type[WorkerProcess]:
        return WorkerProcess

    @property
    def pid(self) -> int | None:
        """The pid of its one process. None if it does not run."""
        return next(iter(self.processes), None)

    def options(self, *args: Any) -> list[tuple[str, Any]]:
        """circus's options with masked secrets: `circusctl options` prints the environment."""
        return [(name, mask_env(value or {}) if name == "env" else value) for name, value in super().options(*args)]


class DynamoArbiter(Arbiter):  # type: ignore[misc]
    """The arbiter of one namespace. `supervisor` answers our commands."""

    def __init__(
        self,
        *,
        endpoint: str,
        pubsub_endpoint: str,
        supervisor: Any = None,
        on_exit: ExitCallback | None = None,
        check_delay_s: float = 1.0,
    ) -> None:
        self.supervisor = supervisor
        self.on_exit = on_exit
        self._exit_fds: dict[int, int] = {}
        self._control_gate, self._events_gate = gate_of(endpoint), gate_of(pubsub_endpoint)
        super().__init__(
            [],
            endpoint,
            pubsub_endpoint,
            check_delay=check_delay_s,
            statsd=False,  # its `stats` blocks the loop: 1.2 s at 256 watchers
            multicast_endpoint=None,  # UDP discovery would tell the network about us
            context=Context(),
            loop=IOLoop.current(),
            proc_name="dynamo-arbiter",
        )

    # circus's one exclusive slot would refuse every other command while one slow stop runs. The supervisor keeps the
    # order of each worker's commands.
    @property
    def _exclusive_running_command(self) -> None:
        return None

    @_exclusive_running_command.setter
    def _exclusive_running_command(self, value: object) -> None:
        return None

    def _init_context(self, context: Context[Any]) -> None:
        self.context = context
        self._ensure_ioloop()
        self.ctrl = WorkerController(
            f"ipc://{self._control_gate.inner}",
            self.multicast_endpoint,
            self.context,
            self.loop,
            self,
            self.check_delay,
            self.endpoint_owner,
        )

    def initialize(self) -> None:
        """As circus's, with gates before both of its sockets (`gate`). OSError if a gate cannot listen."""
        self.pubsub_endpoint = f"ipc://{self._events_gate.inner}"
        try:
            super().initialize()
        finally:
            self.pubsub_endpoint = f"ipc://{self._events_gate.outer}"
        for gate in (self._control_gate, self._events_gate):
            gate.open()

    async def start_process(self, spec: LaunchSpec) -> int:
        """Start it. KeyError if a watcher of that name has a live process."""
        if not os.access(spec.argv[0], os.X_OK):
            raise OSError(f"{spec.argv[0]} is not an executable file")
        old = self._watchers_names.get(spec.name.lower())
        if old is not None:
            if old.pid is not None:
                raise KeyError(spec.name)
            await self.forget(spec.name)
        watcher = self._new_watcher(spec)
        await watcher._start()
        pid: int | None = watcher.pid
        if pid is None:
            raise watcher.refused or OSError(f"{spec.name}: the process could not be started: {watcher.cmd}")
        self._watch_exit(spec.name, pid)
        return pid

    def _new_watcher(self, spec: LaunchSpec) -> WorkerWatcher:
        watcher = WorkerWatcher(spec)
        watcher.initialize(self.evpub_socket, self.sockets, self)
        self.watchers.append(watcher)
        self._watchers_names[spec.name.lower()] = watcher
        return watcher

    def adopt_process(self, spec: LaunchSpec, pid: int) -> None:
        """Make a watcher for a running process. `ProcessLookupError` if it has ended.

        The caller knows that it is the right process. Its exit is reported with the code None.
        """
        self._watch_exit(spec.name, pid)
        watcher = self._new_watcher(spec)
        try:
            watcher.processes[pid] = AdoptedProcess(watcher, pid)
        except NoSuchProcess:
            self._forget_fd(pid)
            self.watchers.remove(self._watchers_names.pop(spec.name.lower()))
            raise ProcessLookupError(f"pid {pid} of {spec.name} has just ended") from None
        watcher._status = "active"

    def rename_process(self, name: str, spec: LaunchSpec) -> int:
        watcher = self._watchers_names.get(name.lower())
        if watcher is None or watcher.pid is None:
            raise ProcessLookupError(f"{name} has ended")
        former = self._watchers_names.get(spec.name.lower())
        if former is not None and former.pid is not None:
            raise KeyError(spec.name)
        pid: int = watcher.pid
        self.rename(name, spec.name, pid)
        watcher.becomes(spec)
        watcher.notify_event("spawn", {"process_pid": pid, "time": time.time()})
        return pid

    def _watch_exit(self, name: str, pid: int) -> None:
        self._exit_fds[pid] = os.pidfd_open(pid)
        self._watch_exit_of(name, pid)

    def _watch_exit_of(self, name: str, pid: int) -> None:
        """Watch the exit under this name instead of another one.

        The pidfd of a process that has just ended is readable, too.
        """
        if (fd := self._exit_fds.get(pid)) is not None:
            asyncio.get_running_loop().add_reader(fd, self._exited, name, pid)

    def _exited(self, name: str, pid: int) -> None:
        """A pidfd became readable: reap now, not at the next `check_delay`."""
        self._forget_fd(pid)
        try:
            watcher = self.get_watcher(name)
        except KeyError:
            return
        process = watcher.processes.get(pid)
        code = process.exit_code() if process is not None else None
        watcher.reap_process(pid, None if code is None else _wait_status(code))
        watcher._status = "stopped"
        if self.on_exit is not None:
            self.on_exit(watcher.name, pid, code)

    def _forget_fd(self, pid: int) -> None:
        fd = self._exit_fds.pop(pid, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def reap_processes(self) -> None:
        """Reap adopted orphans only. Our own children are reaped by their pidfd, with their exit codes.

        circus's `waitpid(-1)` would take those codes away.
        """
        ours = {pid for watcher in self.watchers for pid in watcher.processes}
        for pid in _children() - ours:
            try:
                os.waitpid(pid, os.WNOHANG)  # has no effect on a live one
            except ChildProcessError:
                continue

    async def manage(self) -> None:
        """circus's timer only collects orphans."""
        self.reap_processes()

    def manage_watchers(self) -> Any:
        """Replaces circus's, which respawns, kills surplus processes and takes the exclusive slot."""
        return asyncio.ensure_future(self.manage())

    def rename(self, was: str, name: str, pid: int) -> None:
        if rename(self, was, name, pid):
            self._watch_exit_of(name, pid)

    async def forget(self, name: str) -> None:
        self._drop(name)

    def _drop(self, name: str) -> None:
        watcher = self._watchers_names.pop(name.lower(), None)
        if watcher is not None:
            self.watchers.remove(watcher)
            watcher.notify_event("remove", {"time": time.time()})

    @property
    def socket_files(self) -> tuple[Path, ...]:
        return tuple(file for gate in (self._control_gate, self._events_gate) for file in (gate.outer, gate.inner))

    async def renew_sockets(self) -> None:
        for gate, socket in ((self._control_gate, self.ctrl.ctrl_socket), (self._events_gate, self.evpub_socket)):
            listen_again(socket, f"ipc://{gate.inner}")
            if not gate.outer.exists():
                gate.open()

    def refuses_to_apply(self, file: str | None, overrides: Sequence[str]) -> Sequence[str]:
        return ()

    def stop(self) -> Any:
        """circusctl's `quit` is a `dynamo down`, never a kill of everything at once."""
        return asyncio.ensure_future(self._down())

    def stop_watchers(self, watcher_iter_func: Any = None) -> Any:
        """circusctl's `stop` without a name is a down, too: it would end NATS and etcd under live workers."""
        return asyncio.ensure_future(self._down())

    async def _down(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.down("circusctl quit")

    async def close(self) -> None:
        """Close the endpoint and the sockets. All processes must be gone."""
        for pid in list(self._exit_fds):
            self._forget_fd(pid)
        if self.running:
            self.stop_controller_and_close_sockets()
        self.context.destroy(linger=200)
        for gate in (self._control_gate, self._events_gate):
            await gate.close()
            gate.inner.unlink(missing_ok=True)


def _wait_status(code: int) -> int:
    return -code if code < 0 else code << 8


def _children() -> set[int]:
    """Pids of all our children, dead or alive.

    The dead are not sorted out by /proc/PID/stat. With 64 workers that took 0.13 % of a core all the time (benchmarks).
    """
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()

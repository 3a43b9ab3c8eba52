"""Runs our processes as watchers of a stock circusd, through its commands alone (`ProcessHost`).

It differs from our own arbiter in three points:

* circusd refuses commands while another one runs. They are tried again (`circus_client`).

* circusd polls once per `check_delay`. We see an exit by a pidfd and read its code from the zombie that circusd has not
collected yet.

* circusd stops watchers by SIGTERM, on `quit` all at once. Our watchers' stop signal is SIGCONT, which does nothing, so
the supervisor ends them in its order (`docs/circusd.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.circus_plugins import exec_worker
from dynamo_local.circus_plugins.circus_client import CircusClient, CircusdBusy, CircusdError
from dynamo_local.circus_plugins.tickets import Claim, Offer, Tickets
from dynamo_local.system.process_host import ExitCallback, LaunchSpec
from dynamo_local.system.processes import aend_session, wait_exit

log = logging.getLogger(__name__)

START_PATIENCE_S = 120.0
"""How long a start waits for circusd's slot. Then the restart policy decides when to try again."""
FORGET_PATIENCE_S = 2.0
"""A longer removal goes on in the background: only the list of watchers depends on it."""
REMOVE_PATIENCE_S = 3600.0
CLOSE_PATIENCE_S = 10.0
STOP_SIGNAL = signal.SIGCONT


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process of this host. `pidfd` is readable once it has ended."""

    pid: int
    pidfd: int


class CircusClientHost:
    """A `ProcessHost` on circusd. New processes fetch their tickets at `socket`.

    circusd waits at least `leave_bound_s` for a watcher to stop. `circusd_pid` must be the parent of circusd's
    processes: its death sends their death signal. Call `start` before use, `close` after.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        socket: Path,
        circusd_pid: int,
        on_exit: ExitCallback | None = None,
        leave_bound_s: float = 0.0,
        reply_timeout_s: float = 30.0,
    ) -> None:
        self.on_exit = on_exit
        self.circusd_endpoint = endpoint
        self.circusd_pid = circusd_pid
        self.hurried = False
        """circusd is stopping us. It holds its slot until we have ended, so no watcher can be removed any more."""
        self._tickets = Tickets(socket, parent=circusd_pid)
        self._leave_bound_s = leave_bound_s
        self._reply_timeout_s = reply_timeout_s
        self._connection: CircusClient | None = None
        self._running: dict[str, RunningProcess] = {}
        self._listed: dict[str, str] = {}
        """circusd's names of renamed processes, because circusd cannot rename a watcher."""
        self._removals: dict[str, asyncio.Task[None]] = {}

    @property
    def circusd(self) -> CircusClient:
        """The connection; only between `start` and `close`."""
        assert self._connection is not None, "the host is not started"
        return self._connection

    async def start(self) -> None:
        """Connect and listen. Raises `CircusdSilent` if there is no circusd."""
        self._connection = CircusClient(self.circusd_endpoint, reply_timeout_s=self._reply_timeout_s)
        await self.circusd.call("numwatchers")
        self._tickets.open()

    async def close(self) -> None:
        """Finish removals within a bound. Running processes go on."""
        if self._removals and not self.hurried:
            await asyncio.wait(self._removals.values(), timeout=CLOSE_PATIENCE_S)
        for task in list(self._removals.values()):
            task.cancel()
        await asyncio.gather(*self._removals.values(), return_exceptions=True)
        for running in self._running.values():
            asyncio.get_running_loop().remove_reader(running.pidfd)
            os.close(running.pidfd)
        self._running.clear()
        await self._tickets.close()
        if self._connection is not None:
            await self._connection.close()

    # --- starting --------------------------------------------------------------------------------

    async def start_process(self, spec: LaunchSpec) -> int:
        """Start it. KeyError if a process of that name runs."""
        if not os.access(spec.argv[0], os.X_OK):
            raise OSError(f"{spec.argv[0]} is not an executable file")
        if spec.name in self._running:
            raise KeyError(spec.name)
        await self._stop_removing(spec.name)
        offer = self._tickets.offer(spec)
        try:
            claim = await self._started(offer)
        except BaseException as error:
            await _end_unwanted(offer)
            if isinstance(error, CircusdError):
                raise OSError(str(error)) from error
            raise
        finally:
            self._tickets.withdraw(offer)
        # Nothing is awaited from here on, so the caller knows the pid before its exit can be reported.
        self._running[spec.name] = RunningProcess(claim.pid, claim.pidfd)
        self._watch(spec.name)
        return claim.pid

    def _watch(self, name: str) -> None:
        """Watch the exit under this name instead of another one."""
        asyncio.get_running_loop().add_reader(self._running[name].pidfd, self._exited, name)

    def rename(self, was: str, name: str, pid: int) -> None:
        """Rename it. circusd's list keeps the spawn name."""
        running = self._running.get(was)
        if running is None or running.pid != pid:
            return
        self._running[name] = self._running.pop(was)
        listed = self._listed.pop(was, was)
        if listed != name:
            self._listed[name] = listed
        self._watch(name)

    def adopt_process(self, spec: LaunchSpec, pid: int) -> None:
        """Take over a process. Its watcher is in circusd's list, or was in that of a killed circusd."""
        pidfd = os.pidfd_open(pid)
        self._running[spec.name] = RunningProcess(pid, pidfd)
        self._watch(spec.name)

    async def _started(self, offer: Offer) -> Claim:
        spec = offer.spec
        try:
            reply = await self._add(spec)
        except CircusdError as error:
            if "already exist" not in str(error):
                raise
            await self._make_room(spec.name)
            reply = await self._add(spec)
        if not reply.get("started"):
            raise OSError(f"{spec.name}: circusd could not start a process; its log says why")
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                return await offer.claimed
        except TimeoutError:
            raise OSError(f"{spec.name}: the process that circusd started never came for its ticket") from None

    async def _add(self, spec: LaunchSpec) -> dict[str, Any]:
        options = {
            "respawn": False,  # restarts are ours: back-off, GPU checks
            "singleton": True,
            "numprocesses": 1,
            "max_retry": 1,
            "copy_env": False,
            "env": {},
            "working_dir": "/",
            "stop_signal": int(STOP_SIGNAL),
            "stop_children": False,
            "graceful_timeout": max(spec.graceful_timeout_s, self._leave_bound_s),
        }
        return await self.circusd.exclusive(
            "add",
            patience_s=START_PATIENCE_S,
            name=spec.name,
            cmd=shlex.quote(sys.executable),
            args=self._args(spec.name),
            options=options,
            start=True,
            waiting=True,  # the reply comes after the spawn, and names its pid
        )

    def _args(self, name: str) -> list[str]:
        return ["-I", "-S", str(Path(exec_worker.__file__).resolve()), str(self._tickets.path), name]

    async def sweep(self, prefix: str) -> None:
        """Remove dead watchers of a predecessor with that prefix (lower case). Others stay."""
        for name in (await self.circusd.call("list"))["watchers"]:
            if name.startswith(prefix) and await self._is_ours(name) and not await self._pids(name):
                await self._remove(name, START_PATIENCE_S)

    async def _pids(self, name: str) -> list[int]:
        pids: list[int] = (await self.circusd.call("list", name=name))["pids"]
        return pids

    async def _make_room(self, name: str) -> None:
        """End and remove a watcher of that name if it is ours (a killed plugin's), else raise OSError."""
        if not await self._is_ours(name):
            raise OSError(f"circusd has another watcher named {name}; rename it, or give the graph another namespace")
        for pid in await self._pids(name):
            log.warning("left over from a killed plugin, ended: %s (pid %d)", name, pid)
            await aend_session(pid)
            if not await wait_exit(pid, self._reply_timeout_s):
                raise OSError(f"{name}: pid {pid} of a killed plugin does not end")
        await self._remove(name, START_PATIENCE_S)

    async def _is_ours(self, name: str) -> bool:
        """Whether its command names our socket. We hold the lock of that folder, so its former owner is dead."""
        args = (await self.circusd.call("options", name=name)).get("options", {}).get("args")
        return isinstance(args, list) and str(self._tickets.path) in args

    # --- exits -----------------------------------------------------------------------------------

    def _exited(self, name: str) -> None:
        running = self._running.pop(name)
        code = exit_code_of_zombie(running.pid)
        asyncio.get_running_loop().remove_reader(running.pidfd)
        os.close(running.pidfd)
        if self.on_exit is not None:
            self.on_exit(name, running.pid, code)

    # --- removing --------------------------------------------------------------------------------

    async def forget(self, name: str) -> None:
        """Remove its watcher. If circusd is busy, the removal goes on in the background."""
        name = self._listed.pop(name, name)
        await self._stop_removing(name)
        if self.hurried:
            log.info("%s stays in circusd's list, stopped, until the next start", name)
            return
        try:
            await self._remove(name, FORGET_PATIENCE_S)
        except CircusdBusy:
            self._removals[name] = self._in_background(name, self._remove(name, REMOVE_PATIENCE_S))
        except CircusdError as error:
            log.warning("%s could not be removed from circusd: %s", name, error)

    async def _remove(self, name: str, patience_s: float) -> None:
        if name in self._running:
            raise KeyError(name)  # circusd would stop it
        try:
            await self.circusd.exclusive("rm", patience_s=patience_s, name=name, waiting=True)
        except CircusdError as error:
            if "not found" not in str(error):
                raise

    def _in_background(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def done(task: asyncio.Task[None]) -> None:
            if self._removals.get(name) is task:
                del self._removals[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("%s could not be removed from circusd: %s", name, error)

        task = asyncio.ensure_future(work)
        task.add_done_callback(done)
        return task

    async def _stop_removing(self, name: str) -> None:
        """End a pending removal, because it must not hit the new watcher of that name. A sent one is awaited."""
        task = self._removals.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _end_unwanted(offer: Offer) -> None:
    """End the process of a cancelled start, if there is one: it must not run without an owner."""
    if offer.claimed.done() and not offer.claimed.cancelled() and offer.claimed.exception() is None:
        claim = offer.claimed.result()
        try:
            await aend_session(claim.pid)
        finally:
            os.close(claim.pidfd)
    else:
        offer.claimed.cancel()


def exit_code_of_zombie(pid: int) -> int | None:
    """The exit code of a process that its parent has not reaped yet (negative: a signal), else None.

    It is the last field of proc_pid_stat(5), readable to its own user. Only circusd, the parent, can call `waitpid`.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None

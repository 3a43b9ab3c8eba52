"""A process of its own for fits that take seconds and libraries of hundreds of megabytes.

It is started by the first task, answers one task at a time, and is ended after a while without any. It holds nothing
that is worth keeping, so whatever goes wrong with it has one cure: kill it, and start another for the next task.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import BinaryIO

import msgspec

from dynamo_local.core.types import Missing, how_it_ended
from dynamo_local.planner.values import Forecasts, ForecastTask
from dynamo_local.system.prctl import asking_to_die
from dynamo_local.system.processes import wait_exit

# --- wire
# How a task gets to the process that forecasts, and the answer back: four bytes of length, then msgpack.
#
# Each is a value of plain numbers; nothing that is read can run code.

HEAD_BYTES = 4

_tasks = msgspec.msgpack.Decoder(ForecastTask)
_answers = msgspec.msgpack.Decoder(Forecasts)


def framed(value: ForecastTask | Forecasts) -> bytes:
    """A task or an answer, as it is sent."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def read_task(incoming: BinaryIO) -> ForecastTask | None:
    """The next task; None where there will be none. Blocks."""
    head = incoming.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return _tasks.decode(incoming.read(int.from_bytes(head, "big")))


async def read_answer(incoming: asyncio.StreamReader) -> Forecasts:
    """The next answer. Raises `asyncio.IncompleteReadError` where the other side has ended."""
    head = await incoming.readexactly(HEAD_BYTES)
    return _answers.decode(await incoming.readexactly(int.from_bytes(head, "big")))


IDLE_S = 300.0
"""Without a task for so long it is ended. Windows of 180 s keep it: its imports take more than its forecasts, and a
host of GPUs has 250 MB for it."""
GONE_S = 5.0
"""How long a process that was killed may take to be gone before nobody waits for it any more."""
COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "dynamo_local.planner.forecasting")
INHERITED = ("PATH", "HOME", "LANG", "LC_*", "LD_LIBRARY_PATH", "PYTHON*", "TMPDIR")
"""Variables that it needs to find its libraries. It has no use for an address or a token."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Series of hundreds of numbers gain nothing by more, and the cores belong to those who serve."""


class ForecastProcess:
    """Runs tasks in the process, one after the other. For one event loop, whose thread must outlive the process: the
    kernel kills it when that thread ends. Call `close` at the end."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self._child is None else self._child.pid

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        """See `Forecaster` (`planner.sources`). Waiting for an earlier task, and the process's start, are part of the
        deadline."""
        try:
            async with asyncio.timeout(deadline_s), self._turn:
                return await self._answer(task)
        except TimeoutError:
            return Missing(f"the forecast by {task.predictor} was not there within {deadline_s:g} s")

    async def close(self) -> None:
        """End the process; returns when it is gone. A later task starts another."""
        self._end()
        while self._endings:
            await asyncio.gather(*self._endings)

    async def _answer(self, task: ForecastTask) -> Forecasts | Missing:
        if self._rest is not None:
            self._rest.cancel()
        answered = False
        try:
            reported = await self._ask(task)
            answered = not isinstance(reported, Missing)
            return reported
        finally:
            # Where there was no answer in time, a late one would be taken for that of the next task.
            if answered:
                self._rest = asyncio.get_running_loop().call_later(self._idle_s, self._end)
            else:
                self._end()

    async def _ask(self, task: ForecastTask) -> Forecasts | Missing:
        failed = f"the forecast by {task.predictor} failed"
        try:
            child = self._child = self._child or _Child()
        except OSError as error:
            return Missing(f"{failed}: its process cannot be started: {error.strerror or error}")
        try:
            return await child.ask(task)
        except msgspec.MsgspecError as error:
            return Missing(f"{failed}: its process gave no answer but {error}")
        except (OSError, EOFError):
            await child.gone(GONE_S)
            return Missing(f"{failed}: its process {how_it_ended(child.code)}")

    def _end(self) -> None:
        """Kill the process, if there is one; its end is awaited elsewhere."""
        if self._rest is not None:
            self._rest.cancel()
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        ending = asyncio.ensure_future(child.gone(GONE_S))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


class _Child:
    """The process, in a session of its own; we hold the other end of its standard input. `OSError` where it cannot be
    started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    COMMAND,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={**_inherited(os.environ), **ONE_THREAD, **asking_to_die(signal.SIGKILL, os.getpid())},
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        self._socket: socket.socket | None = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, and where the arbiter has collected it with its orphans (Python says 0
        then; by itself the process never ends so)."""
        return self._process.poll() or None

    async def ask(self, task: ForecastTask) -> Forecasts:
        """Its answer. `OSError` or `EOFError` where it is gone."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
        reader, writer = self._streams
        writer.write(framed(task))
        await writer.drain()
        return await read_answer(reader)

    def kill(self) -> None:
        """It, and what its libraries have started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        elif self._socket is not None:
            self._socket.close()

    async def gone(self, deadline_s: float) -> None:
        """Wait for its end, and reap it."""
        await wait_exit(self.pid, deadline_s)
        self._process.poll()


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if any(fnmatchcase(name, known) for known in INHERITED)}

"""What the workers of one component ask each other on this host, each on a unix socket in a folder that they share.

Nobody owns what they have in common: who starts is given it by any that is there, so that the arbiter, its successor
and the guardian need not know of it. The folder is private to the user, and goes with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dynamo_local.errors import StartTimedOut
from dynamo_local.system import fd_messages

logger = logging.getLogger(__name__)

SUFFIX = ".sock"
ASK_TIMEOUT_S = 0.5
"""One that answers takes a millisecond. Who does not in this time is hung or stopped, and counts as absent."""
START_LOCK_S = 20.0
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """`facts` is JSON; `fds` are open descriptors, the asker's own from then on."""

    facts: Any
    fds: Sequence[int] = ()


class Siblings:
    """`name` is this worker's among those in the `folder`, which is made where it is missing."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        # A socket's path has 107 bytes at most, and a run's folder may have as many: this one is short.
        self._fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._short = Path(f"/proc/self/fd/{self._fd}")
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def starting_alone(self) -> AsyncIterator[None]:
        """No two of them start within this at once. Raises `StartTimedOut`."""
        lock = FileLock(self.folder / "start.lock", mode=0o600, thread_local=False)
        try:
            await asyncio.to_thread(lock.acquire, timeout=START_LOCK_S, poll_interval=0.01)
        except Timeout:
            raise StartTimedOut(
                f"{self.folder}: another worker has held the start of this component for {START_LOCK_S:g} s"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def answer(self, reply: Callable[[str], Awaitable[Reply]]) -> None:
        """From now on the others get what `reply` says to what they ask. OSError where the socket cannot be had."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = self._short / f"{self.name}{SUFFIX}"
            path.unlink(missing_ok=True)  # of a process that was killed: the name is ours now
            listening.bind(str(path))
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        self._keep(asyncio.create_task(self._accept(listening, reply), name="siblings"))

    async def ask(self, what: str) -> dict[str, Reply]:
        """What each of the others answers, by name; who is gone, or does not answer in time, is left out."""
        try:
            names = [path.stem for path in self._short.iterdir() if path.suffix == SUFFIX and path.stem != self.name]
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.folder, error)
            return {}
        found = await asyncio.gather(*(asyncio.to_thread(self._ask, name, what) for name in names))
        return {name: reply for name, reply in zip(names, found, strict=True) if reply is not None}

    async def close(self) -> None:
        """Answer nothing more."""
        listening, self._listening = self._listening, None
        if listening is not None:
            (self._short / f"{self.name}{SUFFIX}").unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if listening is not None:
            listening.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ask(self, name: str, what: str) -> Reply | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ASK_TIMEOUT_S)
            try:
                connection.connect(str(self._short / f"{name}{SUFFIX}"))
                fd_messages.send(connection, what)
                facts, fds = fd_messages.receive(connection)
            except (OSError, ValueError) as error:
                if not isinstance(error, ConnectionError | FileNotFoundError):
                    logger.warning("%s does not say %r: %s", name, what, error)
                return None
        return Reply(facts, tuple(fds))

    async def _accept(self, listening: socket.socket, reply: Callable[[str], Awaitable[Reply]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listening)
            self._keep(asyncio.create_task(_answered(connection, reply), name="answer to a sibling"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answered(connection: socket.socket, reply: Callable[[str], Awaitable[Reply]]) -> None:
    with connection, contextlib.suppress(OSError, TimeoutError):  # who asked has gone: there is nobody to tell
        async with asyncio.timeout(ASK_TIMEOUT_S):
            what = await fd_messages.areceive(connection)
            answer = await reply(str(what))
            await fd_messages.asend(connection, answer.facts, answer.fds)

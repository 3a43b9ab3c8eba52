"""A Frontend's port, which its siblings (other workers of its component) have, too.

One listening socket: the first Frontend binds it, and any that is there hands it to the next. So no connection is lost
with the one that leaves: what waits in the kernel's queue is everybody's. (With a socket each, and SO_REUSEPORT, the
kernel resets those that wait at the one that is closed.)

Who serves accepts. Who does not yet, or not any more, leaves what comes to those who do; where nobody does it accepts
all the same, and says so: 503 is an answer, a connection that nobody takes is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamo_local.components.http_metrics import HttpMetrics
from dynamo_local.components.openai import access
from dynamo_local.components.openai.port import counts
from dynamo_local.components.openai.port.siblings import Reply, Siblings
from dynamo_local.components.openai.server import BACKLOG, HttpServer
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
"""While it does not serve itself: how soon it notices that a sibling does, or that none does any more."""
KEPT_S = 1.0
"""After its last answer: connections that clients have kept may bring one more request, which is answered, and the last
of its connection. Those that bring none are idle, and closed."""

SOCKET, SERVES, COUNTS = "socket", "serves", "counts"
"""What siblings ask each other."""
FILE = ".counts"


class SharedPort:
    """Between `open` and `close`. `refusing` is set while requests are to be refused: it leaves, and nobody else is
    there."""

    def __init__(self, settings: FrontendConfig, metrics: HttpMetrics, siblings: Siblings | None) -> None:
        self.refusing = asyncio.Event()
        self.metrics = metrics
        self.sock: socket.socket
        self._settings = settings
        self._siblings = siblings
        self._asked = [settings.host, settings.port]
        self._server: HttpServer | None = None
        self._ready = self._leaving = self._covered = self._shared = False
        self._deciding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._before: counts.Counts = []

    # --- coming ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Have the socket: a sibling's, or a new one. Raises `ConfigError`, `StartTimedOut`."""
        if self._siblings is None:
            self.sock = self._bound()
            return
        async with self._siblings.starting_alone():
            sock = await self._handed_over()
            if sock is None:
                sock = self._bound()
            else:
                access.check_reach(sock, self._settings)
            self.sock = sock
            self._before = self._kept(self._siblings.name)
            try:
                self._siblings.answer(self._answer)
            except OSError as error:
                sock.close()
                raise ConfigError(f"Frontend: no socket can be made in {self._siblings.folder}: {error}") from error

    def served_by(self, server: HttpServer) -> None:
        """It has begun to take connections from `sock`."""
        self._server = server
        server.share(self._shared)

    async def follow(self) -> None:
        """Take connections or leave them to others, until cancelled."""
        while True:
            await self._decide()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._serves else LOOK_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()

    async def ready(self) -> None:
        """The worker is registered: it serves."""
        self._ready = True
        await self._decide()

    # --- going, and coming back --------------------------------------------------------------------

    async def leave(self) -> None:
        """It takes nothing new. Returns when that is so."""
        self._leaving = True
        await self._decide()
        self._changed.set()

    async def kept_connections(self) -> None:
        """Return when clients have let go of their connections, or had the time to. At once where all is refused."""
        if self._covered and self._server is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEPT_S):
                    await self._server.wait_unconnected()

    async def resume(self) -> None:
        """The drain was taken back."""
        self._leaving = False
        await self._decide()

    async def close(self) -> None:
        """Keep what was counted; tell siblings nothing more. The socket is the server's to close."""
        if self._siblings is not None:
            if self._server is not None:
                await self._keep(self._counts())
            await self._siblings.close()

    # --- metrics -----------------------------------------------------------------------------------

    async def page(self) -> bytes:
        """The sum over all workers of the component that this run had."""
        if self._siblings is None:
            return self.metrics.exposition()
        own = self._counts()
        await self._keep(own)
        told = await self._siblings.ask(COUNTS)
        others = {name: found for name, reply in told.items() if (found := _counts_in(name, reply)) is not None}
        absent = [self._kept(name) for name in self._names() if name not in others]
        if not others and not absent and not self._before:
            return self.metrics.exposition()
        return counts.page(counts.added((own, *others.values(), *absent)))

    def _counts(self) -> counts.Counts:
        return counts.added((counts.counts_of(self.metrics.registry), self._before))

    async def _keep(self, told: counts.Counts) -> None:
        """What was told must be known once this process is killed."""
        assert self._siblings is not None
        file = self._siblings.folder / f"{self._siblings.name}{FILE}"
        try:
            await asyncio.to_thread(_write, file, msgspec.json.encode(counts.ended(told)))
        except OSError as error:
            logger.warning("%s cannot be written: /metrics will fall when this worker ends: %s", file, error)

    def _kept(self, name: str) -> counts.Counts:
        assert self._siblings is not None
        try:
            raw = (self._siblings.folder / f"{name}{FILE}").read_bytes()
            return msgspec.json.decode(raw, type=counts.Counts)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("what %s has counted cannot be read: %s", name, error)
            return []

    def _names(self) -> Iterator[str]:
        assert self._siblings is not None
        for file in self._siblings.folder.glob(f"*{FILE}"):
            if file.stem != self._siblings.name:
                yield file.stem

    # --- among siblings ------------------------------------------------------------------------------

    @property
    def _serves(self) -> bool:
        return self._ready and not self._leaving

    async def _decide(self) -> None:
        async with self._deciding:
            others = False if self._serves else await self._others_serve()
            self._covered = covered = others and not self._serves
            if self._leaving and not covered:
                self.refusing.set()
            else:
                self.refusing.clear()
            if self._server is not None:
                self._server.take_connections(not covered)
                self._server.answer_last(self._leaving and covered)

    async def _others_serve(self) -> bool:
        if self._siblings is None:
            return False
        replies = await self._siblings.ask(SERVES)
        return any(reply.facts == [*self._asked, True] for reply in replies.values())

    async def _answer(self, what: str) -> Reply:
        if what == COUNTS:
            own = self._counts()
            await self._keep(own)
            return Reply(msgspec.to_builtins(own))
        if what == SOCKET:
            self._shared = True
            if self._server is not None:
                self._server.share(True)
            return Reply(self._asked, (self.sock.fileno(),))
        return Reply([*self._asked, self._serves])

    def _bound(self) -> socket.socket:
        sock = access.listening_socket(self._settings)
        sock.listen(BACKLOG)  # from here on nobody else can have the port
        return sock

    async def _handed_over(self) -> socket.socket | None:
        """The socket of a sibling that was asked for the same address; whatever the port that 0 has come to."""
        assert self._siblings is not None
        found: socket.socket | None = None
        for name, reply in (await self._siblings.ask(SOCKET)).items():
            for fd in reply.fds:
                if found is None and reply.facts == self._asked:
                    found = socket.socket(fileno=fd)
                    self._shared = True
                    logger.info("%s listens there already: its socket is this worker's, too", name)
                else:
                    os.close(fd)
        return found


def _counts_in(name: str, reply: Reply) -> counts.Counts | None:
    try:
        return msgspec.convert(reply.facts, counts.Counts)
    except msgspec.ValidationError as error:  # of another release, after an apply
        logger.warning("what %s counts cannot be read: %s", name, error)
        return None


def _write(file: Path, data: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.replace(file)

"""Taking connections from a listening socket that other processes accept from, too; with breaks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

AT_ONCE_ALONE = 64
AT_ONCE_SHARED = 2
"""Connections that are taken before the loop does something else. Whose loop is free comes back first: so the burst
of a hundred clients is parted among those who share the socket, and the one with less to do takes more."""
RETRY_S = 0.5
"""After an error that is the process's and not the connection's: no descriptors are left."""


class Acceptor:
    """Between `begin` and `close`. The socket must not block; it stays open, for it is somebody else's, too."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._tls: ssl.SSLContext | None = None
        self._wanted = True
        self._reading = False
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.shared = False

    def begin(self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        """Each connection gets a protocol that `make` makes; with `tls` after its handshake."""
        self._make, self._tls = make, tls
        self._follow()

    def accept(self) -> None:
        """Take connections."""
        self._wanted = True
        self._follow()

    def pause(self) -> None:
        """Leave those that come to others."""
        self._wanted = False
        self._follow()

    @property
    def accepts(self) -> bool:
        """Whether it takes connections now."""
        return self._reading

    def close(self) -> None:
        """Take nothing more, for good."""
        self._make = None
        self._follow()

    def _follow(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        wanted = self._wanted and self._make is not None
        if wanted == self._reading:
            return
        loop = asyncio.get_running_loop()
        # The kernel forgets a watched socket only with its last descriptor, which others have: so take it out.
        if wanted:
            loop.add_reader(self._sock, self._take)
        else:
            loop.remove_reader(self._sock)
        self._reading = wanted

    def _take(self) -> None:
        for _ in range(AT_ONCE_SHARED if self.shared else AT_ONCE_ALONE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process has it, or the client has left
            except OSError as error:
                logger.error("no connection can be taken for %g s: %s", RETRY_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock)
                self._reading = False
                self._retry = loop.call_later(RETRY_S, self._follow)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(self._connected(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected(self, connection: socket.socket) -> None:
        make = self._make
        if make is None:
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self._tls)
        except (OSError, TimeoutError) as error:  # a handshake that failed, a client that left
            logger.debug("a connection came to nothing: %s", error)
            connection.close()

"""Names and ports that one process of this host holds, for as long as it lives.

A lease is an *abstract* unix socket of that name. It is host-wide across users and namespaces. The kernel gives it back
when the process ends, in whatever way. There is no file to go stale. The names are scoped to the network namespace, as
TCP ports are.
"""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from dynamo_local.errors import ConfigError


def lease(name: str) -> socket.socket | None:
    """Hold that name until the socket is closed. None: another process on this host holds it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0dynamo-local/{name}")
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return held


def is_free(port: int) -> bool:
    """No process listens on this TCP port, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


# A loopback port that stays reserved from its choice to the server's start, and over the server's restarts.

LOOPBACK = "127.0.0.1"


class PortLease:
    """A free loopback TCP port, reserved as long as the lease is open.

    The lease is a bound socket that never listens. Linux then does not choose the port for port 0 or `connect`. A
    server with SO_REUSEADDR, such as every Go server, can still listen on it, and again after a restart. So no other
    process takes the port between its choice and the server's start.
    """

    def __init__(self, port: int = 0) -> None:
        """Lease that port, or any free one for 0. Raises `ConfigError` if it is taken."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"port {port} on {LOOPBACK} cannot be used: {error.strerror}; choose another") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back. Closing twice is no error."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

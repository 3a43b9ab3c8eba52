"""A loopback port that stays ours between choosing it and the server's start, and over its restarts."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from dynamo_local.errors import ConfigError

LOOPBACK = "127.0.0.1"


class PortLease:
    """A free loopback TCP port that nobody else is given for as long as the lease is open.

    It keeps a bound socket that never listens. Linux then leaves the port out of what port 0 and `connect` pick
    from, while a server that sets SO_REUSEADDR (every Go server does) can still bind and listen on it, and again
    after a restart. So no other process slips in between choosing a port and the server's start.
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

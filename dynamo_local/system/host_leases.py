"""Names and ports that one process of this host holds, for as long as it lives.

A lease is an *abstract* unix socket of that name: host-wide across users and namespaces, and given back by the kernel
when the process ends in whatever way. There is no file to go stale. The names are scoped to
the network namespace, as TCP ports are.
"""

from __future__ import annotations

import errno
import socket


def lease(name: str) -> socket.socket | None:
    """Hold that name until the socket is closed; None if somebody else on this host holds it."""
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
    """Nobody listens on this TCP port, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True

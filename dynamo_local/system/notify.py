"""systemd's readiness protocol (sd_notify(3)): one datagram to `$NOTIFY_SOCKET`; silently nothing without one."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> bool:
    """Send e.g. `READY=1` or `STOPPING=1`; False where no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
            client.sendto(message.encode(), address)
    except OSError:
        return False  # nobody listens any more
    return True

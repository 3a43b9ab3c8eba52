"""Bytes that wait in a connection: an answer that its reader does not take, a request that has come."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios

LOOK_EVERY_S = 1.0
"""How often a worker that leaves looks for readers that take nothing."""


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the reader's host (a TCP socket) or process (a unix socket) has not taken: ours and the kernel's."""
    buffered: int = transport.get_write_buffer_size()
    return buffered + _queued_bytes(transport, termios.TIOCOUTQ)


def waits_to_be_read(transport: asyncio.Transport) -> bool:
    """Whether the kernel holds bytes that this process has not read."""
    return _queued_bytes(transport, termios.FIONREAD) > 0


def _queued_bytes(transport: asyncio.Transport, queue: int) -> int:
    """Bytes in the kernel's `queue` of the transport's socket; 0 once it is closed."""
    sock = transport.get_extra_info("socket")
    try:
        found = fcntl.ioctl(sock.fileno(), queue, bytes(4))
    except (OSError, ValueError, AttributeError):  # closed
        return 0
    return int(struct.unpack("i", found)[0])


def is_abandoned(unread_s: float | None, leaving_s: float, bound_s: float) -> bool:
    """Whether an answer's reader has taken nothing for `bound_s`, all of it while the worker left."""
    return unread_s is not None and min(unread_s, leaving_s) >= bound_s


class UnreadWatch:
    """One connection's. It waits for its reader between `begin`, which looks at the queue once, and `end`.

    A reader that takes a little counts as reading: the kernel's queue is looked at, not only that of this process.
    """

    __slots__ = ("_since_s", "_transport", "_unsent")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._since_s = 0.0
        self._unsent = 0

    def begin(self, transport: asyncio.Transport, now_s: float) -> None:
        """From now on something waits until the reader takes what was written."""
        if self._transport is None:
            self._transport, self._since_s, self._unsent = transport, now_s, unsent_bytes(transport)

    def end(self) -> None:
        """Nothing waits for the reader any more."""
        self._transport = None

    def unread_s(self, now_s: float) -> float | None:
        """For how long it has taken nothing. None: nothing waits for it."""
        if self._transport is None:
            return None
        unsent = unsent_bytes(self._transport)
        if unsent < self._unsent:
            self._since_s = now_s
        self._unsent = unsent
        return now_s - self._since_s

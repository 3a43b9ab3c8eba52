"""The worker's half of a response: the connection to the caller, and the frames written to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, cast

from dynamo_local import errors
from dynamo_local.errors import StreamGap
from dynamo_local.system.unread import UnreadWatch
from dynamo_local.transport.requests.frames import (
    FrameDecoder,
    FrameKind,
    data_frame,
    encode_error,
    encode_value,
    frame,
)

Keep = Callable[[asyncio.Transport, bool], "KeptConnection | None"]
"""Takes a connection over when its answer has ended. None: the connection ends, too."""

FLUSH_BYTES: Final = 64 * 1024
FLUSH_ITEMS: Final = 512
"""A frame is written when this much is pending, or at the end of the event loop's pass."""

KEEP_BYTES: Final = 64 * 1024
"""After a larger answer the connection is not kept: that its reader has it all is known when he closes it."""

TAKEN_AFTER_S: Final = 0.005
"""How long a worker that was asked on a kept connection waits for its first items before it says that it has taken the
request. The caller waits a thousand times as long for that."""

SEND_BUFFER_BYTES: Final = 128 * 1024
"""The kernel's send buffer, fixed because it would grow to 4 MiB per slow reader."""


class ResponseSender(asyncio.Protocol):
    """Writes items to a caller: many per frame under load, none unbounded.

    Items that are put in one pass of the event loop share a frame. While the socket takes nothing they wait here, up
    to `FLUSH_BYTES` or `FLUSH_ITEMS`. Then `put` gives the handler something to await. `go` is the payload that came
    with the caller's GO, None if the connection closed before. When the connection is gone, `lost` is done and
    `on_lost` was called. With `keep` the connection may be kept at the end. `lost` is then done once the kernel has
    the whole answer: bytes on a unix socket are read even if their writer is gone.
    """

    def __init__(self, token: bytes, on_lost: Callable[[], None]) -> None:
        self.keep: Keep | None = None
        self._bytes = 0
        self._token = token
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._sent = 0
        self._flush_scheduled = False
        self._finished = False
        self._room: asyncio.Future[None] | None = None
        self._writable = True
        self._unread = UnreadWatch()
        self._transport: asyncio.Transport | None = None
        self.go: asyncio.Future[bytes | None] = self._loop.create_future()
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @property
    def pending_bytes(self) -> int:
        """Held in this process for the caller."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._pending_bytes + buffered

    @property
    def finished(self) -> bool:
        """Whether nothing more can be sent: the stream has ended, or its connection."""
        return self._finished

    def unread_s(self) -> float | None:
        """For how long the caller has taken nothing of what waits for it. None: nothing does."""
        return self._unread.unread_s(self._loop.time())

    # --- the socket's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the methods of asyncio.Transport without deriving from it.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=FLUSH_BYTES)
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport.write(frame(FrameKind.HELLO, 0, self._token))

    def resume(self, transport: asyncio.Transport) -> None:
        """Answer on a kept connection. Items tell the caller that the request was taken. If none come soon, TAKEN
        says it."""
        self._transport = transport
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=FLUSH_BYTES)
        self._loop.call_later(TAKEN_AFTER_S, self._say_taken)

    def _say_taken(self) -> None:
        if self._bytes == 0 and not self._finished and self._transport is not None:
            self._transport.write(frame(FrameKind.TAKEN))

    def data_received(self, data: bytes) -> None:
        try:
            for kind, _, body in self._decoder.feed(data):
                if kind == FrameKind.GO and not self.go.done():
                    self.go.set_result(bytes(body))
        except errors.StreamGap:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finished = True
        self._unread.end()
        self._pending.clear()
        self._pending_bytes = 0
        for future in (self.go, self.lost, self._room):
            if future is not None and not future.done():
                future.set_result(None)
        self._on_lost()

    def pause_writing(self) -> None:
        self._writable = False
        if self._transport is not None:
            self._unread.begin(self._transport, self._loop.time())

    def resume_writing(self) -> None:
        self._writable = True
        self._unread.end()
        self._flush()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # --- the handler's side ---

    def put(self, item: object) -> asyncio.Future[None] | None:
        """Queue one item. A future comes back where the handler must let the caller catch up.

        Raises TypeError or ValueError for an item that cannot travel, `RequestCancelled` once the stream has ended
        (a handler that ignores its cancellation stops here).
        """
        if self._finished:
            raise errors.RequestCancelled("the response stream has ended: nobody reads this item")
        data = encode_value(item)
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes < FLUSH_BYTES and len(self._pending) < FLUSH_ITEMS:
            if not self._flush_scheduled:
                self._flush_scheduled = True
                self._loop.call_soon(self._flush)
            return None
        self._flush()
        self._room = self._loop.create_future()
        if self._writable:
            # Not full, but a handler that never awaits anything else must let others run.
            self._loop.call_soon(_set, self._room)
        return self._room

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._pending and self._writable and not self._finished:
            assert self._transport is not None
            self._transport.write(self._unwritten())

    def _unwritten(self) -> bytes:
        """The bytes to write. They count as written from now on."""
        if not self._pending:
            return b""
        items, self._pending, self._pending_bytes = self._pending, [], 0
        data = data_frame(self._sent, items)
        self._sent += len(items)
        self._bytes += len(data)
        return data

    def end(self, error: BaseException | None = None) -> None:
        """Write what is pending and the END (or ERROR) frame, once. The caller then closes the connection, or keeps
        it where it may."""
        if self._finished or self._transport is None:
            return
        rest = self._unwritten()  # bounded: at most one frame more than the socket wanted
        self._finished = True
        if error is not None:
            self._transport.write(rest + frame(FrameKind.ERROR, self._sent, encode_error(error)))
        elif (kept := self._kept_by()) is not None:
            kept.begin(rest + frame(FrameKind.END_KEPT, self._sent), self._handed_over)
        else:
            self._transport.write(rest + frame(FrameKind.END, self._sent))
        if self._transport is not None:
            self._unread.begin(self._transport, self._loop.time())  # the caller closes when it has read all

    def _kept_by(self) -> KeptConnection | None:
        if self.keep is None or self._transport is None or self._bytes > KEEP_BYTES:
            return None
        return self.keep(self._transport, self._writable)

    def _handed_over(self) -> None:
        self._transport = None
        self._unread.end()
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        """Close now, whatever is unsent."""
        self._finished = True
        if self._transport is not None:
            self._transport.abort()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# The worker keeps connections to callers open: the next request may come on one of them.

OnRequest = Callable[[bytes, asyncio.Transport], None]
"""Takes a request, encoded, and the connection on which it came."""


class KeptConnection(asyncio.Protocol):
    """From the end of one answer to the next request."""

    def __init__(self, transport: asyncio.Transport, of: CallersConnections, *, writable: bool) -> None:
        self.transport = transport
        self._of = of
        self._decoder = FrameDecoder()
        self._writable = writable
        self._sent: Callable[[], None] | None = None

    def begin(self, end: bytes, sent: Callable[[], None]) -> None:
        """Write the end of an answer, and call `sent` when the kernel has it all, or the connection is gone."""
        self.transport.set_protocol(self)
        self.transport.set_write_buffer_limits(high=0)  # so that we are told when nothing is left to be written
        self.transport.write(end)
        self._sent = sent
        if self._writable:
            self._all_sent()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._all_sent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._of.remove(self)
        self._all_sent()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except StreamGap:
            self.transport.abort()
            return
        for kind, _, body in frames:
            if kind != FrameKind.ASK or not self._of.remove(self):
                self.transport.abort()  # not a caller of ours: those wait for the answer
                return
            self._all_sent()
            self._of.on_request(bytes(body), self.transport)

    def _all_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent()


class CallersConnections:
    """Those of one endpoint, as long as it has its subject."""

    def __init__(self, on_request: OnRequest) -> None:
        self.on_request = on_request
        self._kept: set[KeptConnection] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, transport: asyncio.Transport, writable: bool) -> KeptConnection | None:
        """Takes the connection of an answer over. None once this is closed. `writable`: it takes more."""
        if self._closed or transport.is_closing():
            return None
        kept = KeptConnection(transport, self, writable=writable)
        self._kept.add(kept)
        return kept

    def remove(self, kept: KeptConnection) -> bool:
        """Whether it was one of them until now."""
        if kept not in self._kept:
            return False
        self._kept.remove(kept)
        return True

    def close(self) -> None:
        """End them, once all is written. A request that is on its way on one of them comes again by NATS."""
        self._closed = True
        for kept in list(self._kept):
            kept.transport.close()
        self._kept.clear()

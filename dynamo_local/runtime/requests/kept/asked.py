"""The worker's side: connections to callers on which the next request may come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo_local.errors import StreamGap
from dynamo_local.runtime.requests.frames import FrameDecoder, FrameKind

Asked = Callable[[bytes, asyncio.Transport], None]
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
            self._of.asked(bytes(body), self.transport)

    def _all_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent()


class CallersConnections:
    """Those of one endpoint, as long as it has its subject."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._kept: set[KeptConnection] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, transport: asyncio.Transport, writable: bool) -> KeptConnection | None:
        """Who takes the connection of an answer over; None once this is closed. `writable`: it takes more."""
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

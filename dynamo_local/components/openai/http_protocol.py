"""uvicorn's HTTP protocol, with bounds on what a connection may send before, beside and behind a request's body.

uvicorn and its parser have none: a header that never ends fills memory, a connection that sends half a head is kept
for ever, and so is each of any number of requests that were sent without waiting for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.http_io import CONNECTION

MAX_HEAD_BYTES: Final = 64 * 1024
"""The request line, all headers and all trailers; beyond it 431."""

MAX_OVERHEAD_PER_BYTE: Final = 8
"""What a chunked body may cost besides itself: six bytes where each chunk has one."""

MAX_PIPELINED: Final = 16
"""Requests that wait for the answer to the one before. No client of this API sends one."""

HEAD_TIMEOUT_S: Final = 30.0
"""For a request's head, from its first byte; past it 408."""

SILENCE_TIMEOUT_S: Final = 75.0
"""For the first byte of a new connection, as for that of another request on one that was kept. It was 30 s: of a
thousand connections that one client opened at once on a host with too much to do, some were closed before the client
had come to write on them, and it saw a reset."""

MESSAGE_TIMEOUT_S: Final = 60.0
"""For the body, from the end of the head. Who reads it gives up earlier, with 408; this ends connections whose body
nobody reads."""

LINGER_S: Final = 2.0
"""After a refusal what the client still sends is dropped: closing at once would reset the connection before the client
has read the answer."""


class Client:
    """`http_io.Connection` of one exchange: writes the parts of a body at once, and tells when the client has left."""

    __slots__ = ("_protocol", "cycle")

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self.cycle: RequestResponseCycle | None = None

    def write(self, data: bytes) -> bool:
        """False where it must be sent the usual way."""
        cycle = self.cycle
        if cycle is None or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.response_complete:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def body(self) -> bytes | None:
        """All of it where it is here, and then no more; None where a part is still to come, or the client has left."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.flow.resume_reading()
        cycle.message_event.clear()
        return body

    def all_sent(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.flow.write_paused and cycle.transport.get_write_buffer_size() == 0

    def cut(self) -> None:
        """Close the connection; what is unsent is lost."""
        self._protocol.transport.abort()
        if self.cycle is not None:
            self.cycle.disconnected = True

    def on_lost(self, callback: Callable[[], None] | None) -> bool:
        """Call it when the connection is lost; False where it is."""
        self._protocol.on_lost = callback
        return self.cycle is not None and not self.cycle.disconnected


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Refused requests never reach the application."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._in_head = self._silent = True
        self._field_bytes = 0
        self._overhead_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] | None = None

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(SILENCE_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_within(None)
        super().connection_lost(exc)
        if (left := self.on_lost) is not None:
            left()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._timer is None or self._silent:  # another request on a connection that was kept, or its first
            self._silent = False
            self._expect_within(HEAD_TIMEOUT_S)
        self._overhead_bytes += len(data)
        super().data_received(data)
        # What a field's parts have come to is seen when it ends: of one that does not end, all bytes count.
        if self._overhead_bytes > MAX_HEAD_BYTES and not self._refused and not self.transport.is_closing():
            self._refuse(_too_large())

    def shutdown(self) -> None:
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    # --- what the parser says ---

    def on_message_begin(self) -> None:
        self._in_head = True
        self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        if self._field_bytes <= MAX_HEAD_BYTES:
            super().on_header(name, value)
        else:
            self._refuse(_too_large())

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self._field_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(ApiError(429, f"At most {MAX_PIPELINED} requests may wait on one connection."))
        else:
            self._in_head = False
            self._overhead_bytes = 0
            self._expect_within(MESSAGE_TIMEOUT_S)
            client = Client(self)
            cast(dict[str, Any], self.scope)["extensions"] = {CONNECTION: client}
            super().on_headers_complete()
            client.cycle = self.cycle

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._overhead_bytes = max(0, self._overhead_bytes - (1 + MAX_OVERHEAD_PER_BYTE) * len(body))
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._in_head = True
            self._overhead_bytes = 0
            self._expect_within(None)
            super().on_message_complete()

    # --- bounds ---

    def _expect_within(self, timeout_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        if not self._in_head:
            self.transport.close()
        elif self._overhead_bytes == 0:
            self.transport.close()  # it has sent nothing: there is nothing to answer
        else:
            message = f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s."
            self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer is under way, take nothing more, and close."""
        if self._refused:
            return
        self._refused = True
        self._expect_within(None)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_answer(error))
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


def _too_large() -> ApiError:
    message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, code="request_header_fields_too_large")


def _answer(error: ApiError) -> bytes:
    body = error.body()
    head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body

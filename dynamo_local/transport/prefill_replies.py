"""How a prefill's result comes back to the decode worker: over a unix socket between the two, not through the queue.

The decode side confirms each reply. So the prefill worker knows whether its KV is wanted: nobody listening
(`WorkerLost`) or nobody waiting (`RequestCancelled`) means "free it now".

A decode worker listens at an abstract unix socket. Its name is in each entry. A prefill worker keeps one connection to
each decode worker. The frames are those of `requests.frames`: DATA with a reply and its sender's number. The answer is
TAKEN with that number, or ERROR if nobody waits for the reply.

Before its reply, a prefill worker says that it has begun with a request (TAKEN), and perhaps that it has given the
request back (ERROR); nothing answers these. So the decode side notices that a worker died with the request, and what a
second one died of gets no third one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, cast

import msgspec

from dynamo_local.errors import (
    DeadlineExceeded,
    InfraUnavailable,
    KillsWorkers,
    RequestCancelled,
    StreamGap,
    WorkerLost,
    from_wire,
    to_wire,
)
from dynamo_local.system.executors import within
from dynamo_local.system.fd_messages import peer_of
from dynamo_local.system.request_log import bound, x_request_id
from dynamo_local.transport.decoding import UNREADABLE, decode
from dynamo_local.transport.requests.frames import FrameDecoder, FrameKind, frame

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0
"""A reply that is not confirmed by then is sent again."""
SEND_DEADLINE_S = 5.0
RETRY_PAUSE_S = 0.1
REMEMBERED = 1024
"""How many accepted replies are remembered, so that a repeated one (its confirmation was lost) is confirmed again."""
BACKLOG: Final = 256
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
NAMES: Final = "dynamo-prefills-"
"""How the names of the sockets begin. A prefill worker connects to no others, whatever an entry says."""

NAME_MAX: Final = 100
"""Fits a socket's address."""

_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


class ExpectedReply:
    """One awaited result. Use it as a context manager: leaving the block means "not wanted any more"."""

    def __init__(self, replies: PrefillReplies, request_id: str) -> None:
        self._replies = replies
        self.request_id = request_id
        self.future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.holder: object = None
        """The connection of the prefill worker that computes it."""
        self._lost = 0

    def lose_holder(self) -> None:
        """Its prefill worker has died. If the one before has, too, the wait ends with `KillsWorkers`."""
        self.holder = None
        self._lost += 1
        if self._lost >= KillsWorkers.AFTER and not self.future.done():
            error = KillsWorkers.of(self._lost, "prefill workers", "its connection closed")
            self.future.set_result({"error": to_wire(error)})

    async def wait(self, timeout_s: float) -> Any:
        """The result. Raises `DeadlineExceeded` past `timeout_s`, or the error that the prefill side sent."""
        try:
            message = await within(self.future, timeout_s)
        except TimeoutError:
            late = f"no prefill of {self.request_id} within {timeout_s:.2f} s; prefill it locally"
            raise DeadlineExceeded(late) from None
        finally:
            self.close()
        if message.get("error") is not None:
            raise from_wire(message["error"])
        return message.get("result")

    @property
    def taken(self) -> Any:
        """The result, if one was accepted: its KV is ours to pull. None for an error too."""
        future = self.future
        has_result = future.done() and not future.cancelled() and future.exception() is None
        return future.result().get("result") if has_result else None

    def close(self) -> None:
        """A reply that comes from now on is refused."""
        self._replies.forget(self)

    def __enter__(self) -> ExpectedReply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrefillReplies:
    """Both ends: `expect` on the decode side, `send_reply` on the prefill side."""

    def __init__(self) -> None:
        self._name = f"{NAMES}{os.getpid()}-{secrets.token_hex(8)}"
        self._server: asyncio.Server | None = None
        self._senders: set[_Sender] = set()
        self._expected: dict[str, ExpectedReply] = {}
        self._accepted: OrderedDict[str, None] = OrderedDict()
        self._links: dict[str, _Link] = {}
        self._numbers = itertools.count()

    # --- the decode side ---

    @property
    def reply_to(self) -> str:
        """Goes into the entry's payload; the prefill side sends there."""
        return self._name

    async def start(self) -> None:
        """Listen (decode side only)."""
        if self._server is not None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{self._name}")
            make = lambda: _Sender(self, self._senders)  # noqa: E731
            self._server = await asyncio.get_running_loop().create_unix_server(make, sock=sock, backlog=BACKLOG)
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        """Stop listening: senders are told that nobody is there."""
        for link in list(self._links.values()):
            link.abort()
        server, self._server = self._server, None
        self._expected.clear()
        if server is None:
            return
        server.close()
        for sender in list(self._senders):
            sender.abort()
        with contextlib.suppress(TimeoutError):  # Python 3.12's wait_closed waits for connections as well
            async with asyncio.timeout(1.0):
                await server.wait_closed()

    def expect(self, request_id: str) -> ExpectedReply:
        """Register *before* enqueuing. RuntimeError if not started, or if the id is awaited already."""
        if self._server is None:
            raise RuntimeError("PrefillReplies.expect() before start()")
        if request_id in self._expected:
            raise RuntimeError(f"a prefill of {request_id} is awaited already")
        expected = self._expected[request_id] = ExpectedReply(self, request_id)
        return expected

    def forget(self, expected: ExpectedReply) -> None:
        """Called by `ExpectedReply.close`."""
        if self._expected.get(expected.request_id) is expected:
            del self._expected[expected.request_id]

    def held(self, request_id: str, holder: object) -> None:
        """That worker computes the request now; None: nobody does."""
        if (expected := self._expected.get(request_id)) is not None:
            expected.holder = holder

    def lose(self, holder: object) -> None:
        """The connection of a prefill worker has ended."""
        for expected in [each for each in self._expected.values() if each.holder is holder]:
            expected.lose_holder()

    def take(self, data: bytes | memoryview) -> bool:
        """A reply has come. False: nobody waits for it."""
        try:
            message = decode(_decoder, data)
            request_id, reply_id = str(message["request_id"]), str(message["reply_id"])
        except (*UNREADABLE, TypeError, KeyError) as error:
            log.warning("something that is no prefill reply came: %s", error)
            return False
        if reply_id in self._accepted:
            return True
        expected = self._expected.get(request_id)
        if expected is None or expected.future.done():
            with bound(str(message.get("x_request_id", ""))):
                log.info("a prefill of %s came that nobody waits for: refused", request_id)
            return False
        expected.future.set_result(message)
        self._accepted[reply_id] = None
        while len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)
        return True

    # --- the prefill side ---

    async def begin(self, reply_to: str, request_id: str) -> bool:
        """Tell the decode worker that this worker computes the request now. False: it is gone. True also where that is
        not known."""
        try:
            link = await self._link_to(reply_to)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        link.tell(FrameKind.TAKEN, request_id)
        return True

    def give_back(self, reply_to: str, request_id: str) -> None:
        """Tell it that this worker computes the request no more."""
        if (link := self._links.get(reply_to)) is not None:
            link.tell(FrameKind.ERROR, request_id)

    async def send_reply(self, reply_to: str, request_id: str, result: Any) -> None:
        """Deliver `result` (what msgpack can carry), or an exception; returns when the decode side has taken it.

        Raises `WorkerLost` (the decode worker is gone), `RequestCancelled` (it does not wait: cancelled, past
        its deadline, or served by another attempt): in both cases free the KV. `InfraUnavailable`: it is not known
        whether it arrived.
        """
        number = next(self._numbers) & 0xFFFFFFFF
        message: dict[str, Any] = {"request_id": request_id, "reply_id": f"{self._name}-{number}"}
        message["x_request_id"] = x_request_id()
        if isinstance(result, BaseException):
            message["error"] = to_wire(result)
        else:
            message["result"] = result
        if not await self._sent(reply_to, request_id, number, _encoder.encode(message)):
            raise RequestCancelled(f"the prefill of {request_id} is not wanted any more; free its KV")

    async def _sent(self, reply_to: str, request_id: str, number: int, data: bytes) -> bool:
        """Send until it is confirmed, or `SEND_DEADLINE_S` has passed: the work behind this reply is expensive."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SEND_DEADLINE_S
        while True:
            try:
                link = await self._link_to(reply_to)
                return await link.send(number, data)
            except ConnectionRefusedError as error:
                raise WorkerLost(f"the decode worker that asked for {request_id} is gone; free its KV") from error
            except (OSError, TimeoutError) as error:
                if loop.time() >= deadline_s:
                    why = f"could not send the prefill result of {request_id}: the decode worker does not confirm it"
                    raise InfraUnavailable(f"{why}. Look whether it hangs") from error
                if not isinstance(error, TimeoutError):
                    await asyncio.sleep(RETRY_PAUSE_S)

    async def _link_to(self, reply_to: str) -> _Link:
        """The connection that there is, or a new one. The second one of two that connect at once gives its own up."""
        if (link := self._links.get(reply_to)) is not None:
            return link
        made = await self._connect(reply_to)
        link = self._links.get(reply_to, made)
        if link is not made:
            made.abort()
        return link

    async def _connect(self, reply_to: str) -> _Link:
        """OSError: not now; ConnectionRefusedError: nobody of ours listens there."""
        if not reply_to.startswith(NAMES) or len(reply_to) > NAME_MAX:
            raise ConnectionRefusedError(f"{reply_to!r} is no socket of a decode worker")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(f"\0{reply_to}")  # at once, or not: a full queue is an error here
            if peer_of(sock)[1] != os.geteuid():
                raise ConnectionRefusedError(f"another user listens at {reply_to}")
            make = lambda: _Link(self._links, reply_to)  # noqa: E731
            _, link = await asyncio.get_running_loop().create_unix_connection(make, sock=sock)
        except BaseException:
            sock.close()
            raise
        return link


class _Connection(asyncio.Protocol):
    """One end: bytes in, `_frame` for each whole frame."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder(MAX_REPLY_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the methods of asyncio.Transport without deriving from it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            answers = [self._frame(kind, number, body) for kind, number, body in self._decoder.feed(data)]
        except StreamGap as error:
            log.warning("a connection for prefill replies was closed: %s", error)
            self.abort()
            return
        if self._transport is not None and (whole := b"".join(answers)):
            self._transport.write(whole)

    def _frame(self, kind: int, number: int, body: bytes | memoryview) -> bytes:
        """The answer's frame, or nothing."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close it now."""
        if self._transport is not None:
            self._transport.abort()


class _Sender(_Connection):
    """The decode side's end of the connection of one prefill worker."""

    def __init__(self, replies: PrefillReplies, senders: set[_Sender]) -> None:
        super().__init__()
        self._replies = replies
        self._senders = senders

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._senders.add(self)
        if peer_of(transport.get_extra_info("socket"))[1] != os.geteuid():
            log.warning("another user's process has connected for prefill replies: it is turned away")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._senders.discard(self)
        self._replies.lose(self)

    def _frame(self, kind: int, number: int, body: bytes | memoryview) -> bytes:
        if kind in (FrameKind.TAKEN, FrameKind.ERROR):
            self._replies.held(str(body, "utf-8", "replace"), self if kind == FrameKind.TAKEN else None)
            return b""
        if kind != FrameKind.DATA:
            raise StreamGap(f"a frame of kind {kind} is no reply")
        return frame(FrameKind.TAKEN if self._replies.take(body) else FrameKind.ERROR, number)


class _Link(_Connection):
    """The prefill side's end of the connection to one decode worker. It is in `links` while it lives."""

    def __init__(self, links: dict[str, _Link], reply_to: str) -> None:
        super().__init__()
        self._links = links
        self._reply_to = reply_to
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._links.setdefault(self._reply_to, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._links.get(self._reply_to) is self:
            del self._links[self._reply_to]
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the connection to the decode worker broke"))

    async def send(self, number: int, data: bytes) -> bool:
        """Whether somebody waited for it. OSError: the connection broke. TimeoutError: it was not confirmed in time."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection to the decode worker broke")
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._transport.write(frame(FrameKind.DATA, number, data))
            return await within(future, SEND_TIMEOUT_S)
        finally:
            del self._waiting[number]

    def tell(self, kind: FrameKind, request_id: str) -> None:
        """Something that needs no answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(kind, 0, request_id.encode()))

    def _frame(self, kind: int, number: int, body: bytes | memoryview) -> bytes:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(kind == FrameKind.TAKEN)
        return b""

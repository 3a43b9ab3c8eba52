"""Where workers deliver responses to a process: one port, and one abstract unix socket, which is cheaper.

Any user of this host can connect to the port; who connects to the unix socket must be ours. Nothing is read from a
connection that does not show a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from typing import Final

from dynamo_local import errors
from dynamo_local.system.fd_messages import peer_of
from dynamo_local.transport.requests.frames import TOKEN_BYTES
from dynamo_local.transport.requests.stream import InboundStream

# The caller keeps idle connections open for its next requests.

IDLE_S: Final = 120.0
"""A connection that was not used for so long is closed. Requests come in bursts: those of the last minutes find as many
connections as they were at once."""

IDLE_MAX: Final = 256
"""Kept connections of one worker's endpoint. More are closed as their answers end."""


class _Idle(asyncio.Protocol):
    """Nothing is to be heard on it but its end."""

    def __init__(self, transport: asyncio.Transport, idle: list[_Idle], since_s: float) -> None:
        self.transport = transport
        self.since_s = since_s
        self._idle = idle

    def data_received(self, data: bytes) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)


class KeptConnections:
    """Connections by the subject of the endpoint at the other end. The one that was used last is taken first."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Idle]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def has(self, subject: str) -> bool:
        """Whether there is one to take."""
        return bool(self._idle.get(subject))

    def take(self, subject: str) -> asyncio.Transport | None:
        """A connection on which that endpoint can be asked. It belongs to the caller from now on."""
        idle = self._idle.get(subject)
        while idle:
            transport = idle.pop().transport
            if not transport.is_closing():
                return transport
        return None

    def put(self, subject: str, transport: asyncio.Transport) -> None:
        """Keep it until somebody takes it, or nobody has for `IDLE_S`."""
        idle = self._idle.setdefault(subject, [])
        loop = asyncio.get_running_loop()
        kept = _Idle(transport, idle, loop.time())
        transport.set_protocol(kept)
        if self._closed or len(idle) >= IDLE_MAX:
            transport.abort()
            return
        idle.append(kept)
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._sweep)

    def forget(self, subject: str) -> None:
        """Close those of that endpoint: one was found broken."""
        for kept in self._idle.pop(subject, ()):
            kept.transport.abort()

    def close(self) -> None:
        """Close them all, and whatever comes later."""
        self._closed = True
        for subject in list(self._idle):
            self.forget(subject)
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for subject, idle in list(self._idle.items()):
            for kept in idle:
                if kept.since_s + IDLE_S > loop.time():
                    break
                kept.transport.abort()
            if not idle:
                del self._idle[subject]
        if self._idle:
            self._timer = loop.call_later(IDLE_S, self._sweep)


logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0
BACKLOG: Final = 4096
"""A burst of requests brings as many connections; with a full backlog each waits a second (SYN retry)."""

NAMES: Final = "dynamo-responses-"
"""How the names of unix sockets begin. A worker connects to no others, whatever a message says."""

RECEIVE_BUFFER_BYTES: Final = 256 * 1024
"""Fixed, because the kernel would otherwise grow it to 6 MiB per slow reader."""


class Offer:
    """A request that was sent: the first connection with its token gets it. `answer`: the connection, or a refusal."""

    __slots__ = ("answer", "payload", "subject", "token", "who")

    def __init__(self, who: str, payload: bytes, subject: str) -> None:
        self.subject = subject
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.answer: asyncio.Future[InboundStream] = asyncio.get_running_loop().create_future()
        self.who = who
        self.payload = payload

    def refuse(self, error: errors.DynamoError) -> None:
        """End the wait for the connection with this error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class _OfOurUser(InboundStream):
    """Over the unix socket. The kernel says who has connected: another user is turned away, token or not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _, uid = peer_of(transport.get_extra_info("socket"))
        if uid != os.geteuid():
            self.finish(errors.StreamGap(f"a process of user {uid} has connected"))


class ResponseListener:
    """Accepts workers' connections on 127.0.0.1, and on the abstract unix socket `name`, and matches them to offers by
    token.

    A token is good once. Connections that show no token, an unknown one or a used one are closed and
    counted in `rejected`; they never reach a reader.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._offers: dict[bytes, Offer] = {}
        self._connections: set[InboundStream] = set()
        self._strangers: dict[InboundStream, asyncio.TimerHandle] = {}
        self._servers: list[asyncio.Server] = []
        self.host = "127.0.0.1"
        self.port = 0
        self.name = ""
        self.kept = KeptConnections()
        """Connections of former answers, on which their workers can be asked again."""

    async def start(self) -> None:
        """Bind a free port, and a name that nobody else has."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            sock.bind((self.host, 0))
            self._servers.append(await loop.create_server(self._make_protocol, sock=sock, backlog=BACKLOG))
        except BaseException:
            sock.close()
            raise
        self.port = int(sock.getsockname()[1])
        name = f"{NAMES}{os.getpid()}-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{name}")
            self._servers.append(await loop.create_unix_server(self._make_own, sock=sock, backlog=BACKLOG))
        except BaseException:
            sock.close()
            raise
        self.name = name

    async def close(self) -> None:
        """Stop listening; open streams end with `WorkerLost`, offers with `RequestCancelled`."""
        for offer in list(self._offers.values()):
            offer.refuse(errors.RequestCancelled("the caller is shutting down"))
        self._offers.clear()
        self.kept.close()
        connections = list(self._connections)
        for inbound in connections:
            inbound.finish(errors.RequestCancelled("the caller is shutting down"))
            if inbound.transport is not None:
                inbound.transport.abort()
        for server in self._servers:
            server.close()
            # Python 3.12's wait_closed waits for connections as well: they were aborted above.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await server.wait_closed()
        if self._connections:
            await asyncio.wait([inbound.closed for inbound in self._connections], timeout=1.0)

    @property
    def open_connections(self) -> int:
        """How many connections are open here on which a worker answers, or may show its token."""
        return len(self._connections)

    def ask_again(self, subject: str, who: str, header: bytes) -> InboundStream | None:
        """Send a request to the worker of that subject, on a connection that was kept. None where there is none."""
        transport = self.kept.take(subject)
        if transport is None:
            return None
        inbound = InboundStream(self._greeted, self._closed, self._keep)
        self._connections.add(inbound)
        inbound.ask(transport, subject, who, header)
        return inbound

    def offer(self, who: str, payload: bytes = b"", subject: str = "") -> Offer:
        """A new offer; `payload` goes to the worker that takes it, which serves `subject`. Take it back with
        `withdraw`."""
        offer = Offer(who, payload, subject)
        self._offers[offer.token] = offer
        return offer

    def withdraw(self, offer: Offer) -> None:
        """The token is invalid from now on; a connection that was not taken is closed."""
        self._offers.pop(offer.token, None)
        answer = offer.answer
        if not answer.done():
            answer.cancel()
        elif not answer.cancelled() and answer.exception() is None:
            answer.result().discard()

    def _make_protocol(self) -> InboundStream:
        return self._expected(InboundStream(self._greeted, self._closed))

    def _make_own(self) -> InboundStream:
        return self._expected(_OfOurUser(self._greeted, self._closed, self._keep))

    def _keep(self, inbound: InboundStream, transport: asyncio.Transport) -> None:
        self.kept.put(inbound.subject, transport)

    def _expected(self, inbound: InboundStream) -> InboundStream:
        self._connections.add(inbound)
        self._strangers[inbound] = inbound.loop.call_later(HELLO_TIMEOUT_S, self._too_late, inbound)
        return inbound

    def _greeted(self, inbound: InboundStream, token: bytes) -> None:
        self._strangers.pop(inbound).cancel()
        offer = self._offers.pop(token, None)
        if offer is None or offer.answer.done():
            self._reject(inbound, "an unknown or used token")
            return
        inbound.subject = offer.subject
        inbound.accept(offer.who, offer.payload)
        offer.answer.set_result(inbound)

    def _too_late(self, inbound: InboundStream) -> None:
        del self._strangers[inbound]
        self._reject(inbound, f"no token within {HELLO_TIMEOUT_S:g} s")

    def _reject(self, inbound: InboundStream, why: str) -> None:
        # No WARNING: it may be the worker of a request that was given up just before.
        self.rejected += 1
        logger.info("a connection to the response port was dropped: %s", why)
        inbound.finish(errors.StreamGap(why))

    def _closed(self, inbound: InboundStream) -> None:
        self._connections.discard(inbound)
        timer = self._strangers.pop(inbound, None)
        if timer is not None:  # it closed, or sent something else, before a token
            timer.cancel()
            self.rejected += 1

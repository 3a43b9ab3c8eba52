"""uvicorn, inside a loop and a process that are not its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.http_io import CONNECTION
from dynamo_local.errors import ConfigError, StartTimedOut
from dynamo_local.system.unread import UnreadWatch, waits_to_be_read

# --- uvicorn's HTTP protocol, with bounds on what a connection may send before, beside and behind a request's body.
#
# uvicorn and its parser have no bounds. A header that never ends fills memory. A connection that sends half a head is
# kept for ever. So is each of any number of requests that a client sends without waiting for an answer.

MAX_HEAD_BYTES: Final = 64 * 1024
"""The request line, all headers and all trailers; beyond it 431."""

MAX_OVERHEAD_PER_BYTE: Final = 8
"""A chunked body may cost this much besides itself: six bytes where each chunk has one."""

MAX_PIPELINED: Final = 16
"""Requests that wait for the answer to the one before. No client of this API sends one."""

HEAD_TIMEOUT_S: Final = 30.0
"""For a request's head, from its first byte; past it 408."""

SILENCE_TIMEOUT_S: Final = 75.0
"""For the first byte of a new connection, and for that of another request on a kept one. With 30 s, some of a
thousand connections that one client opened at once on a busy host were closed before the client wrote on them. It
saw a reset."""

MESSAGE_TIMEOUT_S: Final = 60.0
"""For the body, from the end of the head. A reader gives up earlier, with 408. This ends connections whose body
nobody reads."""

UNWANTED_TIMEOUT_S: Final = 10.0
UNWANTED_MAX_BYTES: Final = 64 * 1024 * 1024
"""A client that sends on after its answer, such as a 413, is read for so long or so much. Many clients read an answer
only when they have sent their whole body. Past one of these bounds the connection is closed."""

PARSE_PASS_S: Final = 0.010
"""Parsing takes so much of one pass of the event loop. Thousands of connections may send at the same moment. A body may
have a chunk for each byte: 8.3 million of them held the loop for 330 ms."""

SLICE_BYTES: Final = 16 * 1024
"""Bytes of a head or of a chunked body that are parsed at once: some 8 ms if each chunk has one byte."""

LINGER_S: Final = 2.0
"""After a refusal what the client still sends is dropped: closing at once would reset the connection before the client
has read the answer."""


TCP_NOTSENT_LOWAT: Final = 25
"""Linux's; Python's socket module has no name for it."""

UNSENT_MAX_BYTES: Final = 128 * 1024
"""The kernel takes so much for a client beyond that client's window. It would take up to 4 MiB, and a slow client would
seem to read nothing until a third of that is gone."""


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

    def unread_s(self) -> float | None:
        return self._protocol.unread.unread_s(self._protocol.loop.time())

    def cut(self) -> None:
        """Close the connection; what is unsent is lost."""
        self._protocol.transport.abort()
        if self.cycle is not None:
            self.cycle.disconnected = True

    def on_lost(self, callback: Callable[[], None] | None) -> bool:
        """Call it when the connection is lost; False where it is."""
        self._protocol.on_lost = callback
        return self.cycle is not None and not self.cycle.disconnected


class Parsing:
    """Shares the passes of the event loop among the connections of a server that have something to be parsed.

    A turn is one slice of one connection. It returns whether nothing is left. Connections take turns.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._waiting: deque[Callable[[], bool]] = deque()
        self._spent_s = 0.0
        self._pass_ends = False

    def add(self, turn: Callable[[], bool]) -> bool:
        """Take turns as long as this pass has time and nobody waits. False: the rest comes in later passes."""
        while not self._waiting and self._spent_s < PARSE_PASS_S:
            if self._timed(turn):
                return True
        self._waiting.append(turn)
        self._follow_pass()
        return False

    def _timed(self, turn: Callable[[], bool]) -> bool:
        self._follow_pass()
        began_s = self._now_s()
        try:
            return turn()
        finally:
            self._spent_s += self._now_s() - began_s

    def _follow_pass(self) -> None:
        if not self._pass_ends:
            self._pass_ends = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._pass_ends, self._spent_s = False, 0.0
        while self._waiting and self._spent_s < PARSE_PASS_S:
            turn = self._waiting.popleft()
            if not self._timed(turn):
                self._waiting.append(turn)


class _Flow(FlowControl):
    """uvicorn's, which may be held: nothing is read until `release`, whoever resumes."""

    _held = False

    def hold(self) -> None:
        """Read nothing until `release`."""
        if not self._held:
            self._held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Read again, unless the application has paused it."""
        if self._held:
            self._held = False
            if not self.read_paused and not self._transport.is_closing():
                self._transport.resume_reading()

    def pause_reading(self) -> None:
        if self._held:
            self.read_paused = True
        else:
            super().pause_reading()

    def resume_reading(self) -> None:
        if self._held:
            self.read_paused = False
        else:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Refused requests never reach the application."""

    flow: _Flow
    server_state: FrontendState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._in_head = self._silent = True
        self._field_bytes = 0
        self._overhead_bytes = 0
        self._unwanted_bytes = 0
        self._chunked = False
        self._unparsed = b""
        self._timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] | None = None
        self.unread = UnreadWatch()

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_MAX_BYTES)
        self.server_state.new.add(self)
        self._expect_within(SILENCE_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.new.discard(self)
        self._expect_within(None)
        self.unread.end()
        self._unparsed = b""
        super().connection_lost(exc)
        if (left := self.on_lost) is not None:
            left()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._timer is None or self._silent:  # another request on a connection that was kept, or its first
            self._silent = False
            self._expect_within(HEAD_TIMEOUT_S)
        if self._unparsed:
            self._unparsed += data
            return
        self._unparsed = data
        if not self.server_state.parsing.add(self._parse):
            self.flow.hold()

    def _parse(self) -> bool:
        """One slice. Returns whether nothing is left. A body that has its length costs one call, whatever its size."""
        if not self._refused and not self.transport.is_closing():
            size = SLICE_BYTES if self._in_head or self._chunked else len(self._unparsed)
            data, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._overhead_bytes += len(data)
            super().data_received(data)
            # The size of a field's parts is seen when it ends. A field that does not end counts with all its bytes.
            if self._overhead_bytes > MAX_HEAD_BYTES and not self._refused and not self.transport.is_closing():
                self._refuse(_too_large())
            if self._unparsed:
                return False
        self._unparsed = b""
        self.flow.release()
        return True

    def pause_writing(self) -> None:
        self.unread.begin(self.transport, self.loop.time())
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread.end()
        super().resume_writing()

    def shutdown(self) -> None:
        if self._refused:
            self.transport.close()
        elif not waits_to_be_read(self.transport):  # a request that has come is answered, as the connection's last
            super().shutdown()

    def on_response_complete(self) -> None:
        self.server_state.new.discard(self)
        super().on_response_complete()

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
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
            self._overhead_bytes = self._unwanted_bytes = 0
            self._expect_within(MESSAGE_TIMEOUT_S)
            client = Client(self)
            cast(dict[str, Any], self.scope)["extensions"] = {CONNECTION: client}
            super().on_headers_complete()
            client.cycle = self.cycle
            if self.parser.get_http_version() == "1.0" and self.cycle is not None:
                _without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._overhead_bytes = max(0, self._overhead_bytes - (1 + MAX_OVERHEAD_PER_BYTE) * len(body))
            if self.cycle is not None and self.cycle.response_complete:
                self._drop(len(body))
            else:
                super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._in_head = True
            self._overhead_bytes = 0
            self._expect_within(None)
            super().on_message_complete()

    # --- bounds ---

    def _drop(self, size: int) -> None:
        """Part of a body whose request has its answer."""
        if self._unwanted_bytes == 0:
            self._expect_within(UNWANTED_TIMEOUT_S)
        self._unwanted_bytes += size
        if self._unwanted_bytes > UNWANTED_MAX_BYTES:
            self.transport.abort()

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


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """For a client of HTTP/1.0, which cannot read chunks: the end of the connection ends the body."""
    send = cycle.send

    async def sent_whole(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = sent_whole  # type: ignore[method-assign]


def _too_large() -> ApiError:
    message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, code="request_header_fields_too_large")


def _answer(error: ApiError) -> bytes:
    body = error.body()
    head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


# --- Accepts connections on a socket that other processes share, with pauses.

logger = logging.getLogger(__name__)

AT_ONCE_ALONE = 16
AT_ONCE_SHARED = 2
"""Connections that are taken before the loop does something else. A process with a free loop comes back first. So
the burst of a hundred clients is spread over those that share the socket, and the least busy one takes more."""
RETRY_S = 0.5
"""After an error that is the process's and not the connection's: no descriptors are left."""


class Acceptor:
    """Between `begin` and `close`. The socket must not block. It stays open, because other processes use it, too."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._taken: Callable[[socket.socket], None] | None = None
        self._wanted = True
        self._reading = False
        self._retry: asyncio.TimerHandle | None = None
        self.shared = False

    def begin(self, taken: Callable[[socket.socket], None]) -> None:
        """`taken` gets each connection, which does not block, and has to close it."""
        self._taken = taken
        self._follow()

    def accept(self) -> None:
        """Take connections."""
        self._wanted = True
        self._follow()

    def pause(self) -> None:
        """Leave those that come to others."""
        self._wanted = False
        self._follow()

    @property
    def accepts(self) -> bool:
        """Whether it takes connections now."""
        return self._reading

    @property
    def closed(self) -> bool:
        """It has not begun, or takes nothing more."""
        return self._taken is None

    def close(self) -> None:
        """Take nothing more, for good."""
        self._taken = None
        self._follow()

    def _follow(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        wanted = self._wanted and not self.closed
        if wanted == self._reading:
            return
        loop = asyncio.get_running_loop()
        # The kernel forgets a watched socket only with its last descriptor, which others have: so take it out.
        if wanted:
            loop.add_reader(self.sock, self._take)
        else:
            loop.remove_reader(self.sock)
        self._reading = wanted

    def _take(self) -> None:
        taken = self._taken
        assert taken is not None  # else nobody reads
        for _ in range(AT_ONCE_SHARED if self.shared else AT_ONCE_ALONE):
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process has it, or the client has left
            except OSError as error:
                logger.error("no connection can be taken for %g s: %s", RETRY_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self.sock)
                self._reading = False
                self._retry = loop.call_later(RETRY_S, self._follow)
                return
            connection.setblocking(False)
            taken(connection)


BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the idle time of usual client pools: a client must not write into a connection just closed here."""

START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""After this, connections to clients that do not read are cut."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a certificate and of its key."""

    cert: str
    key: str


def bind_socket(host: str, port: int, *, option: str = "Frontend.port") -> socket.socket:
    """A bound TCP socket, not listening yet. Raises `ConfigError` that says what to change: the `option`."""
    section, _, key = option.partition(".")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"{section}: the option `host` ({host!r}) is not an address of this machine: {error}"
        ) from error
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        # Otherwise connections of a Frontend that just ended (TIME_WAIT) would make the port "in use".
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error, section, key) from error
    return sock


def bind_private_socket(path: Path) -> socket.socket:
    """A unix socket that only this user can connect to, in place of one that a killed process left. `ConfigError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)  # before it listens; its folder is private, too
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot make the socket {path}: {error}; set XDG_RUNTIME_DIR to a shorter folder") from error
    return sock


def _bind_error(host: str, port: int, error: OSError, section: str, key: str) -> ConfigError:
    choose = f"choose another with --{section}.{key}=PORT (0 takes any free one), or `{key}:` in the section {section}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{section}: port {port} on {host} is in use by another program; {choose}")
    if error.errno == errno.EACCES:
        return ConfigError(f"{section}: no permission to listen on port {port} of {host}; {choose}")
    if error.errno == errno.EADDRNOTAVAIL:
        message = f"{section}: {host} is not an address of this machine; set --{section}.host (127.0.0.1 by default)"
        return ConfigError(message)
    return ConfigError(f"{section}: cannot listen on {host} port {port}: {error}; {choose}")


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """`http://127.0.0.1:8000`: an address that a client on this machine can use, also for a wildcard socket;
    `unix:///run/…/metrics.sock`."""
    if sock.family is socket.AF_UNIX:
        return f"unix://{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Connections(set[Any]):
    """A set of them as uvicorn's, which tells when it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.none = asyncio.Event()
        self.none.set()

    def add(self, connection: Any) -> None:
        super().add(connection)
        self.none.clear()

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        if not self:
            self.none.set()


class FrontendState(ServerState):
    """uvicorn's, and what the connections share."""

    def __init__(self) -> None:
        super().__init__()
        self.parsing = Parsing()
        self.new = _Connections()
        """Those whose first request has no whole answer yet."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, and tells when it listens. `idle`: without uvicorn's ten ticks a second.
    With an `acceptor` this takes the connections."""

    def __init__(self, config: uvicorn.Config, *, idle: bool, acceptor: Acceptor | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.server_state: FrontendState = FrontendState()
        self.open_connections = self.server_state.connections = _Connections()
        self._acceptor = acceptor
        self._connecting: set[asyncio.Task[None]] = set()
        self._idle = idle
        self._leave = asyncio.Event()

    def leave(self) -> None:
        """Ask it to stop."""
        self.should_exit = True
        self._leave.set()

    async def main_loop(self) -> None:
        if self._idle:
            await self._leave.wait()
        else:
            await super().main_loop()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self._acceptor.begin(self._taken)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def _taken(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._connected(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, connection: socket.socket) -> None:
        if self._acceptor is None or self._acceptor.closed:
            connection.close()
            return
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        except (OSError, TimeoutError) as error:  # a handshake that failed, a client that left
            logger.debug("a connection came to nothing: %s", error)
            connection.close()

    def set_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Those of every answer that begins from now on, beside its date."""
        date = [(name, value) for name, value in self.server_state.default_headers if name == b"date"]
        self.config.encoded_headers = headers
        self.server_state.default_headers = date + headers

    def _protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class HttpServer:
    """An application on a socket, from `start` to `stop`.

    With `idle` the server costs nothing between requests (the ticks are half a percent of a core), and sends no
    `Date`. Other processes take connections from a `shared` socket, too, and this one may leave them all to those. A
    shared socket listens already.
    """

    def __init__(
        self, app: ASGIApp, sock: socket.socket, *, idle: bool = False, tls: Tls | None = None, shared: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=not idle,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._acceptor = Acceptor(sock) if shared else None
        self._server = _Server(config, idle=idle, acceptor=self._acceptor)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None
        self.url = url_of(sock, "https" if tls else "http")

    async def start(self) -> None:
        """Returns when connections are accepted. Raises `StartTimedOut`, or what uvicorn failed with."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http-server")
        self._task.add_done_callback(_log_failure)
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            done, _ = await asyncio.wait(
                (self._task, listening), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            listening.cancel()
        if self._task in done:
            self._task.result()
        if not self._server.listening.is_set():
            raise StartTimedOut(f"the HTTP server at {self.url} did not start within {START_TIMEOUT_S:g} s")

    def share(self, others: bool) -> None:
        """Whether other processes take connections from the socket at the same time."""
        if self._acceptor is not None:
            self._acceptor.shared = others

    def take_connections(self, wanted: bool) -> None:
        """From a `shared` socket: take those that come, or leave them to others. Those that are open stay so."""
        if self._acceptor is not None:
            if wanted:
                self._acceptor.accept()
            else:
                self._acceptor.pause()

    def answer_last(self, last: bool) -> None:
        """Whether an answer that begins from now on is the last of its connection, and says so to the client."""
        self._server.set_headers([(b"connection", b"close")] if last else [])

    async def wait_unconnected(self) -> None:
        """Return when no connection is open."""
        await self._server.open_connections.none.wait()

    async def wait_first_answers(self) -> None:
        """Return when each connection has had an answer: a client connects to ask."""
        await self._server.server_state.new.none.wait()

    async def wait_failed(self) -> None:
        """Raise what the server failed with, as soon as it has; return once it was stopped."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop accepting, close idle connections, let answers under way finish; cut what is left after a bound."""
        if self._task is None:
            self._sock.close()
            return
        self._server.leave()
        done, _ = await asyncio.wait((self._task,), timeout=CLOSE_TIMEOUT_S)
        if done:
            return
        connections = list(self._server.server_state.connections)
        logger.warning("cutting %d connections that did not end within %g s", len(connections), CLOSE_TIMEOUT_S)
        self._server.force_exit = True
        for connection in connections:
            connection.transport.abort()
        done, _ = await asyncio.wait((self._task,), timeout=CLOSE_TIMEOUT_S)
        if not done:
            logger.error("the HTTP server at %s did not end; cancelled", self.url)
            self._task.cancel()


class PrivateServer:
    """An application on a unix socket that only this user can open, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path
        self._server: HttpServer | None = None

    @property
    def socket_files(self) -> tuple[Path, ...]:
        """The socket's, while it is listened on."""
        return () if self._server is None else (self._path,)

    @property
    def url(self) -> str | None:
        """`unix:///run/…/api.sock`; None while nobody listens."""
        return None if self._server is None else self._server.url

    async def start(self) -> None:
        """Listen. Raises `ConfigError` where the socket cannot be had."""
        server = HttpServer(self._app, bind_private_socket(self._path), idle=True)
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        self._server = server

    async def renew_sockets(self) -> None:
        """Listen again if somebody has removed the socket's file. Connected clients get their answers first."""
        before = self._server
        if before is not None and not self._path.exists():
            await self.start()
            await before.stop()

    async def stop(self) -> None:
        """Stop listening; the socket goes. Nothing, if it was not started."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
            self._path.unlink(missing_ok=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the HTTP server ended unexpectedly", exc_info=task.exception())

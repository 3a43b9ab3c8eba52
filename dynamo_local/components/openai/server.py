"""uvicorn, inside a loop and a process that are not its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from dynamo_local.components.openai.http_protocol import BoundedHttpProtocol
from dynamo_local.components.openai.port.accepting import Acceptor
from dynamo_local.errors import ConfigError, StartTimedOut

logger = logging.getLogger(__name__)

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
    """uvicorn's set of them, which tells when it is empty."""

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


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, and tells when it listens. `idle`: without uvicorn's ten ticks a second.
    With an `acceptor` this takes the connections."""

    def __init__(self, config: uvicorn.Config, *, idle: bool, acceptor: Acceptor | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.open_connections = self.server_state.connections = _Connections()
        self._acceptor = acceptor
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
            self._acceptor.begin(self._protocol, self.config.ssl)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def set_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Those of every answer that begins from now on, beside its date."""
        date = [(name, value) for name, value in self.server_state.default_headers if name == b"date"]
        self.config.encoded_headers = headers
        self.server_state.default_headers = date + headers

    def _protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class HttpServer:
    """An application on a socket, from `start` to `stop`.

    With `idle` it costs nothing between requests (the ticks are half a percent of a core), and sends no `Date`. A
    `shared` socket is one that other processes take connections from, too, and it may leave them all to those; it
    listens already.
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
        """Listen again where somebody has removed the socket's file. Whoever is connected gets his answer first."""
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

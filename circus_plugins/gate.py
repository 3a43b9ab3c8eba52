"""A gate before a zmq socket: it admits connections only while descriptors are left.

libzmq aborts its whole process (an assertion in its accept, SIGABRT) when a client connects to an `ipc://` socket and
no file descriptor is left. So clients connect to a gate instead. It joins each connection to the zmq socket's own file,
within a reserve of descriptors. If the reserve is used up, new clients wait until others have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
from pathlib import Path
from typing import Any

import zmq

log = logging.getLogger(__name__)

RESERVE = 8
NEEDED = 3
"""Descriptors of one connection: accepted here, connected to the zmq socket, accepted there."""
SPARE = 2
"""Descriptors that other threads may take while a connection is made."""
GREETING_MS = 1000
"""libzmq's thread sends its greeting as soon as it has accepted, within a millisecond on an idle machine."""
AGAIN_S = 0.1
BACKLOG = 256
CHUNK_BYTES = 64 * 1024
FLUSH_S = 1.0


class Gate:
    """Listens on the file `outer`, for the zmq socket at `inner`, from `open` to `close`."""

    def __init__(self, outer: Path, inner: Path) -> None:
        self.outer = outer
        self.inner = inner
        self._listening: socket.socket | None = None
        self._reserve: list[int] = []
        self._joined: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Listen, also in place of a file that is gone or stale. OSError gives the reason if that fails."""
        self._stop_listening()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.outer.unlink(missing_ok=True)
            listening.bind(str(self.outer))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise OSError(error.errno, error.strerror, str(self.outer)) from error
        self._listening = listening
        self._admit_when_ready()

    async def close(self) -> None:
        """Stop listening, and end connections when the zmq socket's data is through. That socket must be closed."""
        self._stop_listening()
        if self._joined:
            await asyncio.wait(self._joined, timeout=FLUSH_S)
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)
        self._release()
        self.outer.unlink(missing_ok=True)

    def _stop_listening(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None

    # --- admitting -----------------------------------------------------------------------------

    def _admit_when_ready(self) -> None:
        """Take connections as long as the reserve has descriptors, else look again in a moment."""
        self._again = None
        if self._listening is None:
            return
        if self._replenish():
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._admit)
        else:
            self._pause()

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listening is not None:
            loop.remove_reader(self._listening.fileno())
            self._again = loop.call_later(AGAIN_S, self._admit_when_ready)

    def _admit(self) -> None:
        """Join one connection. It uses the reserve, which is refilled once libzmq has accepted its end."""
        assert self._listening is not None
        self._release()
        client = inner = None
        try:
            client, _ = self._listening.accept()
            inner = self._connected()
        except OSError as error:  # it has gone, or the zmq socket is being made again
            log.debug("a connection to %s was not let through: %s", self.outer, error)
            for end in (client, inner):
                if end is not None:
                    end.close()
            self._pause()  # libzmq may still accept its end: the reserve is not refilled before
        else:
            client.setblocking(False)
            task = asyncio.ensure_future(_join(client, inner))
            self._joined.add(task)
            task.add_done_callback(self._joined.discard)
            self._admit_when_ready()

    def _connected(self) -> socket.socket:
        """A connection that the zmq socket has accepted. Never blocks for longer than `GREETING_MS`."""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.connect(str(self.inner))
            greeted = select.poll()
            greeted.register(inner, select.POLLIN)
            if not greeted.poll(GREETING_MS):
                raise TimeoutError(f"{self.inner} did not answer within {GREETING_MS} ms")
        except OSError:
            inner.close()
            raise
        return inner

    # --- the reserve ---------------------------------------------------------------------------

    def _replenish(self) -> bool:
        """Whether the reserve suffices for one more connection."""
        with contextlib.suppress(OSError):
            while len(self._reserve) < RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._reserve) >= NEEDED + SPARE

    def _release(self) -> None:
        for fd in self._reserve:
            os.close(fd)
        self._reserve = []


async def _join(client: socket.socket, inner: socket.socket) -> None:
    """Copy between both until one of them has ended."""
    ends = [await asyncio.open_unix_connection(sock=sock, limit=CHUNK_BYTES) for sock in (client, inner)]
    (from_client, to_client), (from_inner, to_inner) = ends
    pumps = [
        asyncio.ensure_future(_pump(from_client, to_inner)),
        asyncio.ensure_future(_pump(from_inner, to_client)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for _, writer in ends:
            writer.close()  # pending data is sent first


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def gate_of(endpoint: str) -> Gate:
    """The gate at a public address (`ipc:///…/ctl.sock`). The zmq socket is bound beside it."""
    outer = socket_file(endpoint)
    return Gate(outer, outer.with_suffix(".zmq"))


def socket_file(endpoint: str) -> Path:
    """The path of `ipc:///…`."""
    return Path(endpoint.removeprefix("ipc://"))


def listen_again(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind a socket again if its file was removed. OSError if that fails.

    Clients of the removed file lose their connection and connect again.
    """
    if socket_file(endpoint).exists():
        return
    with contextlib.suppress(zmq.ZMQError):  # it was not bound: the last try failed
        socket.unbind(endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error), str(socket_file(endpoint))) from error

"""JSON with open descriptors over a unix stream socket: how an arbiter hands a waiting process what it is to become.

A message is its length (8 bytes, big-endian), with which the descriptors travel, and then the JSON.
`peer_of` says whose process is at the other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER_BYTES = 8
FDS_MAX = 64
BODY_BYTES_MAX = 64 * 2**20


class Closed(ConnectionError):
    """The other end is closed: there is no message, and there will be none."""


def send(connection: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send it; blocks. OSError where the other end is gone."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(HEADER_BYTES, "big")], list(fds))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors (close-on-exec); blocks. Raises `Closed`, or ValueError for no JSON."""
    header, fds, _flags, _address = socket.recv_fds(connection, HEADER_BYTES, FDS_MAX)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)  # Python 3.11's `recv_fds` drops the flag that would say so
        header += _exactly(connection, HEADER_BYTES - len(header))
        body = _exactly(connection, _length(header))
        return json.loads(body), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


async def asend(connection: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """As `send`, on a non-blocking socket."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(HEADER_BYTES, "big")], list(fds))
    await asyncio.get_running_loop().sock_sendall(connection, body)


async def areceive(connection: socket.socket) -> Any:
    """As `receive`, on a non-blocking socket, of a message without descriptors."""
    header = await _aexactly(connection, HEADER_BYTES)
    return json.loads(await _aexactly(connection, _length(header)))


def _length(header: bytes) -> int:
    length = int.from_bytes(header, "big")
    if length > BODY_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes: this is no message of ours")
    return length


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += _some(connection.recv(count - len(data)))
    return data


async def _aexactly(connection: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        data += _some(await loop.sock_recv(connection, count - len(data)))
    return data


def _some(data: bytes) -> bytes:
    if not data:
        raise Closed("the other end was closed")
    return data


_UCRED = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end of a unix socket, as the kernel says (`SO_PEERCRED`, unix(7))."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)

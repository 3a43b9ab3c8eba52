"""The files of zmq sockets, and how one is brought back that somebody has removed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import zmq


def socket_file(endpoint: str) -> Path:
    """Of `ipc:///…`."""
    return Path(endpoint.removeprefix("ipc://"))


def listen_again(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind a socket once more whose file somebody has removed; nothing where it is there. OSError where it cannot be.

    Whoever is connected by the removed file loses that connection, and connects again.
    """
    if socket_file(endpoint).exists():
        return
    with contextlib.suppress(zmq.ZMQError):  # it was not bound: the last try failed
        socket.unbind(endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error), str(socket_file(endpoint))) from error

"""A ZeroMQ socket on which vLLM's processes tell what they do, read on the worker's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio


class ZmqListener:
    """Hands each message to `heard`, as its frames, until it is closed. `what` names the task. `heard` may not raise:
    that would end the listening."""

    def __init__(self, heard: Callable[[Sequence[bytes]], None], what: str) -> None:
        self._heard = heard
        self._what = what
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, kind: int, attach: Callable[[zmq.asyncio.Socket], object]) -> None:
        """Listen on a socket of that kind; `attach` sets its options and binds or connects it. Call it before the
        engine starts, so that nothing is missed. Raises `zmq.ZMQError`."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        attach(socket)
        self._task = asyncio.create_task(self._listen(socket), name=self._what)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._heard(await socket.recv_multipart())
        finally:
            socket.close()

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._context is not None:
            self._context.term()

"""ZeroMQ sockets on which workers publish their passes, one for each: Dynamo's event plane where it is not NATS.

They are connected as workers register, and left as those go. ZeroMQ tries by itself again and again: a worker that
cannot be reached from here is not heard, which is told of its engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from dynamo_local.in_cluster.registered import Channel
from dynamo_local.runtime.passes import event_plane

log = logging.getLogger(__name__)

RETRY_MAX_MS = 2000


class PassSockets:
    """`heard` gets a worker's component and the payload of each of its messages, None for what was no envelope."""

    def __init__(self, heard: Callable[[str, bytes | None], None]) -> None:
        self._heard = heard
        self._context: zmq.asyncio.Context | None = None
        self._listening: dict[Channel, asyncio.Task[None]] = {}

    def follow(self, channels: Iterable[Channel]) -> None:
        """Listen to these from now on, and to no others."""
        wanted = set(channels)
        for gone in self._listening.keys() - wanted:
            self._listening.pop(gone).cancel()
        if wanted and self._context is None:
            self._context = zmq.asyncio.Context()
        for channel in sorted(wanted - self._listening.keys()):
            assert self._context is not None
            try:
                socket = _connected(self._context, channel.address)
            except zmq.ZMQError as error:
                log.warning("the passes of a %s worker at %s: %s", channel.component, channel.address, error)
                continue  # it is tried again at the next look
            self._listening[channel] = asyncio.create_task(self._listen(channel.component, socket))

    async def close(self) -> None:
        """Closing twice is no error."""
        tasks = list(self._listening.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    async def _listen(self, component: str, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._heard(component, event_plane.unframe(await socket.recv_multipart()))
        finally:
            socket.close()


def _connected(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, event_plane.MAX_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RETRY_MAX_MS)
        socket.subscribe(b"")  # it has this topic alone
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket

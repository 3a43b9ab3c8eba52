"""A Dynamo worker's forward passes, from its event plane: over NATS, or over its own ZeroMQ socket.

On NATS a component's workers share a subject, so that each runner hears all of them and keeps its own worker's: some
fifty microseconds a message. Over ZeroMQ it hears that one alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dynamo_local.errors import InfraUnavailable
from dynamo_local.ports import KeyValueStore
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import decode_pass
from dynamo_local.runtime.passes.recorder import PassRecorder

log = logging.getLogger("dynamo_local.worker")

STALE_S = 3.0
LOOK_EVERY_S = 2.0


class ForwardPasses:
    """Records one worker's passes. `queued` is None until there was one, and once the last is too old."""

    def __init__(
        self, nats: Any, kv: KeyValueStore, recorder: PassRecorder, namespace: str, component: str, worker_id: int
    ) -> None:
        self._nats = nats
        self._kv = kv
        self._recorder = recorder
        self._subject = event_plane.subject(namespace, component)
        self._worker_id = worker_id
        recorder.worker_id = str(worker_id)
        self._mark = recorder.worker_id.encode()

    async def start(self) -> None:
        """Listen on NATS. Raises `NatsUnavailable`."""
        with nats_call(self._nats, f"listen on {self._subject}"):
            await self._nats.subscribe(self._subject, cb=self._on_message)

    async def follow_zmq(self) -> None:
        """Listen to the worker's own sockets as soon as it has registered some; return where it uses NATS."""
        endpoints: list[str] = []
        while not endpoints:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._recorder.last() is not None:
                return
            try:
                kvs, _revision = await self._kv.get_prefix(event_plane.CHANNELS)
            except InfraUnavailable as error:
                log.debug("the event channels cannot be listed: %s", error)
                continue
            endpoints = event_plane.zmq_endpoints(kvs, self._worker_id)
        await self._listen(endpoints)

    @property
    def queued(self) -> int | None:
        """Requests that wait for a prefill there, as the worker said last."""
        last = self._recorder.last()
        if last is None or asyncio.get_running_loop().time() - last.at_s > STALE_S:
            return None
        return last.queued.num_prefill_requests

    async def _listen(self, endpoints: list[str]) -> None:
        import zmq
        import zmq.asyncio

        log.info("the worker's passes come over ZeroMQ from %s", ", ".join(endpoints))
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, event_plane.MAX_BYTES)
            socket.subscribe(b"")
            for endpoint in endpoints:
                socket.connect(endpoint)
            while True:
                self._record(event_plane.unframe(await socket.recv_multipart()))
        finally:
            socket.close()
            context.term()

    async def _on_message(self, message: Any) -> None:
        if self._mark in message.data:  # else it is another worker's, and need not be read
            self._record(event_plane.unseal(message.data))

    def _record(self, payload: bytes | None) -> None:
        passed = None if payload is None else decode_pass(payload, asyncio.get_running_loop().time())
        if passed is not None and passed.engine.worker_id == self._recorder.worker_id:
            self._recorder.record(passed)

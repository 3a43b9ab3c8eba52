"""The worker's side of what vLLM's schedulers tell of their passes (`pass_watch`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.vllm.pass_watch import ToldPasses
from dynamo_local.ports import PassSink

log = logging.getLogger(__name__)

_HERE = "dynamo_local.engines.vllm.watched_schedulers"

_decoder = msgspec.msgpack.Decoder(ToldPasses)


def watch_passes(config: Any) -> bool:
    """Have vLLM (its `VllmConfig`) use the scheduler that it would use anyway, watched; False where it has one of its
    own, of the section or for a kind of model."""
    chosen = config.scheduler_config
    if chosen.scheduler_cls is not None:
        log.info("vLLM uses the scheduler %s: planners will know nothing of its passes", chosen.scheduler_cls)
        return False
    chosen.scheduler_cls = f"{_HERE}.{'WatchedAsyncScheduler' if chosen.async_scheduling else 'WatchedScheduler'}"
    return True


class PassBridge:
    """Records what comes, until it is closed. `endpoint` is bound here: several ranks send to it."""

    def __init__(self, endpoint: str, sink: PassSink) -> None:
        self.endpoint = endpoint
        self._sink = sink
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen. Call it before the engine starts."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.endpoint)
        self._task = asyncio.create_task(self._listen(socket), name="vLLM's passes")

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                message = await socket.recv()
                try:
                    received(message, self._sink.record, asyncio.get_running_loop().time())
                except (msgspec.DecodeError, TypeError):
                    log.exception("what vLLM's scheduler told cannot be read")
        finally:
            socket.close()

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._context is not None:
            self._context.term()


def received(message: bytes, record: Callable[[ForwardPass], None], now_s: float) -> None:
    """Record the passes of one message that came at `now_s`. Raises `msgspec.DecodeError`."""
    told = _decoder.decode(message)
    engine = EngineId("", told.dp_rank)
    for one in told.passes:
        scheduled, queued = Requests(*one.scheduled), Requests(*one.queued)
        record(ForwardPass(engine, one.counter_id, one.wall_time_s, scheduled, queued, now_s - one.age_s))

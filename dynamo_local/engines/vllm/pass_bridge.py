"""The worker's side of what vLLM's schedulers tell of their passes (`pass_watch`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.engines.vllm.pass_watch import ToldPasses
from dynamo_local.engines.vllm.zmq_listener import ZmqListener
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
        self._listener = ZmqListener(self._heard, "vLLM's passes")

    def start(self) -> None:
        """Listen. Call it before the engine starts."""
        self._listener.start(zmq.PULL, lambda socket: socket.bind(self.endpoint))

    def _heard(self, frames: Sequence[bytes]) -> None:
        try:
            received(frames[0], self._sink.record, asyncio.get_running_loop().time())
        except (msgspec.DecodeError, TypeError):
            log.exception("what vLLM's scheduler told cannot be read")

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()


def received(message: bytes, record: Callable[[ForwardPass], None], now_s: float) -> None:
    """Record the passes of one message that came at `now_s`. Raises `msgspec.DecodeError`."""
    told = _decoder.decode(message)
    engine = EngineId("", told.dp_rank)
    for one in told.passes:
        scheduled, queued = Requests(*one.scheduled), Requests(*one.queued)
        record(ForwardPass(engine, one.counter_id, one.wall_time_s, scheduled, queued, now_s - one.age_s))

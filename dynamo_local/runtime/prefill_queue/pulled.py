"""An entry in a prefill worker's hands: acked, given back, or kept while it is worked on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator

from dynamo_local.errors import NatsUnavailable
from dynamo_local.ports import PrefillTask, PulledTask
from dynamo_local.runtime.nats_client import Client, Msg
from dynamo_local.runtime.nats_errors import CALL_TIMEOUT_S, nats_call
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

DEFAULT_ACK_WAIT_S = 5.0


class JetStreamPulledTask:
    """An entry in this worker's hands (`ports.PulledTask`).

    Each answer waits until the server has taken it, and raises `NatsUnavailable` otherwise; the entry is then
    delivered again `ack_wait` later, and the second reply to the decode side is refused as a duplicate.
    """

    def __init__(self, nats: Client, msg: Msg, task: PrefillTask) -> None:
        self._nats = nats
        self._reply = msg.reply
        self.task = task

    async def in_progress(self) -> None:
        """Restart `ack_wait`."""
        await self._answer(Msg.Ack.Progress, "keep")

    async def ack(self) -> None:
        """Done: the entry leaves the queue. No error if it was cancelled meanwhile."""
        await self._answer(Msg.Ack.Ack, "ack")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back: another worker gets it, after `delay_s`. Counts as an attempt."""
        body = Msg.Ack.Nak
        if delay_s > 0:
            body += b" " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
        await self._answer(body, "give back")

    async def _answer(self, body: bytes, verb: str) -> None:
        with nats_call(self._nats, f"{verb} prefill entry {self.task.request_id}"):
            await self._nats.request(self._reply, body, timeout=CALL_TIMEOUT_S)


@contextlib.asynccontextmanager
async def keep_in_progress(pulled: PulledTask, ack_wait_s: float = DEFAULT_ACK_WAIT_S) -> AsyncIterator[None]:
    """Tell the queue, while the block runs, that the entry is being worked on: thrice per `ack_wait_s`.

    An outage is logged, not raised: the work goes on, and at worst the entry is also done by somebody else.
    """
    beats: list[asyncio.Task[None]] = []  # most entries are over before the first is due, and need no task

    def begin() -> None:
        name = f"in progress {pulled.task.request_id}"
        beats.append(asyncio.create_task(_beat(pulled, ack_wait_s / 3), name=name))

    first = asyncio.get_running_loop().call_later(ack_wait_s / 3, begin)
    try:
        yield
    finally:
        first.cancel()
        await ended(*beats)
        for beat in beats:
            if not beat.cancelled() and (error := beat.exception()) is not None:
                log.error("in_progress for %s stopped early: %r", pulled.task.request_id, error)


async def _beat(pulled: PulledTask, every_s: float) -> None:
    while True:
        try:
            await pulled.in_progress()
        except NatsUnavailable as error:
            log.warning("%s; it may be delivered to another worker too", error)
        await asyncio.sleep(every_s)

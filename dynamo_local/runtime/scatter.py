"""One question to everybody who listens on a subject, and their answers within a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_local.clock import Turns
from dynamo_local.runtime.nats_client import Client, Msg
from dynamo_local.runtime.nats_errors import nats_call

log = logging.getLogger(__name__)


async def scatter(
    nats: Client, subject: str, question: bytes, take: Callable[[Msg], bool], *, what: str, timeout_s: float
) -> None:
    """Ask, and give each answer to `take`, until that returns True, nobody listens there, or the deadline has come.

    Raises `NatsUnavailable` that says what (`what`, "ask the workers for …") could not be done.
    """
    complete, turns = asyncio.Event(), Turns()

    async def on_answer(msg: Msg) -> None:
        if (msg.headers or {}).get("Status") == "503" or take(msg):  # 503 is the server's: nobody listens
            complete.set()
        # Answers that have come together are one step of the client's: 64 with 64 passes each took 32 ms of the loop.
        await turns.next()

    with nats_call(nats, what):
        inbox = nats.new_inbox()
        subscription = await nats.subscribe(inbox, cb=on_answer)
        try:
            await nats.publish(subject, question, reply=inbox)
            async with asyncio.timeout(timeout_s):
                await complete.wait()
        except TimeoutError:
            log.debug("not everybody answered on %s within %.2f s", subject, timeout_s)
        finally:
            if not nats.is_closed:
                await subscription.unsubscribe()

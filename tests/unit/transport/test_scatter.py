"""Answers that come together do not hold the asker's loop until the last one of them is read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from dynamo_local.clock import HOLD_MAX_S
from dynamo_local.transport.observation import scatter
from tests.fakes.infra.memory_nats import Callback, MemoryNats, MemoryNatsClient

ANSWERS = 20
SUBJECT = "dynamo.load"


class InOneTask(MemoryNatsClient):
    """Gives all of a subscription's messages to its callback in one task, as nats-py does: without a pause while there
    are more."""

    async def publish(
        self, subject: str, data: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        (subscription,) = self.server.subscriptions
        self.giving = asyncio.create_task(self._give(subscription.callback))

    async def _give(self, callback: Callback) -> None:
        for _ in range(ANSWERS):
            await callback(SimpleNamespace(data=b"answer", headers=None))


async def test_others_have_the_loop_while_many_answers_are_read() -> None:
    loop = asyncio.get_running_loop()
    turns, taken = 0, 0

    def take(_: Any) -> bool:
        nonlocal taken
        until_s = loop.time() + HOLD_MAX_S
        while loop.time() < until_s:
            pass
        taken += 1
        return taken == ANSWERS

    async def other() -> None:
        nonlocal turns
        while taken < ANSWERS:
            turns += taken > 0
            await asyncio.sleep(0)

    client = InOneTask(MemoryNats())
    task = asyncio.create_task(other())
    nats: Any = client
    await scatter(nats, SUBJECT, b"", take, what="ask", timeout_s=30.0)
    await task
    await client.giving
    assert turns >= ANSWERS - 2, "between any two answers, as each takes as long as the loop may be held"

"""How often a prefill worker asks the server for an entry: each question costs both of them."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo_local.transport.nats import flush
from tests.contract.prefill_queue.queue_worlds import MakeQueue

ENTRIES = 32


async def test_an_entry_without_a_latest_start_costs_about_one_question(
    make: MakeQueue, connection: Client | None
) -> None:
    """Entries that come one at a time, as to a worker that has time: it waits for each with one question, and looks at
    the second line now and then. It asked two to four times."""
    if connection is None:
        pytest.skip("the fake is asked for nothing")
    questions: list[str] = []

    async def asked(message: Msg) -> None:
        questions.append(message.subject)

    await connection.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=asked)
    puller, caller = make(), make()
    await caller.start()
    for number in range(ENTRIES):
        pulling = asyncio.create_task(puller.pull(10.0))
        await caller.enqueue(f"r{number}", {"n": number}, deadline_s=60)
        pulled = await pulling
        assert pulled is not None
        await pulled.ack()
    await flush(connection)
    mine = f".{puller.stream.removesuffix('queue')}"  # type: ignore[attr-defined]
    assert sum(mine in subject for subject in questions) <= 1.25 * ENTRIES

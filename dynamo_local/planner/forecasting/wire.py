"""How a task gets to the process that forecasts, and the answer back: four bytes of length, then msgpack.

Each is a value of plain numbers; nothing that is read can run code.
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO

import msgspec

from dynamo_local.planner.values.forecasts import Forecasts, ForecastTask

HEAD_BYTES = 4

_tasks = msgspec.msgpack.Decoder(ForecastTask)
_answers = msgspec.msgpack.Decoder(Forecasts)


def framed(value: ForecastTask | Forecasts) -> bytes:
    """A task or an answer, as it is sent."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def read_task(incoming: BinaryIO) -> ForecastTask | None:
    """The next task; None where there will be none. Blocks."""
    head = incoming.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return _tasks.decode(incoming.read(int.from_bytes(head, "big")))


async def read_answer(incoming: asyncio.StreamReader) -> Forecasts:
    """The next answer. Raises `asyncio.IncompleteReadError` where the other side has ended."""
    head = await incoming.readexactly(HEAD_BYTES)
    return _answers.decode(await incoming.readexactly(int.from_bytes(head, "big")))

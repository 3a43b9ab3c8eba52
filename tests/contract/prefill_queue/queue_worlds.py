"""Shows what the contract tests of prefill queues have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from dynamo_local.clock import AsyncioClock
from dynamo_local.ports import QueueDepth
from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue
from tests.fakes.infra.prefill_queue import FakePrefillQueue

ACK_WAIT_S = 0.4
MAX_DELIVER = 2
SOON_S = 0.15  # time enough for what is there; short, as it is waited for in full where nothing is

MakeQueue = Callable[..., FakePrefillQueue | JetStreamPrefillQueue]


class SkewedClock(AsyncioClock):
    """It can be moved ahead, and the time of day can be set."""

    ahead_s = set_by_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    def wall_s(self) -> float:
        return super().wall_s() + self.set_by_s


async def depth_becomes(queue: FakePrefillQueue | JetStreamPrefillQueue, expected: QueueDepth) -> None:
    """Within five seconds. A server counts what it has stored a moment after it has said that it is stored."""
    deadline_s = monotonic() + 5.0
    while (depth := await queue.depth()) != expected and monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    assert depth == expected

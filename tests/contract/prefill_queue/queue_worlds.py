"""What the contract tests of prefill queues have in common."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_local.clock import AsyncioClock
from dynamo_local.runtime.prefill_queue import JetStreamPrefillQueue
from tests.fakes.infra.prefill_queue import FakePrefillQueue

ACK_WAIT_S = 0.4
MAX_DELIVER = 2
SOON_S = 0.15  # time enough for what is there; short, as it is waited for in full where nothing is

MakeQueue = Callable[..., FakePrefillQueue | JetStreamPrefillQueue]


class SkewedClock(AsyncioClock):
    """Wall time can be moved."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s

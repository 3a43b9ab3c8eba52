"""The output of one request, for which a `generate` of the simulated engine waits."""

from __future__ import annotations

import asyncio

from dynamo_local.engines.sim.scheduling.handoffs import Handoff
from dynamo_local.engines.sim.tokens import TokenStream
from dynamo_local.engines.sim.transport import PullRequest
from dynamo_local.ports import EngineRequest, FinishReason


class OutputStream:
    """One request's answer as it comes. `pending` tokens were computed and not yet handed on."""

    __slots__ = (
        "cached",
        "delivered",
        "error",
        "first",
        "handoff",
        "pending",
        "pull",
        "reason",
        "request",
        "tokens",
        "waiter",
    )

    def __init__(self, request: EngineRequest, tokens: TokenStream, pull: PullRequest | None) -> None:
        self.request = request
        self.tokens = tokens
        self.pull = pull
        self.first = 0
        self.delivered = False
        self.pending = 0
        self.cached: int | None = None
        self.reason: FinishReason | None = None
        self.handoff: Handoff | None = None
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake `generate`: something has changed."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

"""The output of one request, for which a `generate` of the simulated engine waits."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_local.engines.sim.answers import logprobs_of
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

    def numbers(self, first: int, token_ids: tuple[int, ...]) -> dict[str, Any]:
        """The logprobs of these tokens, and with the first ones those of the prompt, as far as they were asked for."""
        extras, found = self.request.sampling.extras, {}
        if extras is None:
            return {}
        if extras.logprobs is not None:
            found["logprobs"] = logprobs_of(self.tokens, token_ids, first, max(1, extras.logprobs))
        if extras.prompt_logprobs is not None and first == 0:
            prompt = self.request.prompt_token_ids
            rest = logprobs_of(self.tokens, prompt[1:], -len(prompt), max(1, extras.prompt_logprobs))
            found["prompt_logprobs"] = [(), *rest]
        return found

    def wake(self) -> None:
        """Wake `generate`: something has changed."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

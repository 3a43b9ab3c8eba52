"""A Processor's questions to a Router."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.errors import DynamoError
from dynamo_local.ports import EndpointClient

log = logging.getLogger(__name__)

AWAY_S = 2.0
"""After a timeout, requests are routed without the Router for this long, so that not each of them waits."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A worker for a request; `prefix_hit_rate` None where nobody knows it."""

    worker: int
    prefix_hit_rate: float | None = None


class RouterClient:
    """Asks a Router for workers. Where it is away, or slow, the answer is None: then the Processor picks by itself."""

    def __init__(self, client: EndpointClient, timeout_s: float, clock: Clock | None = None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock or AsyncioClock()
        self._away_until_s = float("-inf")
        self._away = False

    async def choose(
        self, token_ids: Sequence[int], request_id: str, tokens: int, avoid: Sequence[int]
    ) -> Routed | None:
        """Within `timeout_s`. Raises nothing of its own."""
        if self._clock.now_s() < self._away_until_s:
            return None
        request = {"token_ids": token_ids, "request_id": request_id, "max_tokens": tokens, "avoid": list(avoid)}
        began_s = self._clock.now_s()
        try:
            stream = await self._client.call(request, request_id=request_id, timeout_s=self._timeout_s)
            try:
                answers = [item async for item in stream]
            finally:
                await stream.aclose()
            answer = msgspec.convert(answers[0], messages.RouteAnswer)
        except (DynamoError, msgspec.ValidationError, IndexError) as error:
            now_s = self._clock.now_s()
            if now_s - began_s >= self._timeout_s / 2:
                self._away_until_s = now_s + AWAY_S
            if not self._away:
                log.warning("the Router gives no answer, workers are picked here until it does: %s", error)
            self._away = True
            return None
        if self._away:
            log.info("the Router answers again")
        self._away = False
        return Routed(answer.worker_id, answer.prefix_hit_rate)

"""Requests as a user sends them: over HTTP, streamed, with the times at which their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import httpx

from dynamo_local.components.measuring import LOWEST_TOKEN, TOKENS
from dynamo_local.profiling.graph import GraphFailed
from dynamo_local.twin.trace import TraceRequest

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """ms until the first token, and the mean gap after it (None: there was one token)."""

    ttft_ms: float
    itl_ms: float | None


class Frontend:
    """A client of the graph's Frontend. Use it as `async with`."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
        self._model = ""

    async def __aenter__(self) -> Frontend:
        found = (await self._client.get("/v1/models")).json()["data"]
        if not found:
            raise GraphFailed("the Frontend lists no model")
        self._model = found[0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, tokens: int, answer: int, random: Random) -> Answered | None:
        """One request of so many random tokens; None where it was refused or broke off."""
        prompt = [LOWEST_TOKEN + random.randrange(TOKENS) for _ in range(tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer, "min_tokens": answer, "ignore_eos": True}
        began_s, times_s = time.monotonic(), []
        try:
            async with self._client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if response.status_code != httpx.codes.OK:
                    return None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times_s.append(time.monotonic())
        except httpx.HTTPError:
            return None
        if not times_s:
            return None
        # A frame may hold several tokens, but the last of them ends with the last frame.
        itl_ms = (times_s[-1] - times_s[0]) / (answer - 1) * 1000 if answer > 1 and len(times_s) > 1 else None
        return Answered((times_s[0] - began_s) * 1000, itl_ms)

    async def replay(self, trace: Sequence[TraceRequest], seed: int) -> list[Answered | None]:
        """The trace at its own times, whatever becomes of each request."""
        loop, random = asyncio.get_running_loop(), Random(seed)
        began_s = loop.time()

        async def one(request: TraceRequest, own: Random) -> Answered | None:
            await asyncio.sleep(began_s + request.at_s - loop.time())
            return await self.ask(request.input_length, request.output_length, own)

        tasks = [asyncio.create_task(one(request, Random(random.getrandbits(32)))) for request in trace]
        return list(await asyncio.gather(*tasks))

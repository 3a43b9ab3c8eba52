"""Streams by the clock of their client."""

from __future__ import annotations

import time

from openai import AsyncOpenAI

from tests.drivers.served import MODEL


async def timed(client: AsyncOpenAI, prompt: list[int], tokens: int) -> tuple[list[float], int | None]:
    """When each piece of the answer came (`time.monotonic`), and how many tokens it is said to have; None: not said."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    times: list[float] = []
    count = None
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            times.append(time.monotonic())
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    return times, count

"""Requests to a graph with a real model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion

from tests.drivers.scaled import Ask
from tests.drivers.served import Served

WORDS = [
    "arbiter",
    "lease",
    "worker",
    "queue",
    "prefill",
    "decode",
    "block",
    "cache",
    "token",
    "stream",
    "drain",
    "socket",
    "kernel",
    "planner",
    "graph",
]
WORDS += ["namespace", "watcher", "process", "session", "memory", "frontend", "router", "prompt", "answer", "deadline"]


def prompts(count: int, *, words: int = 60, seed: int = 7) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=words)) for _ in range(count)]


async def complete(client: AsyncOpenAI, prompt: str, max_tokens: int, **more: Any) -> tuple[str, int, int]:
    answer = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}, **more
    )
    assert answer.usage is not None
    return answer.choices[0].text, answer.usage.prompt_tokens, answer.usage.completion_tokens


async def complete_all(served: Served, asked: Sequence[str], max_tokens: int, *, at_once: int = 4) -> list[str]:
    slots = asyncio.Semaphore(at_once)
    async with served.client() as client:

        async def one(prompt: str) -> str:
            async with slots:
                text, _, completion_tokens = await complete(client, prompt, max_tokens)
            assert completion_tokens == max_tokens
            return text

        return list(await asyncio.gather(*(one(prompt) for prompt in asked)))


async def greedy_stream(client: AsyncOpenAI, prompt: str, max_tokens: int) -> AsyncStream[Completion]:
    """Exactly so many greedy tokens, as they come, and their number at the end."""
    return await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


class Streaming:
    """A streamed completion under way. `started` is set at its first text; its `task` gives the finish reason."""

    def __init__(self, client: AsyncOpenAI, prompt: str, max_tokens: int) -> None:
        self.started = asyncio.Event()
        self.text = ""
        self.tokens = 0
        self.task = asyncio.create_task(self._run(client, prompt, max_tokens))

    async def _run(self, client: AsyncOpenAI, prompt: str, max_tokens: int) -> str | None:
        reason = None
        stream = await greedy_stream(client, prompt, max_tokens)
        async with stream:
            async for chunk in stream:
                if chunk.usage is not None:
                    self.tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    self.text += choice.text or ""
                    reason = choice.finish_reason or reason
                    if self.text:
                        self.started.set()
        return reason


@asynccontextmanager
async def long_streams(
    served: Served, asked: Sequence[str], max_tokens: int, timeout_s: float
) -> AsyncIterator[list[Streaming]]:
    """All have begun; once the block has ended each must complete within `timeout_s`, with all of its tokens."""
    async with served.client() as client:
        streams = [Streaming(client, prompt, max_tokens) for prompt in asked]
        try:
            async with asyncio.timeout(60.0):
                await asyncio.gather(*(stream.started.wait() for stream in streams))
            yield streams
            async with asyncio.timeout(timeout_s):
                reasons = await asyncio.gather(*(stream.task for stream in streams))
        finally:
            for stream in streams:
                stream.task.cancel()
            await asyncio.wait({stream.task for stream in streams})
    assert reasons == ["length"] * len(streams)
    assert [stream.tokens for stream in streams] == [max_tokens] * len(streams)


def same_again(asked: Sequence[str], max_tokens: int) -> Ask:
    """A load over these prompts: each stream has all of its tokens, and says what that prompt's first one said."""
    known: dict[str, str] = {}

    async def ask(http: AsyncOpenAI, number: int, turn: int) -> str | None:
        prompt = asked[(7 * number + turn) % len(asked)]
        stream = Streaming(http, prompt, max_tokens)
        reason = await stream.task
        if (reason, stream.tokens) != ("length", max_tokens):
            return f"{prompt[:40]!r}: {stream.tokens} tokens, ended by {reason}"
        return None if known.setdefault(prompt, stream.text) == stream.text else f"{prompt[:40]!r}: another answer"

    return ask

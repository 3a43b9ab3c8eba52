"""Requests to a graph with a real model, and what is seen of its engines from outside."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from tests.fakes.served import Served

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
    """Different ones, of `words` words each."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=words)) for _ in range(count)]


async def complete(client: AsyncOpenAI, prompt: str, max_tokens: int, **more: Any) -> tuple[str, int, int]:
    """(text, prompt tokens, completion tokens) of a greedy completion."""
    answer = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}, **more
    )
    assert answer.usage is not None
    return answer.choices[0].text, answer.usage.prompt_tokens, answer.usage.completion_tokens


async def complete_all(served: Served, asked: Sequence[str], max_tokens: int, *, at_once: int = 4) -> list[str]:
    """The texts, in the order of the prompts."""
    slots = asyncio.Semaphore(at_once)
    async with served.client() as client:

        async def one(prompt: str) -> str:
            async with slots:
                text, _, completion_tokens = await complete(client, prompt, max_tokens)
            assert completion_tokens == max_tokens
            return text

        return list(await asyncio.gather(*(one(prompt) for prompt in asked)))


class Streaming:
    """A streamed completion under way. `started` is set at its first text; `await` the task for (text, chunks)."""

    def __init__(self, client: AsyncOpenAI, prompt: str, max_tokens: int) -> None:
        self.started = asyncio.Event()
        self.text = ""
        self.tokens = 0
        self.task = asyncio.create_task(self._run(client, prompt, max_tokens))

    async def _run(self, client: AsyncOpenAI, prompt: str, max_tokens: int) -> str | None:
        reason = None
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
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


def engine_pids(served: Served, watcher: str | None = None) -> list[int]:
    """Pids of what vLLM started: what Python's multiprocessing spawned, and EngineCore, which calls itself so."""
    mark = f"DYN_WATCHER_NAME={served.namespace}_{watcher}\0".encode() if watcher else b""
    found = []
    for pid, line in served.processes():
        if ("EngineCore" in line or "multiprocessing" in line) and mark in _environ(pid):
            found.append(pid)
    return found


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def prompt_tokens_by_source(log: str) -> dict[str, int]:
    """From what an engine says of itself when it is closed."""
    found: dict[str, int] = {}
    for line in re.findall(r"prompt tokens by source: (\{.*\})", log):
        for name, count in re.findall(r"'(\w+)': (\d+)", line):
            found[name] = found.get(name, 0) + int(count)
    return found

"""Real vLLM planned by targets: a small load that rises and falls keeps them, and no request fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from openai import AsyncOpenAI

from tests.drivers.planned import decided, planner
from tests.drivers.served import Served
from tests.vllm.asking import greedy_stream, prompts
from tests.vllm.hosts import VllmHost

RATES = ((20.0, 0.5), (30.0, 3.0), (30.0, 0.5))
"""Seconds, and requests per second."""
TOKENS = 32
TTFT_MS, ITL_MS, TARGET = 4000, 300, 0.99
"""Far from what the tiny model takes: two cores that start another engine meanwhile are slow."""
BUDGET = 3
ROSE = 2.0
"""The rate that the planner has seen at the peak, over that of the beginning."""


@dataclass(slots=True)
class Kept:
    """Whether each request with a whole answer kept both targets."""

    within: list[bool] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def arrivals() -> list[float]:
    begins = accumulate((seconds for seconds, _ in RATES), initial=0.0)
    return [
        begin_s + number / rate
        for begin_s, (seconds, rate) in zip(begins, RATES, strict=False)
        for number in range(round(seconds * rate))
    ]


async def asked(client: AsyncOpenAI, prompt: str, found: Kept) -> None:
    began_s, times_s, tokens = time.monotonic(), list[float](), 0
    try:
        stream = await greedy_stream(client, prompt, TOKENS)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                times_s.append(time.monotonic())
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
    except Exception as error:  # a failed request is a result here
        found.failed.append(f"{type(error).__name__}: {error}")
        return
    if tokens != TOKENS or not times_s:
        found.failed.append(f"{tokens} tokens, {len(times_s)} pieces of text")
        return
    ttft_ms, itl_ms = (times_s[0] - began_s) * 1000, (times_s[-1] - times_s[0]) / (TOKENS - 1) * 1000
    found.within.append(ttft_ms <= TTFT_MS and itl_ms <= ITL_MS)


async def play(served: Served) -> Kept:
    found, times = Kept(), arrivals()
    async with served.client() as client, asyncio.TaskGroup() as group:
        began_s = time.monotonic()
        for at_s, prompt in zip(times, prompts(len(times)), strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            group.create_task(asked(client, prompt, found))
    return found


class PlannedByTargets:
    """`Planner: {ttft, itl, target}`."""

    async def test_a_load_that_rises_and_falls_keeps_its_targets(self, vllm_host: VllmHost, tmp_path: Path) -> None:
        section = {"ttft": TTFT_MS, "itl": ITL_MS, "target": TARGET, "budget": BUDGET}
        with vllm_host.disaggregated(tmp_path, planner=section).started() as served:
            found = await play(served)
            status, decisions = planner(served, "status"), decided(served)
        assert found.failed == []
        assert len(found.within) == len(arrivals())
        assert sum(found.within) >= TARGET * len(found.within), found.within
        assert status["failed_ticks"] == 0
        assert {record["inputs"]["policy"] for record in decisions} == {"slo"}
        assert max(sum(record["decision"]["targets"].values()) for record in decisions) <= BUDGET
        reasons = [record["decision"]["reasons"][0] for record in decisions]
        rates = [rate for each in reasons if (rate := each["numbers"].get("requests_per_second")) is not None]
        assert max(rates) > ROSE * rates[0]
        assert max(rates) > ROSE * rates[-1]

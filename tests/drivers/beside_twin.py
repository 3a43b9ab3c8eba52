"""A trace against a real graph, beside its twin: what clients and `dynamo status` saw, and whether a host that others
keep busy can say anything at all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from httpx import HTTPError
from openai import APIError, AsyncOpenAI

from dynamo_local.twin.simulation import Run
from dynamo_local.twin.trace import HASH_BLOCK_TOKENS, TraceRequest
from tests.drivers.planned import planner
from tests.drivers.served import Served
from tests.drivers.timed import timed

BUSY_MAX_PERCENT = 60.0
POLL_S = 0.2
TOKENS = range(259, 2048)
"""The tokenizer's words, without bytes and marks."""


@dataclass
class Watched:
    """What was measured of the real graph. `counts` are `(at_s, ready by role)`, from the first arrival."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    """Of each request: to its first token, and the mean gap between its tokens (0: it has one)."""
    end_s: float = 0.0
    """When the last answer was whole."""
    held: list[tuple[float, int]] = field(default_factory=list)
    """`(at_s, GPUs)` that workers held, in whatever state."""
    counts: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    busy_percent: float = 0.0
    failed: list[str] = field(default_factory=list)
    """Requests without a whole answer, in words."""


Prompt = Callable[[TraceRequest], list[int]]


def by_chance() -> Prompt:
    """Prompts that share nothing."""
    rng = random.Random(1)
    return lambda request: [rng.randrange(TOKENS.start, TOKENS.stop) for _ in range(request.input_length)]


def by_blocks(request: TraceRequest) -> list[int]:
    """A prompt that shares with others what the trace says: the same id is the same 512 tokens."""
    words = list(TOKENS)
    found: list[int] = []
    for hash_id in request.hash_ids:
        found += random.Random(hash_id).choices(words, k=HASH_BLOCK_TOKENS)
    missing = request.input_length - len(found)
    if missing > 0:
        found += random.Random(str(request)).choices(words, k=missing)
    return found[: request.input_length]


async def play(
    served: Served,
    trace: Sequence[TraceRequest],
    *,
    planned: bool = False,
    prompt_of: Prompt | None = None,
    look_every_s: float = POLL_S,
) -> Watched:
    """The trace, open loop, against the graph. `planned`: the planner's interval begins with the trace, as the twin's
    does. Whether all answers were complete is the caller's to say (`all_answered`): it knows how busy the host was."""
    watched = Watched()
    prompt_of = prompt_of or by_chance()
    async with served.client() as client:
        await ask(client, [300] * 50, 4)  # the first request of a connection pays for its imports
        psutil.cpu_percent()
        if planned:
            planner(served, "pause")
            planner(served, "resume")
        frontend = served.pids()["Frontend"]
        begin_s = time.monotonic()
        watching = asyncio.create_task(watch(served, watched, begin_s, look_every_s))

        async def one(request: TraceRequest) -> None:
            await asyncio.sleep(begin_s + request.at_s - time.monotonic())
            prompt = prompt_of(request)
            asked_s = time.monotonic()
            try:
                first_s, last_s, tokens = await ask(client, prompt, request.output_length)
            except (APIError, HTTPError, AssertionError) as error:  # in a stream the client lets httpx's errors through
                cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
                watched.failed.append(f"at {request.at_s:.1f} s: {type(error).__name__}: {error}{cause}")
                return
            if tokens != request.output_length:
                watched.failed.append(f"at {request.at_s:.1f} s: {tokens} of {request.output_length} tokens")
                return
            ttft_s, itl_s = first_s - asked_s, (last_s - first_s) / max(1, tokens - 1)
            watched.ttft_s.append(ttft_s)
            if tokens > 1:
                watched.itl_s.append(itl_s)
            watched.latencies_s.append((ttft_s, itl_s))

        async with asyncio.TaskGroup() as group:
            for request in trace:
                group.create_task(one(request))
        watched.end_s = time.monotonic() - begin_s
        watched.busy_percent = psutil.cpu_percent()
        watching.cancel()
        await asyncio.wait([watching])
    # However busy the host: nothing here may end the Frontend.
    assert served.pids().get("Frontend") == frontend, f"the Frontend was started again; failed: {watched.failed}"
    return watched


async def ask(client: AsyncOpenAI, prompt: list[int], tokens: int) -> tuple[float, float, int]:
    """When the first and the last token came, and how many there were."""
    times, count = await timed(client, prompt, tokens)
    assert times, "the stream ended without a token"
    return times[0], times[-1], count or 0


async def watch(served: Served, watched: Watched, begin_s: float, every_s: float) -> None:
    while True:
        workers = (await asyncio.to_thread(served.status))["workers"]
        ready = [worker["watcher_name"] for worker in workers if worker["state"] == "ready"]
        counts = {
            role: sum(component in name for name in ready)
            for role, component in (("prefill", "_PrefillWorker"), ("decode", "_VllmWorker"))
        }
        at_s = time.monotonic() - begin_s
        watched.counts.append((at_s, counts))
        watched.held.append((at_s, sum(len(worker["gpu_uuids"]) for worker in workers)))
        await asyncio.sleep(every_s)


@contextmanager
def unless_busy(watched: Watched) -> Iterator[None]:
    """A disagreement on a host that others keep busy is theirs."""
    try:
        yield
    except AssertionError as error:
        if watched.busy_percent > BUSY_MAX_PERCENT:
            pytest.skip(f"the host was {watched.busy_percent:.0f} % busy: {error}".splitlines()[0])
        raise


def all_answered(watched: Watched) -> None:
    """No request was lost."""
    assert watched.failed == [], f"{len(watched.failed)} requests failed: {watched.failed[:3]}"


def counter(run: Run) -> Callable[[str, float], int]:
    """`(role, at_s)` to how many were ready in the twin."""

    def ready(role: str, at_s: float) -> int:
        last: Any = run.points[0]
        for point in run.points:
            if point.at_s <= at_s:
                last = point
        return int(getattr(last, role).ready)

    return ready

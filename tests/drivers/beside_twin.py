"""A trace against a real graph, beside the simulator: what clients and `dynamo status` saw, on how busy a host."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from dynamo_local.simulator.simulation import Run
from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS, TraceRequest
from tests.drivers.lean_client import BadAnswerError, ask, completion
from tests.drivers.planned import planner
from tests.drivers.served import Served

BUSY_MAX_PERCENT = 60.0
POLL_S = 0.2
TOKENS = range(259, 2048)
"""The tokenizer's words, without bytes and marks."""


@dataclass
class Watched:
    """Measurements of the real graph. `counts` are `(at_s, ready by role)`, from the first arrival."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    """For each request: seconds to its first token, and the mean gap between its tokens (0: it has one)."""
    late_s: float = 0.0
    """Seconds by which the client itself sent its latest request too late."""
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
    """Play the trace, open loop. If `planned`, the planner's interval begins with the trace, as the simulator's does.
    The caller checks that all answers were complete (`all_answered`), because it knows how busy the host was."""
    watched = Watched()
    prompt_of = prompt_of or by_chance()
    # Made before anybody asks: prompts of a hundred thousand tokens take their time.
    requests = [completion(prompt_of(each), each.output_length) for each in trace]
    port = int(served.url.rpartition(":")[2])
    await ask(port, completion([300] * 50, 4))  # the first request pays for imports
    psutil.cpu_percent()
    if planned:
        planner(served, "pause")
        planner(served, "resume")
    frontend = served.pids()["Frontend"]
    begin_s = time.monotonic()
    watching = asyncio.create_task(watch(served, watched, begin_s, look_every_s))

    async def one(request: TraceRequest, asked: bytes) -> None:
        await asyncio.sleep(begin_s + request.at_s - time.monotonic())
        asked_s = time.monotonic()
        watched.late_s = max(watched.late_s, asked_s - begin_s - request.at_s)
        try:
            answer = await ask(port, asked)
        except (BadAnswerError, OSError, TimeoutError) as error:
            watched.failed.append(f"at {request.at_s:.1f} s: {type(error).__name__}: {error}")
            return
        tokens = answer.tokens
        if tokens != request.output_length:
            watched.failed.append(f"at {request.at_s:.1f} s: {tokens} of {request.output_length} tokens")
            return
        ttft_s, itl_s = answer.first_s - asked_s, (answer.last_s - answer.first_s) / max(1, tokens - 1)
        watched.ttft_s.append(ttft_s)
        if tokens > 1:
            watched.itl_s.append(itl_s)
        watched.latencies_s.append((ttft_s, itl_s))

    async with asyncio.TaskGroup() as group:
        for request, asked in zip(trace, requests, strict=True):
            group.create_task(one(request, asked))
    watched.end_s = time.monotonic() - begin_s
    watched.busy_percent = psutil.cpu_percent()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching  # raises what ended it before: half a record would be taken for a whole one
    # However busy the host: nothing here may end the Frontend.
    assert served.pids().get("Frontend") == frontend, f"the Frontend was started again; failed: {watched.failed}"
    return watched


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
        watched.held.append((at_s, sum(len(worker["gpus"]) for worker in workers)))
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
    assert watched.failed == [], f"{len(watched.failed)} requests failed: {watched.failed[:3]}"


def counter(run: Run) -> Callable[[str, float], int]:
    """`(role, at_s)` to how many were ready in the simulation."""

    def ready(role: str, at_s: float) -> int:
        last: Any = run.points[0]
        for point in run.points:
            if point.at_s <= at_s:
                last = point
        return int(getattr(last, role).ready)

    return ready

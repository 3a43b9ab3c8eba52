"""The shipped graphs of Dynamo's own processes, load through Dynamo's own frontend, and what is seen of its workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import psutil
from openai import AsyncOpenAI

from tests.drivers import scaled
from tests.drivers.scaled import Load
from tests.drivers.served import ROOT, Served

EXAMPLE = ROOT / "examples" / "dynamo_1x"
MODEL = "tiny"
TOKENS = (4, 20, 60)
"""Lengths of the load's streams, in turn."""
LISTED_S = 90.0
WAIT_S = 60.0
"""For what takes a moment, on a machine that does something else."""
FAILURES_MAX = 50
"""A load that does nothing but fail is of no use."""
INSTANCES = "v1/instances/"


class DynamoServed(Served):
    """A graph none of whose processes makes shared memory: what comes into /dev/shm meanwhile is somebody else's."""

    def shared_memory(self) -> set[str]:
        return set()


def graph(name: str, *words: str, **more: Any) -> Served:
    return DynamoServed(
        "--Frontend.ports.http=0", *words, target=("-f", f"{name}.yaml"), cwd=EXAMPLE, frontend=False, **more
    )


WITHOUT_MIGRATION = "--Frontend.command=python -m dynamo.frontend --router-mode round-robin --migration-limit 0"


async def listed(served: Served) -> None:
    """The frontend lists the model: every role that it needs has a worker that it knows of."""
    async with served.client() as client:
        async with asyncio.timeout(LISTED_S):
            while MODEL not in [model.id async for model in client.models.list()]:
                await asyncio.sleep(0.05)


async def ask(client: AsyncOpenAI, prompt: str, tokens: int, *, started: asyncio.Event | None = None) -> int:
    """Stream one chat of exactly so many tokens; how many there were. Raises what the client raises."""
    count, finished = 0, None
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async with stream:
        async for chunk in stream:
            if chunk.usage is not None:
                count = chunk.usage.completion_tokens
            for choice in chunk.choices:
                finished = choice.finish_reason or finished
                if started is not None:
                    started.set()
    if finished is None or count != tokens:
        raise AssertionError(f"a stream of {tokens} tokens ended after {count} with {finished}")
    return count


@asynccontextmanager
async def long_answers(served: Served, count: int, tokens: int) -> AsyncIterator[list[asyncio.Task[int]]]:
    """So many streams of so many tokens, all begun."""
    async with served.client() as client:
        began = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(ask(client, f"a long answer, the {n}th", tokens, started=event))
            for n, event in enumerate(began)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in began)), WAIT_S)
        yield tasks


async def _ask_again(http: AsyncOpenAI, number: int, turn: int) -> None:
    await ask(
        http, f"client {number} asks for the {turn}th time what a drain is", TOKENS[(number + turn) % len(TOKENS)]
    )


def load(served: Served, clients: int = 6) -> AbstractAsyncContextManager[Load]:
    """So many clients, each with one stream after the other, without retries, also after a failure."""
    return scaled.load(served, clients, _ask_again, FAILURES_MAX)


def instances(served: Served, component: str = "backend") -> list[str]:
    """Keys of Dynamo's registry by which workers of that component are routed to."""
    keys = served.keys(f"{INSTANCES}{served.namespace}/{component}/")
    return [key for key in keys if "/generate/" in key]


def commands_of(served: Served, name: str) -> list[int]:
    """Pids of what the runner of that worker (name without namespace) started."""
    return [child.pid for child in psutil.Process(served.pids()[name]).children()]


def listening(served: Served) -> list[tuple[str, str, int]]:
    """`(command, address, port)` of each TCP or UDP socket on which a process of the graph takes what comes."""
    found = []
    for pid, line in served.processes():
        try:
            connections = psutil.Process(pid).net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found += [
            (line[:60], connection.laddr.ip, connection.laddr.port)
            for connection in connections
            if connection.status == psutil.CONN_LISTEN or (connection.laddr and not connection.raddr)
        ]
    return found


def in_flight(served: Served, name: str) -> int:
    load = served.worker(name)["load"]
    return 0 if load is None else int(load["request_active_slots"] + load["num_requests_waiting"])


def json_of(served: Served, *words: str) -> Any:
    done = served.ok(*words, "--json")
    return json.loads(done)

"""For tests that scale a running graph: commands without a process of their own, load that checks every stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from dynamo_local.arbiter.event_log import event_log_path, read
from dynamo_local.cli.common import ask_arbiter
from tests.drivers.served import Served, asking, auntil, expected, stream_chat

COMMAND_TIMEOUT_S = 60.0
PATIENCE_S = 120.0
"""For streams to end on a machine that does much else."""
TOKENS = (10, 30, 80)
"""Lengths of the load's streams, in turn: some end in a tenth of a second, some outlast the test's own actions."""


def command(served: Served, name: str, /, **properties: Any) -> dict[str, Any]:
    """`dynamo_NAME` over the control endpoint, as `dynamo NAME` sends it. Raises `ArbiterRefused`."""
    return ask_arbiter(served.paths, f"dynamo_{name}", COMMAND_TIMEOUT_S, **properties)


def scale(served: Served, component: str, target: str, **properties: Any) -> list[tuple[str, str]]:
    """`dynamo scale`: `(kind, name without the namespace)` of each instruction."""
    reply = command(served, "scale", component=component, target=target, **properties)
    prefix = f"{served.namespace}_"
    return [(i["kind"], i["watcher_name"].removeprefix(prefix)) for i in reply["instructions"]]


async def ascale(served: Served, component: str, target: str, **properties: Any) -> list[tuple[str, str]]:
    return await asyncio.to_thread(scale, served, component, target, **properties)


async def settled(served: Served, timeout_s: float = 30.0) -> None:
    """Every worker is ready, or the template of a component that has none; who has left, has left altogether."""

    def is_settled() -> bool:
        states = served.states().items()
        return all(state == "ready" or (state == "exited" and "_" not in name) for name, state in states)

    await auntil(is_settled, timeout_s, what=served.states)


def names(served: Served, component: str) -> list[str]:
    return [
        row["watcher_name"].removeprefix(f"{served.namespace}_")
        for row in served.status()["workers"]
        if row["component"] == component and row["state"] == "ready"
    ]


def busy(served: Served, component: str) -> str | None:
    """A worker of the component that has a request in hand, by the samples of its load."""
    for row in served.status()["workers"]:
        if row["component"] == component and row["load"] and row["load"]["request_active_slots"]:
            return str(row["watcher_name"]).removeprefix(f"{served.namespace}_")
    return None


async def answer(served: Served, prompt: str, tokens: int = 8) -> str | None:
    """The text of one chat. Raises what the client raises."""
    async with served.client() as client:
        return (await client.chat.completions.create(**asking(prompt, tokens))).choices[0].message.content


def events(served: Served, name: str | None = None) -> list[dict[str, Any]]:
    """The event log, of one worker (without namespace) or of all."""
    of = None if name is None else {f"{served.namespace}_{name}"}
    return [dict(record) for record in read(event_log_path(served.paths.logs), of=of) if record]


def kinds(records: Iterable[dict[str, Any]]) -> list[str]:
    return [record["event"] for record in records]


@dataclass
class Load:
    """The outcome of a load's streams. It ends by itself after so many failures."""

    failures_max: int = 1
    right: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self, at_least: int = 1) -> None:
        """No stream failed or was wrong, and there were that many."""
        assert self.failures == [], (len(self.failures), self.failures[:5])
        assert self.right >= at_least

    async def more(self, count: int) -> None:
        """Wait until so many more have come right, however slow the machine is; or too many have failed."""
        enough = self.right + count
        over = lambda: len(self.failures) >= self.failures_max or self.right >= enough  # noqa: E731
        await auntil(over, PATIENCE_S, what=lambda: (self.right, self.failures[:3]))


Ask = Callable[[AsyncOpenAI, int, int], Awaitable[str | None]]
"""`(client, number of the client, its turn)`: one stream to its end, and what was wrong with it, or None."""


async def ask_sim(http: AsyncOpenAI, number: int, turn: int) -> str | None:
    prompt = f"Client {number} asks for the {turn}th time: what is it like to be one of many?"
    tokens = TOKENS[(number + turn) % len(TOKENS)]
    answer = await stream_chat(http, prompt, tokens, ignore_eos=True)
    right = answer == expected(prompt, tokens, ignore_eos=True)
    return None if right else f"{prompt!r}: wrong answer, {answer[1]}"


@asynccontextmanager
async def load(served: Served, streams: int = 12, ask: Ask = ask_sim, failures_max: int = 1) -> AsyncIterator[Load]:
    """So many clients, each with one stream after the other, without retries; the block ends when all have ended."""
    found, stop = Load(failures_max), asyncio.Event()

    async def client(http: AsyncOpenAI, number: int) -> None:
        for turn in itertools.count():
            if stop.is_set() or len(found.failures) >= failures_max:
                return
            try:
                wrong = await ask(http, number, turn)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong is None:
                found.right += 1
            else:
                found.failures.append(wrong)

    async with served.client() as http:
        clients = [asyncio.create_task(client(http, number)) for number in range(streams)]
        try:
            await found.more(1)
            yield found
        finally:
            stop.set()
            await asyncio.gather(*clients)


@asynccontextmanager
async def streaming(served: Served, *prompts: str, tokens: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """One stream of exactly so many tokens (6 ms each at speed 1) per prompt, all begun; `stream_chat`'s tasks."""
    async with served.client() as http:
        began = [asyncio.Event() for _ in prompts]
        tasks = [
            asyncio.create_task(stream_chat(http, prompt, tokens, ignore_eos=True, started=event))
            for prompt, event in zip(prompts, began, strict=True)
        ]
        try:
            async with asyncio.timeout(20.0):
                await asyncio.gather(*(event.wait() for event in began))
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

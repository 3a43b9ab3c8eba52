"""Flipping workers of a running graph, and what must be so of it before and after."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_local.core.types import Instance
from dynamo_local.errors import FlipFailed
from dynamo_local.transport.requests.client import NatsEndpointClient
from tests.drivers.scaled import command, names, settled
from tests.drivers.served import Served, auntil

BASE = {"VllmWorker": 2, "PrefillWorker": 2}
FLIP_TIMEOUT_S = 30.0
PROMPT = list(range(3, 40))
ONE_TOKEN = {"max_tokens": 1, "ignore_eos": True}


def counts() -> list[str]:
    """For `dynamo serve`: so many workers of each."""
    return [f"--{name}.ServiceArgs.workers={count}" for name, count in BASE.items()]


async def flip_to(served: Served, wanted: dict[str, int]) -> None:
    await settled(served)
    for gives in BASE:
        while len(there := names(served, gives)) > wanted[gives]:
            await flip(served, there[-1])


async def aflip(served: Served, name: str, **properties: Any) -> dict[str, Any]:
    return await asyncio.to_thread(command, served, "flip", name=f"{served.namespace}_{name}", **properties)


async def flip(served: Served, name: str, **properties: Any) -> str:
    """`dynamo flip NAME --wait`: its new name."""
    reply = await aflip(served, name, **properties)
    becomes = str(reply["becomes"]).removeprefix(f"{served.namespace}_")
    await auntil(lambda: served.states().get(becomes) == "ready", FLIP_TIMEOUT_S, what=served.states)
    return becomes


def facts(served: Served) -> dict[int, Any]:
    """Devices of each pid, which a flip must not change, and whether it has an age."""
    return {row["pid"]: (row["gpus"], row["uptime_s"] > 0) for row in served.status()["workers"] if row["pid"]}


async def each_in_one_role(served: Served) -> None:
    """The ready workers are the registered ones, each once. Waits until the keys of former roles are gone."""
    rows = [row["watcher_name"] for row in served.status()["workers"] if row["pid"]]

    async def ready_keys() -> list[str]:
        return [key for key in await asyncio.to_thread(served.keys) if "/workers/" in key]

    async with asyncio.timeout(FLIP_TIMEOUT_S):
        while len(keys := await ready_keys()) != len(rows):
            await asyncio.sleep(0.1)
    assert sorted(key.rpartition("/")[2].partition(":")[0] for key in keys) == sorted(rows)


async def first_answer_s(served: Served, name: str, client: NatsEndpointClient) -> float:
    """Seconds from the command to the end of the first request that it answers in its new role: `client` is one of an
    endpoint that takes tokens there. Returns once the flip is over. Raises `FlipFailed` where it stays what it was."""
    known = {each.instance_id for each in await client.wait_for_instances(FLIP_TIMEOUT_S)}
    began_s = time.monotonic()
    flipping = asyncio.create_task(aflip(served, name))
    try:
        new = await _new_instance(served, name, client, known, flipping.done)
        request = {"request_id": f"first-{name}-{began_s}", "token_ids": PROMPT, "sampling": ONE_TOKEN}
        assert [item async for item in await client.call(request, instance_id=new.instance_id)]
        took_s = time.monotonic() - began_s
    finally:
        await flipping
    await settled(served)
    return took_s


async def _new_instance(
    served: Served, name: str, client: NatsEndpointClient, known: set[int], ordered: Callable[[], bool]
) -> Instance:
    """As soon as it is registered. Raises `FlipFailed`, with what the arbiter tells of it, once the flip is over;
    `ordered` says whether it has begun."""
    deadline_s = time.monotonic() + FLIP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if found := await client.wait_for_others(known, 1.0):
            return found[0]
        if ordered() and (await asyncio.to_thread(served.states)).get(name) == "ready":
            if found := await client.wait_for_others(known, 1.0):
                return found[0]
            notes = [note["text"] for note in served.status()["notes"] if name in note["text"]]
            raise FlipFailed(f"{name} has stayed what it was: {notes[-1:]}")
    raise FlipFailed(f"{name} has stayed what it was, for {FLIP_TIMEOUT_S:g} s")


def quantiles(values: Sequence[float]) -> dict[float, float]:
    """The median, and what 99 of 100 do not exceed; each one of the values."""
    ordered = sorted(values)
    return {q: round(ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)], 4) for q in (0.5, 0.99)}

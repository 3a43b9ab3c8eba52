"""Putting workers of a running graph to sleep, and waking them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.drivers.scaled import command
from tests.drivers.served import Served, auntil


def sleep(served: Served, name: str, **more: Any) -> dict[str, Any]:
    return command(served, "sleep", name=name, **more)


def wake(served: Served, name: str) -> dict[str, Any]:
    return command(served, "wake", name=name)


async def until_state(served: Served, name: str, *states: str, timeout_s: float = 60.0) -> None:
    await auntil(lambda: served.states().get(name) in states, timeout_s, what=served.states)


async def asleep(served: Served, name: str, **more: Any) -> None:
    await asyncio.to_thread(sleep, served, name, **more)
    await until_state(served, name, "sleeping")


async def awake(served: Served, name: str) -> None:
    await asyncio.to_thread(wake, served, name)
    await until_state(served, name, "ready")


async def wake_all(served: Served) -> None:
    for name, state in served.states().items():
        if state in ("sleeping", "falling_asleep"):
            await awake(served, name)

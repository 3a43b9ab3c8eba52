"""What becomes of a graph while it starts, told now and then: engines take minutes, and silence looks like a hang."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError
from dynamo_local.state import State, load
from dynamo_local.system.paths import Paths

EVERY_S = 15.0

T = TypeVar("T")


async def told_while(started: Awaitable[T], namespace: str, tell: Callable[[str], None], every_s: float = EVERY_S) -> T:
    """What `started` comes to; every so many seconds, who of the namespace is not ready yet."""
    began_s = time.monotonic()
    task = asyncio.ensure_future(started)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=every_s)
            if done:
                return task.result()
            tell(f"starting for {time.monotonic() - began_s:.0f} s: {waiting_for(_state(namespace))}")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def waiting_for(state: State | None) -> str:
    """Who is not ready, in words."""
    if state is None or not state.components:
        return "no worker runs yet"
    late = [
        f"{name.removeprefix(f'{state.namespace}_')} is {each.state.value}"
        for name, each in sorted(state.components.items())
        if each.state is not WorkerState.READY
    ]
    return ", ".join(late) or "all are ready"


def _state(namespace: str) -> State | None:
    """None before there is one."""
    try:
        return load(Paths.found(namespace, os.environ).statefile)
    except (OSError, DynamoError):
        return None

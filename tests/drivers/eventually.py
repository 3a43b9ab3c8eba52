"""Await what other tasks of this loop bring about; `served.auntil` looks in a thread, at files and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 0.002


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(LOOK_EVERY_S)

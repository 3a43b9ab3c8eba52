"""Decisions and status of a Router of a running graph."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.drivers.endpoint_client import endpoint_client
from tests.drivers.served import Served

DECISION = re.compile(r"worker ([0-9a-f]+) by (\S+), prefix hit rate ([0-9.]+)")


def decisions(served: Served, router: str = "Router") -> list[tuple[str, str, float]]:
    """`(worker in hex, policy, prefix hit rate)` of each request, by a Router's log."""
    found = DECISION.findall(served.log(router))
    return [(worker, policy, float(rate)) for worker, policy, rate in found]


@asynccontextmanager
async def router_status(served: Served) -> AsyncIterator[Any]:
    async with endpoint_client(served, "Router", "status") as client:

        async def status() -> dict[str, Any]:
            await client.wait_for_instances(15.0)
            stream = await client.call(None, timeout_s=5.0)
            (found,) = [item async for item in stream]
            return found

        yield status


async def until_status(status: Any, holds: Any) -> dict[str, Any]:
    """The Router's status once it is so, asked again every 50 ms up to 15 s."""
    found: dict[str, Any] = {}
    async with asyncio.timeout(15.0):
        while not holds(found := await status()):
            await asyncio.sleep(0.05)
    return found

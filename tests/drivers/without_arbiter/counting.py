"""Small services for tests of the worker process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_local.sdk import service
from dynamo_local.sdk.service import async_on_start, depends, endpoint, on_shutdown

log = logging.getLogger(__name__)


@service(dynamo={"namespace": "dynamo"})
class Counter:
    """Has no load source of its own. With `SHUTDOWN_S` its shutdown takes so long."""

    @endpoint()
    async def count(self, request: dict[str, Any]) -> AsyncGenerator[int, None]:
        for number in range(request["to"]):
            yield number
            await asyncio.sleep(request["interval_s"])

    @on_shutdown
    async def stop(self) -> None:
        await asyncio.sleep(float(os.environ.get("SHUTDOWN_S", "0")))


@service(dynamo={"namespace": "dynamo"})
class Sleeper:
    """Never ready: an engine that loads for ever."""

    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[int, None]:
        yield 1

    @async_on_start
    async def start(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.info("the start was cancelled")

    @on_shutdown
    async def stop(self) -> None:
        log.info("the engine was closed")


@service(dynamo={"namespace": "dynamo"})
class All:
    """The graph."""

    counter = depends(Counter)
    sleeper = depends(Sleeper)

"""A worker process to be killed or stopped.

`python -m tests.drivers.without_arbiter.request_worker URL TOKEN_FILE SUBJECT`.

Prints "ready" when it serves. Its handler yields `payload["count"]` numbers (default: without end),
`payload["interval_s"]` apart. Ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.server import EndpointServer


async def numbers(payload: dict[str, Any], context: RequestContext) -> AsyncIterator[int]:
    n = 0
    while n != payload.get("count"):
        yield n
        n += 1
        await asyncio.sleep(payload.get("interval_s", 0.005))


async def main(url: str, token_file: str, subject: str) -> None:
    nats = await connect_nats(url, NatsAccess.of({"DYN_NATS_TOKEN_FILE": token_file}), name="request-worker")
    server = EndpointServer(nats, subject=subject, handler=numbers)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await close_quietly(nats)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

"""What one hop costs: a handler in another process, over NATS and loopback TCP, beside calling it directly.

    python benchmarks/data_plane.py [--json] [--stock-loop] [--requests 2000]

Both ways run in the same run, on the same machine, with the same handler. `added` is the difference.
Token latency is measured between the worker's `yield` and the caller's loop body (CLOCK_MONOTONIC is one
clock for all processes of a host).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Instance
from dynamo_local.runtime.nats import close_quietly, connect_nats
from dynamo_local.runtime.requests.client import NatsEndpointClient
from dynamo_local.runtime.requests.context import RequestContext
from dynamo_local.runtime.requests.dispatch import Dispatcher
from dynamo_local.runtime.requests.server import EndpointServer
from dynamo_local.serve.infra import NatsSpec, PortLease, find_server, prepare, probe_nats

SUBJECT = "bench_worker.generate-1"
STREAMS = 200
TOKENS_PER_S_EACH = 25.0


async def handler(payload: dict[str, Any], context: RequestContext) -> AsyncIterator[Any]:
    """`count` items, each the time at which it was made, `interval_s` apart."""
    interval_s = payload.get("interval_s", 0.0)
    next_s = time.monotonic()
    for _ in range(payload["count"]):
        if interval_s:
            next_s += interval_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        yield time.monotonic()


class OneInstance:
    """A view of one instance that never changes."""

    def instances(self) -> tuple[Instance, ...]:
        return (Instance("bench", "Worker", "generate", 1, SUBJECT),)

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return self.instances()

    async def close(self) -> None:
        """Nothing to end."""


Call = Callable[[dict[str, Any]], Awaitable[AsyncIterator[Any]]]


def summary(values_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(values_s)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 4),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 4),
    }


async def request_latency(call: Call, requests: int) -> dict[str, float]:
    """One request after the other, one item each."""
    took = []
    for _ in range(requests):
        start = time.perf_counter()
        async for _ in await call({"count": 1}):
            pass
        took.append(time.perf_counter() - start)
    return summary(took)


async def requests_per_s(call: Call, requests: int, concurrency: int = 64) -> float:
    """`concurrency` callers, one item each."""

    async def caller() -> None:
        for _ in range(requests // concurrency):
            async for _ in await call({"count": 1}):
                pass

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return round(requests // concurrency * concurrency / (time.perf_counter() - start))


async def items_per_s(call: Call, items: int) -> float:
    """One stream, as fast as it goes."""
    start = time.perf_counter()
    async for _ in await call({"count": items}):
        pass
    return round(items / (time.perf_counter() - start))


async def token_latency(call: Call, streams: int, tokens: int, interval_s: float) -> dict[str, float]:
    """Streams side by side at a decode worker's pace: from the worker's `yield` to the caller's loop body."""
    took: list[float] = []

    async def caller() -> None:
        async for made in await call({"count": tokens, "interval_s": interval_s}):
            took.append(time.monotonic() - made)

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(streams)))
    wall = time.perf_counter() - start
    return {
        **summary(took),
        "tokens_per_s": round(len(took) / wall),
        "caller_cpu_share": round((time.process_time() - cpu) / wall, 3),
    }


async def measure(call: Call, requests: int) -> dict[str, Any]:
    """All figures of one way to call. The first requests warm the connection up."""
    await request_latency(call, 200)
    return {
        "request": await request_latency(call, requests),
        "requests_per_s": await requests_per_s(call, requests),
        "items_per_s_one_stream": await items_per_s(call, 200_000),
        "token_one_stream": await token_latency(call, 1, 400, 0.005),
        f"token_{STREAMS}_streams": await token_latency(call, STREAMS, 75, 1 / TOKENS_PER_S_EACH),
    }


async def caller(url: str, token_file: Path, requests: int) -> dict[str, Any]:
    """Measure the hop and the direct call."""

    async def direct(payload: dict[str, Any]) -> AsyncIterator[Any]:
        return handler(payload, RequestContext("direct"))

    nats = await connect_nats(url, token_file, name="bench-caller")
    dispatcher = Dispatcher(nats, AsyncioClock())
    await dispatcher.start()
    client = NatsEndpointClient(dispatcher, OneInstance(), "Worker", "generate")
    hop, plain = await measure(client.call, requests), await measure(direct, requests)
    await dispatcher.close()
    await close_quietly(nats)
    added = {
        key: {p: round(hop[key][p] - plain[key][p], 4) for p in ("p50_ms", "p99_ms")}
        for key in hop
        if isinstance(hop[key], dict)
    }
    return {"loop": type(asyncio.get_running_loop()).__module__, "direct": plain, "hop": hop, "added": added}


async def worker(url: str, token_file: Path) -> None:
    """Serve until standard input closes."""
    nats = await connect_nats(url, token_file, name="bench-worker")
    server = EndpointServer(nats, subject=SUBJECT, handler=handler)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await close_quietly(nats)


def run(stock_loop: bool, requests: int) -> dict[str, Any]:
    """Start NATS and a worker process, measure, end both."""
    runner = asyncio.run if stock_loop else uvloop.run
    with tempfile.TemporaryDirectory() as folder:
        port = PortLease()
        spec = NatsSpec(find_server("nats-server"), Path(folder) / "nats", port.port, os.urandom(16).hex())
        prepare(spec)
        quiet = subprocess.DEVNULL
        with subprocess.Popen(spec.argv, env=spec.env, stdin=quiet, stdout=quiet, stderr=quiet) as nats:
            try:
                asyncio.run(probe_nats(spec.url, spec.token, 10.0))
                argv = [sys.executable, __file__, "--worker", spec.url, str(spec.token_file)]
                if stock_loop:
                    argv.append("--stock-loop")
                with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
                    assert server.stdin is not None
                    assert server.stdout is not None
                    try:
                        server.stdout.readline()
                        return runner(caller(spec.url, spec.token_file, requests))
                    finally:
                        server.stdin.close()
                        server.wait(10)
            finally:
                nats.terminate()
                port.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--stock-loop", action="store_true", help="asyncio's own event loop instead of uvloop")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--worker", nargs=2, metavar=("URL", "TOKEN_FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        url, token_file = arguments.worker
        (asyncio.run if arguments.stock_loop else uvloop.run)(worker(url, Path(token_file)))
        return
    result = run(arguments.stock_loop, arguments.requests)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"event loop: {result['loop']}")
    for way in ("direct", "hop", "added"):
        for name, value in result[way].items():
            print(f"{way:7} {name:24} {value}")


if __name__ == "__main__":
    main()

"""The cost of one hop: a handler in another process, over NATS and loopback TCP, beside calling it directly.

Both ways run in turn in one run, with the same handler; `added` is the difference of a round. Token latency is
measured between the worker's `yield` and the caller's loop body (CLOCK_MONOTONIC is one clock for all processes of a
host). The long form measures asyncio's own event loop too; the product runs on uvloop.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import Report, percentile
from benchmarks.processes import ROOT, module_command
from dynamo_local.arbiter.servers import NatsSpec, find_server, prepare
from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Instance
from dynamo_local.system.host_leases import PortLease
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.certificates import write
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.probes import probe_nats
from dynamo_local.transport.requests.calls import RequestSender
from dynamo_local.transport.requests.client import NatsEndpointClient
from dynamo_local.transport.requests.handlers import RequestContext
from dynamo_local.transport.requests.server import EndpointServer

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

    stale = False

    def instances(self) -> tuple[Instance, ...]:
        return (Instance("bench", "Worker", "generate", 1, SUBJECT),)

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return self.instances()

    async def changed(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to end."""


Call = Callable[[dict[str, Any]], Awaitable[AsyncIterator[Any]]]


Round = dict[str, float]
"""Figure -> value."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much one round does."""

    rounds: int
    requests: int
    items: int
    seconds: float


SHORT = Sizes(rounds=2, requests=300, items=20_000, seconds=0.5)
LONG = Sizes(rounds=5, requests=2000, items=200_000, seconds=3.0)


def run(short: bool) -> Report:
    """One hop and the direct call."""
    report = Report("data_plane")
    sizes = SHORT if short else LONG
    _report(report, "", _measure(sizes, stock_loop=False))
    if not short:
        _report(report, "asyncio's loop, ", _measure(sizes, stock_loop=True))
    return report


def _report(report: Report, prefix: str, rounds: list[tuple[Round, Round]]) -> None:
    for name in rounds[0][0]:
        unit = "ms" if " p" in name else "cores" if "CPU" in name else "1/s"
        if unit == "ms":
            report.add(f"{prefix}{name}: added", unit, (hop[name] - direct[name] for hop, direct in rounds))
        report.add(f"{prefix}{name}: hop", unit, (hop[name] for hop, _ in rounds))
        report.add(f"{prefix}{name}: direct", unit, (direct[name] for _, direct in rounds))


def latencies(what: str, values_s: list[float]) -> Round:
    """p50 and p99 in milliseconds."""
    return {f"{what} p{share * 100:.0f}": percentile(values_s, share) * 1e3 for share in (0.5, 0.99)}


async def request_latency(call: Call, requests: int) -> Round:
    """One request after the other, one item each."""
    took = []
    for _ in range(requests):
        start = time.perf_counter()
        async for _ in await call({"count": 1}):
            pass
        took.append(time.perf_counter() - start)
    return latencies("request", took)


async def requests_per_s(call: Call, requests: int, concurrency: int = 64) -> float:
    """`concurrency` callers, one item each."""

    async def caller() -> None:
        for _ in range(requests // concurrency):
            async for _ in await call({"count": 1}):
                pass

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return requests // concurrency * concurrency / (time.perf_counter() - start)


async def items_per_s(call: Call, items: int) -> float:
    """One stream, as fast as it goes."""
    start = time.perf_counter()
    async for _ in await call({"count": items}):
        pass
    return items / (time.perf_counter() - start)


async def token_latency(call: Call, streams: int, tokens: int, interval_s: float) -> Round:
    """Streams side by side at a decode worker's pace: from the worker's `yield` to the caller's loop body."""
    took: list[float] = []

    async def caller() -> None:
        async for made in await call({"count": tokens, "interval_s": interval_s}):
            took.append(time.monotonic() - made)

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(streams)))
    wall = time.perf_counter() - start
    what = f"token of {streams} stream{'s' if streams > 1 else ''}"
    return {
        **latencies(what, took),
        f"{what}: tokens/s": len(took) / wall,
        f"{what}: CPU of the caller": (time.process_time() - cpu) / wall,
    }


async def one_round(call: Call, sizes: Sizes) -> Round:
    """All figures of one way to call."""
    return {
        **await request_latency(call, sizes.requests),
        "requests/s, 64 callers": await requests_per_s(call, sizes.requests),
        "items/s, one stream": await items_per_s(call, sizes.items),
        **await token_latency(call, 1, int(sizes.seconds / 0.005), 0.005),
        **await token_latency(call, STREAMS, int(sizes.seconds * TOKENS_PER_S_EACH), 1 / TOKENS_PER_S_EACH),
    }


async def caller(env: Mapping[str, str], sizes: Sizes) -> list[tuple[Round, Round]]:
    """(hop, direct) of each round. The first requests warm the connection up."""

    async def direct(payload: dict[str, Any]) -> AsyncIterator[Any]:
        return handler(payload, RequestContext("direct"))

    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env), name="bench-caller")
    dispatcher = RequestSender(nats, AsyncioClock())
    await dispatcher.start()
    client = NatsEndpointClient(dispatcher, OneInstance(), "Worker", "generate")
    await request_latency(client.call, 200)
    rounds = [(await one_round(client.call, sizes), await one_round(direct, sizes)) for _ in range(sizes.rounds)]
    await dispatcher.close()
    await close_quietly(nats)
    return rounds


async def worker(env: Mapping[str, str]) -> None:
    """Serve until standard input closes."""
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env), name="bench-worker")
    server = EndpointServer(nats, subject=SUBJECT, handler=handler)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await close_quietly(nats)


def _measure(sizes: Sizes, *, stock_loop: bool) -> list[tuple[Round, Round]]:
    """Start NATS and a worker process, measure, end both."""
    with (
        tempfile.TemporaryDirectory(prefix="dyn-bench-") as folder,
        _nats(Path(folder)) as spec,
        subprocess.Popen(
            module_command("benchmarks.data_plane", *(["--stock-loop"] if stock_loop else [])),
            cwd=ROOT,
            env={**os.environ, **spec.client_env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                raise RuntimeError("the worker's process ended before it was ready; its words are on stderr")
            rounds: list[tuple[Round, Round]] = _runner(stock_loop)(caller(spec.client_env, sizes))
            return rounds
        finally:
            server.stdin.close()
            server.wait(10)


@contextmanager
def _nats(folder: Path) -> Iterator[NatsSpec]:
    """A NATS server of our own."""
    port = PortLease()
    spec = NatsSpec(
        find_server("nats-server"), folder / "nats", port.port, os.urandom(16).hex(), write(folder / "certificates")
    )
    prepare(spec)
    quiet = subprocess.DEVNULL
    with subprocess.Popen(spec.argv, env=spec.env, stdin=quiet, stdout=quiet, stderr=quiet) as nats:
        try:
            asyncio.run(probe_nats(spec.url, NatsAccess.of(spec.client_env), 10.0))
            yield spec
        finally:
            nats.terminate()
            port.close()


def _runner(stock_loop: bool) -> Callable[..., Any]:
    return asyncio.run if stock_loop else uvloop.run


if __name__ == "__main__":
    _runner("--stock-loop" in sys.argv)(worker(os.environ))

"""How a burst of requests is spread over the workers, with the shipped `least-loaded`."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.drivers.served import AGG, Served, asking, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(300)]

PATIENCE_S = 120.0
SLOW = "--Common.sim.speed=0.02"
"""No stream ends before all of them have begun, and few tokens are on the way meanwhile."""


@pytest.mark.full
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.full)])
async def test_streams_go_half_and_half_to_two_workers(count: int) -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2", SLOW, target=AGG).started() as served:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=unlimited, timeout=PATIENCE_S) as client:
            streams = [asyncio.create_task(_stream(client, n)) for n in range(count)]
            try:
                await auntil(lambda: sum(_requests(served)) >= count, PATIENCE_S, what=lambda: _requests(served))
                assert _requests(served) == [count // 2, count // 2]
                assert [stream for stream in streams if stream.done()] == []
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)


async def _stream(client: httpx.AsyncClient, number: int) -> None:
    body = {**asking(f"Stream {number}", 4000), "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_raw():
            continue


def _requests(served: Served) -> list[int]:
    """How many requests each worker has by its own count, running and waiting."""
    loads = [row["load"] for row in served.status()["workers"] if row["component"] == "VllmWorker"]
    return [load["request_active_slots"] + load["num_requests_waiting"] for load in loads if load]

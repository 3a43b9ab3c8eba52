"""The load planner scales plain HTTP servers by what their own metrics say."""

from __future__ import annotations

import asyncio

import pytest

from tests.drivers.http_graphs import ask, cut, http_graph, section
from tests.drivers.scaled import names
from tests.drivers.served import auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(150)]

PLANNER = {"adjustment-interval": 2, "metric-pulling-interval": 0.5, "max-gpu-budget": 2}
STREAMS = 20
"""The server has room for so many: its KV is full."""


@pytest.mark.full
async def test_a_full_cache_brings_another_server_and_an_idle_one_goes() -> None:
    server = section("aggregated", 1)
    server["ServiceArgs"] = {"workers": 1, "resources": {"gpu": 1}}
    with http_graph(Planner=PLANNER, Server=server) as served:
        served.start()
        async with served.client() as client:
            streams = [asyncio.create_task(ask(client, 20_000, stream=True)) for _ in range(STREAMS)]
            await auntil(lambda: names(served, "Server") == ["Server", "Server_1"], 40.0, what=served.states)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        await auntil(lambda: names(served, "Server") == ["Server"], 40.0, what=served.states)
        await auntil(lambda: "Server_1" not in served.states(), 20.0, what=served.states)
        explained = await asyncio.to_thread(served.cli, "planner", "explain", "20")
        assert "Server" in explained.stdout, explained.stderr
        assert list(cut(served)) == []

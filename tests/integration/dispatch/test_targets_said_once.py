"""`dynamo serve --ttft --itl` on real processes: all services keep the targets, and the share of requests is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from tests.drivers.served import MODEL, Served, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(120)]

REQUESTS = 12
"""A late first token: these come at once, and a worker at a twentieth of an H200's speed takes one after another."""


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    with Served("--ttft=400", "--itl=2000", "--Common.sim.speed=0.05") as served:
        yield served.start()


async def ask(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        asked = [
            client.completions.create(model=MODEL, prompt=[100 + (n + i) % 700 for i in range(2000)], max_tokens=2)
            for n in range(REQUESTS)
        ]
        await asyncio.gather(*asked)


@pytest.mark.full
def test_the_share_that_kept_the_targets_is_told_with_why_others_missed(graph: Served) -> None:
    asyncio.run(ask(graph))
    until(lambda: (graph.status()["targets"] or {}).get("total", {}).get("requests") == REQUESTS, 10)
    targets = graph.status()["targets"]
    assert (targets["ttft_ms"], targets["itl_ms"]) == (400, 2000)
    total = targets["total"]
    assert total["kept"] < REQUESTS
    assert sum(total["missed"].values()) == REQUESTS - total["kept"]
    assert total["missed"].get("waited", 0) > 0
    assert "unknown" not in total["missed"]

"""The log of ticks that a real arbiter writes decides once more what was decided; and what such an arbiter imports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.planned import planner
from tests.drivers.served import Served, auntil, stream_chat

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

POLICIES = {
    "load": ("--Planner.policy=load", "--Planner.adjustment-interval=2"),
    "sla": (
        "--Planner.policy=sla",
        "--Planner.profile-results-dir=dynamo_H200_TP1P_TP1D",
        "--Planner.throughput-adjustment-interval=2",
    ),
    "throughput-load": (
        "--Planner.policy=throughput-load",
        "--Planner.optimization-target=sla",
        "--Planner.enable-load-scaling=true",
        "--Planner.profile-results-dir=dynamo_H200_TP1P_TP1D",
        "--Planner.throughput-adjustment-interval=4",
        "--Planner.load-adjustment-interval=2",
    ),
}
LIBRARIES = ("statsforecast", "prophet", "scipy", "sklearn", "pandas", "statsmodels", "numba")
"""With code of their own in each, which shows in the process's memory. (grpc is the etcd client's, so always there.)"""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full
async def test_a_log_of_a_real_arbiter_decides_the_same(policy: str) -> None:
    words = ("--planner", "--Planner.metric-pulling-interval=0.5", *POLICIES[policy])
    with Served(*words) as served:
        served.start()
        async with served.client() as client:
            await asyncio.gather(*(stream_chat(client, f"Tell me of {n}.", 40) for n in range(8)))
        planner(served, "set", options={"max-gpu-budget": 6})
        await auntil(lambda: planner(served, "status")["decisions"] >= 4, 60.0)
        if policy == "load":
            assert mapped(served.status()["arbiter_pid"]) == set()
        served.down()
        told: dict[str, Any] = json.loads(served.cli("planner", "replay", "--json").stdout)
    assert told["decisions"] >= 4
    assert (told["differ"], told["whole"], told["policies"]) == (0, True, [policy]), told


def mapped(pid: int) -> set[str]:
    """Those of the `LIBRARIES` whose code the process has loaded."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in LIBRARIES if f"site-packages/{name}/" in maps}

"""Models that start from what Dynamo's workers measured of themselves, asked by its own client on its request plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drivers.served import Served, auntil
from tests.dynamo1x.dynamo_graphs import WAIT_S, graph, listed

pytestmark = [pytest.mark.timeout(500)]

SIDE = Path(__file__).with_name("benchmark_side.py")
PREFILLS = tuple(f"{n}:{0.01 + n * 1e-5:g}" for n in range(512, 8192, 512))
# One line for both, as an aggregated engine's model has to be.
DECODES = tuple(f"{n}:{n * 1000}:{0.01 + n * 1e-4:g}" for n in range(1, 33, 4))
PLANNED = (
    "--planner",
    "--Planner.policy=throughput-load",
    "--Planner.optimization-target=sla",
    "--Planner.enable-load-scaling=true",
    "--Planner.load-adjustment-interval=2",
)


def source(served: Served) -> Any:
    """Where the mockers' model comes from, as `dynamo planner status` has it."""
    return served.status()["planner"].get("models", {}).get("Mocker")


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "told"),
    [(",".join(PREFILLS + DECODES), "worker"), ("''", "none yet (its get_perf_metrics says: no benchmark data)")],
    ids=["measured", "not measured"],
)
async def test_a_worker_that_measured_itself_is_asked_over_dynamos_request_plane(rows: str, told: str) -> None:
    command = f"--Mocker.command=python {SIDE} {{model}} tiny backend {rows}"
    with graph("agg", *PLANNED, command).started() as served:
        await listed(served)
        await auntil(lambda: source(served) == told, WAIT_S, what=lambda: source(served))


@pytest.mark.full
async def test_mockers_measure_nothing_and_that_is_said() -> None:
    with graph("agg", *PLANNED).started() as served:
        await listed(served)
        told = "none yet (it has no endpoint get_perf_metrics)"
        await auntil(lambda: source(served) == told, WAIT_S, what=lambda: source(served))

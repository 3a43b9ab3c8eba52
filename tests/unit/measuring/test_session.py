"""The order in which workers are measured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo_local.measuring.graph import MeasuredGraph, Worker
from dynamo_local.measuring.profile import Session
from dynamo_local.profile.points import Kind, Limits, Point
from dynamo_local.profile.repetitions import Progress, Rules

WORKERS = [Worker(f"profile_VllmWorker_{number}", "VllmWorker", number, ()) for number in range(2)]


class Graph:
    """Answers after a turn of the loop, and counts who is measured at once."""

    def __init__(self) -> None:
        self.at_once = 0
        self.most = 0

    async def measure(self, worker: Worker, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """See `MeasuredGraph`."""
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        count = request["prompts"]
        return {"passes": [(0.01, 0, 0, request["tokens"], 0)] * count, "ttft_s": [0.01] * count, "itl_s": None}


@pytest.mark.parametrize(("in_turn", "most"), [(False, 2), (True, 1)])
async def test_engines_that_share_processors_are_measured_one_after_the_other(
    in_turn: bool, most: int, tmp_path: Path
) -> None:
    """Side by side each would be timed with the other as its neighbour; engines with GPUs of their own do not mind."""
    graph, point = Graph(), Point(Kind.PREFILL, 100)
    limits = {Kind.PREFILL: Limits(9600, 4096, 16)}
    session = Session(
        cast(MeasuredGraph, graph),
        {Kind.PREFILL: WORKERS},
        limits,
        tmp_path,
        "hash",
        lambda *_: None,
        in_turn=in_turn,
    )
    progress = await session.run(Progress((point,), Rules(budget_s=60.0)))
    samples = progress.of(point).samples
    assert {sample.worker for sample in samples} == {worker.name for worker in WORKERS}
    assert {sample.value_ms for sample in samples} == {10.0}
    assert graph.most == most

"""The load planner where one kind of worker does both: decode's rules, and no prefill pool."""

from __future__ import annotations

import pytest

from tests.drivers.planned import DECODE, PREFILL, audited, capacity, open_loop, steady
from tests.drivers.served import AGG, Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

BUDGET = 3
WORDS = (
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=30",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    f"--Planner.max-gpu-budget={BUDGET}",
    "--Planner.decode-kv-scale-up-threshold=0.5",
    "--Planner.decode-kv-scale-down-threshold=0.2",
)


@pytest.mark.full
async def test_an_aggregated_graph_grows_and_shrinks_with_its_load() -> None:
    load = steady(rate=2, seconds=12, prompt_words=8, tokens=100)
    with Served(*WORDS, target=AGG) as served:
        served.start()
        async with audited(served) as audit:
            answers = await open_loop(served, load)
            await auntil(lambda: capacity(served)[DECODE] == 1 and len(served.pids()) == 2, 60.0, what=served.states)
        assert answers.wrong == []
        assert answers.right == len(load)
        assert audit.most[DECODE] >= 2
        assert audit.most[PREFILL] == 0
        assert audit.held_max <= BUDGET
        assert {component for _, component, _ in audit.steps()} == {DECODE}

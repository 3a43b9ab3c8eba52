"""Policies with targets on real processes: to as many workers as the load needs, back again, and no request lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.planner.records.decision_log import describe as in_words
from tests.drivers.planned import DECODE, POLICY_WORDS, PREFILL, audited, capacity, decided, open_loop, planner, steady
from tests.drivers.served import Served, auntil
from tests.fakes.profile_folders import slow_engine

pytestmark = [pytest.mark.infra, pytest.mark.timeout(300)]

BUDGET = 6
BASE = {PREFILL: 1, DECODE: 1}
ITL_MS, TTFT_MS = 60.0, 1500.0


@pytest.mark.parametrize("policy", ["sla", pytest.param("throughput-load", marks=pytest.mark.full)])
@pytest.mark.full
async def test_it_follows_the_load_in_whole_decisions_and_loses_no_request(policy: str, tmp_path: Path) -> None:
    profile = slow_engine(tmp_path / "profile")
    words = (
        "--VllmWorker.conditional-disagg=false",
        f"--Common.sim.profile={profile}",
        *POLICY_WORDS[policy],
        f"--Planner.profile-results-dir={profile}",
        "--Planner.throughput-adjustment-interval-seconds=4",
        "--Planner.metric-pulling-interval=0.5",
        f"--Planner.ttft={TTFT_MS}",
        f"--Planner.itl={ITL_MS}",
        "--Planner.load-predictor=constant",
        f"--Planner.max-gpu-budget={BUDGET}",
    )
    with Served(*words).started() as served:
        async with audited(served) as audit:
            for rate, seconds in ((0.5, 4.0), (2.0, 16.0), (0.5, 16.0)):
                load = steady(rate=rate, seconds=seconds, prompt_words=150, tokens=150 if rate > 1 else 20)
                answers = await open_loop(served, load)
                assert answers.wrong == []
                assert answers.right == len(load)
            back = lambda: capacity(served) == BASE and len(served.pids()) == 3  # noqa: E731
            await auntil(back, 60.0, what=lambda: "\n".join(map(in_words, decided(served)[-4:])))
        assert audit.most[DECODE] >= 2, decided(served)[-5:]
        assert audit.held_max <= BUDGET
        status = planner(served, "status")
        assert (status["options"]["policy"], status["failed_ticks"]) == (policy, 0)
        assert {record["inputs"]["policy"] for record in decided(served)} == {policy}
        assert any(record["inputs"]["traffic"] for record in decided(served))
        assert served.cli("planner", "explain", "3").returncode == 0

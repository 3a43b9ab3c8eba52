"""Actions in random order from a seed, spares among them: none costs a request."""

from __future__ import annotations

import pytest

from tests.drivers.mixed_actions import WORDS, run
from tests.drivers.served import DISAGG, Served

pytestmark = pytest.mark.infra


async def check(seed: int, actions: int, requests: int) -> None:
    with Served(*WORDS, target=DISAGG) as served:
        served.start()
        mixed, load = await run(served, seed=seed, actions=actions, requests=requests)
        assert load.failures == [], f"seed {seed}: {mixed.story}"
        assert load.right >= requests
        assert mixed.done.total() + mixed.refused.total() == actions
        assert {"flip", "sleep", "wake"} <= mixed.done.keys() or actions < 200, mixed.done
        rungs = {lead["rung"] for lead in served.status()["lead_times"] if lead["run"]}
        expected = {"spare", "cold", "flip_to_decode", "flip_to_prefill", "wake_1", "sleep_1"}
        assert (expected if actions >= 200 else {"spare", "cold"}) <= rungs, rungs


@pytest.mark.full
async def test_a_score_of_mixed_actions_drops_no_request() -> None:
    await check(seed=1, actions=20, requests=200)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_two_hundred_mixed_actions_under_two_thousand_requests_drop_none() -> None:
    await check(seed=14, actions=200, requests=2000)

"""A planner decides while a person gives other commands all the time: neither costs a request."""

from __future__ import annotations

import pytest

from tests.drivers.mixed_actions import PLANNED, WORDS, run
from tests.drivers.scaled import events
from tests.drivers.served import Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(900)]


async def test_commands_and_decisions_at_once_drop_no_request() -> None:
    with Served(*WORDS, *PLANNED).started() as served:
        mixed, load = await run(served, seed=5, actions=60, requests=600)
        decided = [each for each in events(served) if str(each["stimulus_id"]).startswith("planner")]
    assert load.failures == [], mixed.story
    assert load.right >= 600
    assert decided, "the planner did nothing beside the person"

"""The actuators that may carry out a planner's decisions."""

from __future__ import annotations

import pytest

from dynamo_local.arbiter.planner_options import actuators
from dynamo_local.config.planner_section import planner_section
from dynamo_local.core.types import Actuator
from dynamo_local.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {Actuator.WAKE}),
        ({"actuators": ["start"]}, set()),
        ({"actuators": "start,flip"}, {Actuator.FLIP}),
        ({"actuators": ["start", "wake", "flip"]}, {Actuator.WAKE, Actuator.FLIP}),
    ],
)
def test_flips_are_asked_for_and_wakes_are_not(given: dict[str, object], expected: set[Actuator]) -> None:
    assert actuators(planner_section("Planner", {"policy": "load"} | given)) == expected


def test_another_word_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="teleport"):
        planner_section("Planner", {"actuators": ["teleport"]})

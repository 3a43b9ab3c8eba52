"""How long a worker may take to be ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.arbiter.deployment import Settings, WatcherFactory
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.system.paths import Paths


@pytest.mark.parametrize(
    ("of_frontend", "of_decode", "expected"),
    [(None, None, 300.0), (None, 900.0, 900.0), (None, 60.0, 300.0), (60.0, 900.0, 60.0)],
)
def test_a_frontend_may_take_as_long_as_the_model_that_it_waits_for(
    of_frontend: float | None, of_decode: float | None, expected: float
) -> None:
    """A graph whose decode workers were given 15 minutes would else fail after 5, for want of a model; also in what the
    worker itself is told, and in the template by which the machine judges."""
    services = (
        ServiceSpec("Frontend", Role.FRONTEND, start_deadline_s=of_frontend),
        ServiceSpec("Decode", Role.DECODE, start_deadline_s=of_decode),
    )
    root = Path("/x")
    factory = WatcherFactory(
        GraphSpec("dynamo", "x.yaml", services), Settings(), Paths("dynamo", root, root, root), "run", root, "{}", {}
    )
    plan = factory.plan(services[0], "dynamo_Frontend", ())
    (template,) = (each for each in factory.templates() if each.component == "Frontend")
    told = float(plan.env["DYN_START_DEADLINE_S"])
    assert (plan.start_deadline_s, template.start_deadline_s, told) == (expected, expected, expected)

"""A deployment on its way from `dynamo apply` to the arbiter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.arbiter.deployment_spec import DeploymentSpec
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.errors import BadInput, ConfigError

WORKER = ServiceSpec(
    "VllmWorker", Role.DECODE, 2, Resources(1), {"A": "b"}, {"sim": {"speed": 1.5}}, ("Other",), ("generate",), 3.0
)
WISH = DeploymentSpec(
    graph=GraphSpec("dynamo", "graphs.agg:Frontend", (WORKER,)),
    host={"health_bound_s": 5.0, "restart": {"first_s": 0.5}},
    sections={"VllmWorker": {"api_key": "s3cret"}},
    planner={"max_gpu_budget": 4},
    planner_starts=True,
    file="/srv/a.yaml",
    overrides=("--A.b=c",),
)


def test_it_arrives_as_it_was_sent() -> None:
    assert DeploymentSpec.from_json(json.loads(json.dumps(WISH.as_json()))) == WISH


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "Expected `object`"),
        ("graph", "Expected `object`"),
        ({}, "missing required field `graph`"),
        ({**WISH.as_json(), "graph": {"namespace": 3}}, r"\$.graph"),
        ({**WISH.as_json(), "sections": []}, r"\$.sections"),
    ],
)
def test_what_is_no_deployment_is_refused(given: Any, told: str) -> None:
    """By `dynamo ctl`, or by another program."""
    with pytest.raises(BadInput, match=f"this is no deployment: .*{told}.*dynamo apply -f FILE"):
        DeploymentSpec.from_json(given)


def test_secrets_are_for_workers_and_not_for_the_statefile() -> None:
    assert json.loads(WISH.sections_json) == {"VllmWorker": {"api_key": "s3cret"}}
    assert json.loads(WISH.masked_json) == {"VllmWorker": {"api_key": "****"}}


def test_its_host_and_planner_sections_are_checked() -> None:
    assert (WISH.policy.first_s, WISH.host_config.health_bound_s) == (0.5, 5.0)
    assert WISH.described.planner["max_gpu_budget"] == 4
    wrong = DeploymentSpec(WISH.graph, {"restart": {"first_s": -1}}, {}, {"max_gpu_budget": 0}, False)
    with pytest.raises(ConfigError, match="first_s"):
        _ = wrong.policy
    with pytest.raises(ConfigError, match="max_gpu_budget"):
        _ = wrong.described

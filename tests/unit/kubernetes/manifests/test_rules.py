"""The rules of Dynamo's webhook and planner for a graph."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.kubernetes.manifests import COMPONENTS_MAX, NAMES_MAX, Component, faults
from tests.unit.kubernetes.manifests.carried import VLLM, component

PREFILL = component("P", "prefill", command=VLLM, args=["--disaggregation-mode", "prefill"])
PLANNER = component("Planner", "planner", command=["python3"])


def found(*components: dict[str, Any], name: str = "g") -> tuple[str, ...]:
    return faults(name, [Component.model_validate(one) for one in components])


def test_a_graph_that_keeps_all_rules_has_no_fault() -> None:
    adapted = {**PREFILL, "scalingAdapter": {}}
    assert found(PREFILL, component("F", "frontend"), name="g" * (NAMES_MAX - 1)) == ()
    assert found(adapted, PLANNER) == ()


@pytest.mark.parametrize(
    ("components", "name", "why"),
    [
        ([], "g", "at least one component"),
        ([component(f"C{n}") for n in range(COMPONENTS_MAX + 1)], "g", f"at most {COMPONENTS_MAX} components"),
        ([component("A"), component("a")], "g", "two components are named 'a'"),
        ([PREFILL], "1g", "must begin with a small letter"),
        ([PREFILL], "g" * NAMES_MAX, "at most 45 may"),  # PR #12047
        ([component("P", "prefill", command=VLLM)], "g", "no --disaggregation-mode prefill"),  # #13238
        ([PREFILL, PLANNER], "g", "no scaling adapter"),  # #6491
    ],
    ids=["none", "many", "twice", "name", "long", "mode", "adapter"],
)
def test_each_rule_is_told(components: list[dict[str, Any]], name: str, why: str) -> None:
    (fault,) = found(*components, name=name)
    assert why in fault


def test_a_leaders_name_counts_twice() -> None:
    for length, fault in ((20, False), (21, True)):
        assert found(component("W" * length)) == ()
        assert bool(found({**component("W" * length), "multinode": {"nodeCount": 2}})) is fault

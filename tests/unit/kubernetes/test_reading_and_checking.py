"""Roles, models and GPUs, as documents say them; and what is wrong with a graph."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import yaml

from dynamo_local.core.types import Role
from dynamo_local.kubernetes.api import read_observed
from dynamo_local.kubernetes.graph import Adapter, FaultCode, ObservedGraph, Refusal, Requirements, change, faults
from tests.fakes.kubernetes.graphs import DECODE, PREFILL, alpha, beta, component, main
from tests.tools.dynamos_files import dynamos_file

EXPECTED = Requirements(max_gpus=8, floors={})


def with_components(*components: dict[str, Any]) -> dict[str, Any]:
    graph = beta()
    graph["spec"]["components"] = list(components)
    return graph


def codes(graph: dict[str, Any], expected: Requirements = EXPECTED) -> set[FaultCode]:
    return {fault.code for fault in faults(read_observed(graph), expected)}


@pytest.mark.parametrize("name", ["disagg_planner.yaml", "disagg_v1alpha1.yaml"])
def test_dynamos_own_examples_can_be_planned(name: str) -> None:
    documents = yaml.safe_load_all(dynamos_file(name).read_text())
    (graph,) = [raw for raw in documents if raw["kind"] == "DynamoGraphDeployment"]
    seen = read_observed(graph)
    assert faults(seen, EXPECTED) == ()
    assert seen.prefill is not None
    assert (seen.prefill.name, seen.decode.name) == (PREFILL, DECODE)
    assert (seen.prefill.gpus, seen.decode.gpus, seen.decode.model) == (1, 1, "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("components", "roles"),
    [
        ([component("A", "prefill"), component("B", "decode")], {"A": Role.PREFILL, "B": Role.DECODE}),
        (
            [component("A", "worker", main=main("prefill")), component("B", "worker", main=main("decode"))],
            {"A": Role.PREFILL, "B": Role.DECODE},
        ),
        (
            [component("A", "worker", main=main("prefill")), component("B", "worker", main=main())],
            {"A": Role.PREFILL, "B": Role.DECODE},
        ),
        (
            [component("MyPrefill", "worker", main=main()), component("Rest", "worker", main=main())],
            {"MyPrefill": Role.PREFILL, "Rest": Role.DECODE},
        ),
        ([component("Worker", "worker", main=main())], {"Worker": Role.AGGREGATED}),
        ([component("Decode", "decode")], {"Decode": Role.DECODE}),
    ],
)
def test_roles_by_type_then_command_then_name(components: list[dict[str, Any]], roles: dict[str, Role]) -> None:
    seen = read_observed(with_components(component("Frontend", "frontend"), *components))
    assert {one.name: one.role for one in seen.planned} == roles


def test_gpus_by_claims_are_counted_by_the_operator_or_said_by_an_option() -> None:
    """lesson: ai-dynamo #13465: devices by resource claims (DRA) were an error at every tick."""
    graph = beta()
    for one in graph["spec"]["components"][1:]:
        pod = one["podTemplate"]["spec"]
        pod["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
        pod["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "two"}]
    assert codes(graph) == {FaultCode.GPUS_UNKNOWN}
    (first, *_) = faults(read_observed(graph), EXPECTED)
    assert "resource claims" in first.text
    assert "prefill_engine_num_gpu" in first.text
    said = Requirements(max_gpus=8, floors={}, gpus={Role.PREFILL: 2, Role.DECODE: 2})
    assert codes(graph, said) == set()
    told = {"componentKind": "Deployment", "replicas": 1, "updatedReplicas": 1, "gpusPerReplica": 2}
    graph["status"] = {"state": "successful", "components": {PREFILL: told, DECODE: told}}
    assert codes(graph) == set()
    assert {one.gpus for one in read_observed(graph).planned} == {2}


def test_gpus_are_counted_over_containers_and_nodes_and_in_both_versions() -> None:
    graph = beta()
    decode = graph["spec"]["components"][1]
    decode["multinode"] = {"nodeCount": 2}
    decode["podTemplate"]["spec"]["containers"].append(
        {"name": "side", "resources": {"requests": {"nvidia.com/gpu": 1}}}
    )
    assert read_observed(graph).decode.gpus == 4
    old = alpha()
    old["spec"]["services"][DECODE] |= {"resources": {"requests": {"gpu": "4"}}, "multinode": {"nodeCount": 2}}
    assert read_observed(old).decode.gpus == 8


def test_a_prefill_worker_that_would_register_as_a_decode_one_is_refused() -> None:
    """lesson: ai-dynamo #13238: nobody finds it, and the planner waits for ever."""
    graph = beta()
    graph["spec"]["components"][2]["podTemplate"]["spec"]["containers"][0] = main()
    assert codes(graph) == {FaultCode.NOT_FOUND_AS_PREFILL}


def test_a_role_that_is_missing_or_there_twice_is_refused() -> None:
    lone = with_components(component("Frontend", "frontend"), component("P", "prefill"))
    assert FaultCode.ROLE_MISSING in codes(lone)
    assert FaultCode.ROLE_MISSING in codes(with_components(component("D", "decode")), Requirements(8, {}, prefill=True))
    twice = with_components(component("P", "prefill"), component("D", "decode"), component("E", "decode"))
    assert codes(twice) == {FaultCode.ROLE_TWICE}


def test_models_budget_and_options_must_agree() -> None:
    assert codes(beta(), Requirements(8, {}, model="another/model")) == {FaultCode.MODELS_DIFFER}
    assert codes(beta(), Requirements(1, {})) == {FaultCode.BUDGET}
    assert codes(beta(), Requirements(4, {Role.DECODE: 4})) == {FaultCode.BUDGET}
    assert codes(beta(), Requirements(8, {}, gpus={Role.DECODE: 2})) == {FaultCode.GPUS_DIFFER}


@pytest.mark.parametrize("adapters", [(), (PREFILL,), (DECODE,), (PREFILL, DECODE)])
def test_whatever_is_decided_the_budget_is_kept_in_between(adapters: tuple[str, ...]) -> None:
    """lesson: ai-dynamo #12428. Every change of a graph on a budget of eight, by any mix of adapters: after no write
    is more asked for than before, or than eight."""
    for prefill, decode in itertools.product(range(6), repeat=2):
        seen = ready_graph(prefill, decode, adapters)
        for then in itertools.product(range(10), repeat=2):
            targets = dict(zip((PREFILL, DECODE), then, strict=True))
            writes = change(seen, targets, {}, {PREFILL: 1, DECODE: 1}, 8)
            if isinstance(writes, Refusal):
                assert sum(then) > max(8, prefill + decode)
                continue
            now = {PREFILL: prefill, DECODE: decode}
            for write in writes:
                now |= write.targets
                assert sum(now.values()) <= max(8, prefill + decode)
            assert now == targets


def ready_graph(prefill: int, decode: int, adapters: tuple[str, ...]) -> ObservedGraph:
    """With adapters for these components."""
    graph = beta(prefill, decode)
    for one in graph["spec"]["components"]:
        if one["name"] in adapters:
            one["scalingAdapter"] = {}
    graph["metadata"] |= {"resourceVersion": "1", "generation": 1}
    graph["status"] = {"state": "successful", "observedGeneration": 1}
    numbers = {PREFILL: prefill, DECODE: decode}
    return replace(read_observed(graph), adapters={name: Adapter(name, numbers[name], "1") for name in adapters})

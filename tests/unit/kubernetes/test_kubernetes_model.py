"""Dynamo's documents, read and written back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from dynamo_local.kubernetes.manifests import (
    ComponentType,
    GraphV1Alpha1,
    GraphV1Beta1,
    WrongKind,
    adapter_name,
    document,
    read_graph,
)
from tests.tools.dynamos_files import dynamos_file

BETA: dict[str, Any] = {
    "apiVersion": "nvidia.com/v1beta1",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "g"},
    "spec": {
        "components": [
            {"name": "Prefill", "type": "prefill", "replicas": 1, "somethingNew": {"a": [1]}},
            {"name": "Decode", "type": "decode", "scalingAdapter": {}},
        ]
    },
}


def test_a_document_comes_back_as_it_was() -> None:
    assert document(read_graph(BETA)) == BETA


@pytest.mark.parametrize("name", ["disagg_planner.yaml", "disagg_v1alpha1.yaml"])
def test_dynamos_own_examples_come_back_as_they_were(name: str) -> None:
    """Both versions, on Dynamo's files."""
    documents = yaml.safe_load_all(dynamos_file(name).read_text())
    graphs = [raw for raw in documents if raw["kind"] == "DynamoGraphDeployment"]
    assert graphs
    for raw in graphs:
        graph = read_graph(raw)
        assert document(graph) == raw
        if isinstance(graph, GraphV1Beta1):
            decode = next(one for one in graph.spec.components if one.type is ComponentType.DECODE)
            assert decode.main is not None
            assert "--model" in (decode.main.args or ())
        else:
            assert isinstance(graph, GraphV1Alpha1)
            main = graph.spec.services["VllmPrefillWorker"].main
            assert main is not None
            assert "prefill" in (main.args or ())


def test_names_that_differ_by_case_only_are_refused() -> None:
    twice = {**BETA, "spec": {"components": [{"name": "Decode"}, {"name": "decode"}]}}
    with pytest.raises(ValidationError, match="Decode, decode"):
        read_graph(twice)


@pytest.mark.parametrize("raw", [{}, {**BETA, "kind": "Deployment"}, {**BETA, "apiVersion": "nvidia.com/v2"}])
def test_what_is_no_graph_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(WrongKind):
        read_graph(raw)


def test_an_adapters_name_is_in_lower_case() -> None:
    assert adapter_name("vllm-disagg", "VllmDecodeWorker") == "vllm-disagg-vllmdecodeworker"

"""There and back again: the same components, and Dynamo's own examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from dynamo_local.components.commands.graph import with_commands
from dynamo_local.components.commands.launch import words_of
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.kubernetes.import_graph import import_graph, read_documents
from dynamo_local.kubernetes.manifests import (
    COMPONENTS_MAX,
    NAMES_MAX,
    Component,
    ComponentType,
    GraphV1Alpha1,
    GraphV1Beta1,
    NotCarried,
    WrongKind,
    adapter_name,
    as_v1alpha1,
    document,
    faults,
    read_graph,
    without_env,
)
from tests.tools.clean_imports import clean_imports
from tests.tools.crd_schemas import schema_faults
from tests.tools.dynamos_files import dynamos_file, dynamos_manifests
from tests.unit.kubernetes.manifests.carried import (
    EXAMPLES,
    PLANNED,
    VLLM,
    WISH,
    component,
    components,
    exported,
    imported,
)

FILES = [
    ("dynamo_1x/agg.yaml", None),
    ("dynamo_1x/disagg.yaml", None),
    ("dynamo_1x/vllm_disagg.yaml", None),
    ("vllm_serve/disagg.yaml", None),
    ("llm/configs/llama-3.1-8b-disagg.yaml", "graphs.disagg:Frontend"),
]


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


def served(text: str) -> dict[str, tuple[Any, ...]]:
    """What `dynamo serve` would run: role, workers, GPUs, program, model and variables of each component."""
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text})
    loaded = with_commands(None, config, None)
    found = {}
    for one in resolve(loaded, config, namespace=None).services:
        words, _ = without_env(words_of(one.config["command"]))
        program = ("python3" if words[0] == "python" else words[0], *words[1:])
        found[one.name] = (one.role, one.workers, one.resources, program, one.config.get("model"), dict(one.envs))
    return found


def written(sections: Any) -> str:
    return yaml.safe_dump(dict(sections), sort_keys=False)


@pytest.mark.parametrize("older", [False, True], ids=["v1beta1", "v1alpha1"])
@pytest.mark.parametrize(("file", "target"), FILES)
def test_what_was_exported_and_imported_is_exported_the_same(file: str, target: str | None, older: bool) -> None:
    first = exported((EXAMPLES / file).read_text(), PLANNED, target=target)
    graph = document(as_v1alpha1(first.graph) if older else first.graph)
    back = imported(written(graph))
    assert document(exported(written(back.sections), PLANNED).graph) == document(first.graph)


@pytest.mark.parametrize("name", ["disagg", "vllm_disagg"])
def test_the_components_of_a_host_come_back_as_they_were(name: str) -> None:
    text = (EXAMPLES / f"dynamo_1x/{name}.yaml").read_text()
    back = imported(yaml.safe_dump(document(exported(text).graph)))
    assert served(written(back.sections)) == served(text)


def test_a_planner_comes_back_with_its_options() -> None:
    text = (EXAMPLES / "dynamo_1x/vllm_disagg.yaml").read_text() + "  policy: slo\n  ttft: 200\n  itl: 20\n"
    back = imported(yaml.safe_dump(document(exported(text, PLANNED).graph)))
    assert back.sections["Planner"] == {"max_gpu_budget": 8, "policy": "slo", "ttft": 200, "itl": 20}


@pytest.mark.parametrize(
    ("name", "roles", "planner"),
    [
        ("disagg_planner.yaml", {"VllmDecodeWorker": "decode", "VllmPrefillWorker": "prefill"}, True),
        ("disagg_v1alpha1.yaml", {"VllmDecodeWorker": "decode", "VllmPrefillWorker": "prefill"}, False),
    ],
)
def test_dynamos_examples_become_a_graph_for_this_host(name: str, roles: dict[str, str], planner: bool) -> None:
    """Each worker with its GPU and its own port for KV; what comes of it can be exported again."""
    found = imported(dynamos_file(name).read_text())
    sections = found.sections
    assert {one: sections[one]["role"] for one in roles} == roles
    for one in roles:
        assert sections[one]["ServiceArgs"]["resources"] == {"gpu": 1}
        assert sections[one]["command"][:2] == ["env", "VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl}"]
    assert sections["Common"] == {"model": "Qwen/Qwen3-0.6B"}
    assert ("Planner" in sections) is planner
    again = exported(written(sections), replace(PLANNED if planner else WISH, name="vllm"))
    assert schema_faults(document(again.graph)) == []
    assert set(roles) < set(components(again))


def test_every_manifest_of_dynamos_that_is_there_is_imported_or_refused_with_a_reason() -> None:
    imported_files = []
    for file in dynamos_manifests():
        text = file.read_text(encoding="utf-8")
        if not any((raw or {}).get("kind") == "DynamoGraphDeployment" for raw in yaml.safe_load_all(text)):
            continue  # what a graph needs beside it: a PVC, a route, a Secret
        refused = ""
        try:
            found = import_graph(read_documents(text, file.name), file.name)
        except NotCarried as error:
            refused = str(error)
        else:
            assert served(written(found.sections))
            imported_files.append(file.name)
        assert all(line.startswith(f"{file.name}: ") for line in refused.splitlines())
    assert imported_files


# --- rules
# The rules of Dynamo's webhook and planner for a graph.

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


# --- kubernetes model
# Dynamo's documents, read and written back.

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

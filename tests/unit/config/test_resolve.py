"""Decorators, YAML and command line to a GraphSpec; the Planner's options; the JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from dynamo_local.config import resolve
from dynamo_local.config.json_schema import config_json_schema
from dynamo_local.config.loading import load_config
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import planned_components, planner_config, planner_starts
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.sdk import service
from dynamo_local.sdk.loader import LoadedGraph, build_graph
from dynamo_local.sdk.service import depends, endpoint
from dynamo_local.sdk.settings import validate_section
from tests.tools.bad_inputs import BadInput
from tests.tools.clean_imports import clean_imports


class EngineOptions(BaseModel):
    """A nested model."""

    model_config = {"extra": "forbid"}
    block_size: int = 64


class WorkerOptions(BaseModel):
    """A section's model."""

    model: str = "tiny"
    length: int = Field(default=10, alias="max-local-prefill-length")
    ratio: float | None = None
    engine: EngineOptions = EngineOptions()


@service(resources={"gpu": 1, "memory": "20Gi"}, envs={"A": "decorator", "B": "decorator"}, config=WorkerOptions)
class VllmWorker:
    """Decode."""

    @endpoint()
    async def generate(self, request: Any) -> Any:
        yield request


@service(dynamo={"namespace": "inference"})
class Frontend:
    """The root."""

    worker = depends(VllmWorker)


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


def graph() -> LoadedGraph:
    """Frontend and VllmWorker."""
    return build_graph(Frontend, (), "tests:Frontend")


def run(text: str = "", words: Sequence[str] = (), namespace: str | None = None) -> GraphSpec:
    """Resolve the graph under YAML text and words."""
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text}, overrides=words)
    return resolve(graph(), config, namespace=namespace)


def test_decorators_alone_make_a_graph() -> None:
    spec = run().service("VllmWorker")

    assert (spec.role, spec.workers, spec.resources) == (Role.DECODE, 1, Resources(gpu=1, memory="20Gi"))
    assert (dict(spec.envs), dict(spec.config)) == ({"A": "decorator", "B": "decorator"}, {})
    assert (spec.depends, spec.endpoints) == ((), ("generate",))
    assert (spec.start_deadline_s, spec.drain_deadline_s) == (None, None)
    assert run().service("Frontend").depends == ("VllmWorker",)


def test_yaml_and_command_line_lie_over_decorators() -> None:
    """Each layer changes what it names and nothing else."""
    text = "VllmWorker:\n  max-local-prefill-length: 20\n  ServiceArgs: {workers: 2, resources: {gpu: '2'}}\n"
    words = ["--VllmWorker.ServiceArgs.workers", "3", "--VllmWorker.ServiceArgs.drain-deadline=90"]

    spec = run(text, words).service("VllmWorker")

    assert (spec.workers, spec.resources) == (3, Resources(gpu=2, memory="20Gi"))
    assert spec.drain_deadline_s == 90.0
    assert dict(spec.config) == {"max_local_prefill_length": 20}


def test_yaml_envs_reach_the_worker() -> None:
    """YAML `ServiceArgs.envs` had no effect."""
    spec = run("VllmWorker: {ServiceArgs: {envs: {B: yaml, N: 1}}}", ["--VllmWorker.ServiceArgs.envs.C=word"])

    assert dict(spec.service("VllmWorker").envs) == {"A": "decorator", "B": "yaml", "N": "1", "C": "word"}


def test_gpus_are_asked_for_per_worker() -> None:
    """`gpu: 3` was read as total; the refusal says "per worker"."""
    with pytest.raises(ConfigError, match="per worker"):
        run("VllmWorker: {ServiceArgs: {resources: {gpu: three}}}")


@pytest.mark.parametrize(("given", "expected"), [(None, "inference"), ("other", "other")])
def test_namespace_of_the_command_line_replaces_the_graphs(given: str | None, expected: str) -> None:
    """`--namespace` (default: the graph's, else `dynamo`)."""
    assert run(namespace=given).namespace == expected


def test_namespace_is_dynamo_by_default() -> None:
    loaded = build_graph(VllmWorker, (), "tests:VllmWorker")

    assert resolve(loaded, load_config(None, env={}), namespace=None).namespace == "dynamo"


def test_several_errors_are_one_line_that_says_how_many() -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker: .*\(and 1 more\)$"):
        run("VllmWorker: {model: 1, ratio: x}")


def test_nested_unknown_key_names_its_path_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'engine\.blocksize'; did you mean 'block-size'"):
        run("VllmWorker: {engine: {blocksize: 1}}")


def test_a_models_own_failure_is_one_line() -> None:

    class Broken(BaseModel):
        port: int = 1

        def model_post_init(self, context: Any) -> None:
            raise KeyError("port\nsecond line")

    with pytest.raises(ConfigError, match=r"^A: Broken failed with KeyError: .*port.*$") as caught:
        validate_section(Broken, "A", {})
    assert "\n" not in str(caught.value)


def test_missing_required_key_is_named() -> None:

    class Needs(BaseModel):
        model: str

    loaded = build_graph(service(name="A", config=Needs)(type("A", (), {})), (), "t:A")

    with pytest.raises(ConfigError, match="A: model is required"):
        resolve(loaded, load_config(None, env={}), namespace=None)


def test_section_of_an_optional_service_that_does_not_run_says_so(tmp_path: Path) -> None:
    """It would have no effect, and it is no misspelling."""
    bad = BadInput("", "", {"graphs/agg.py": "from components import *\nFrontend.link(Processor).link(VllmWorker)\n"},
                   ("graphs.agg:Frontend", "--PrefillWorker.x=1"))  # fmt: skip
    bad.write(tmp_path)

    with pytest.raises(ConfigError, match="'PrefillWorker' does not run in this graph"):
        bad.resolve(tmp_path)


def test_planner_defaults_are_those_of_the_rules() -> None:
    planner = PlannerConfig()

    assert (planner.adjustment_interval, planner.metric_pulling_interval) == (30.0, 1.0)
    assert (planner.max_gpu_budget, planner.min_gpu_budget, planner.no_operation) == (8, 1, False)
    assert (planner.decode_kv_scale_up_threshold, planner.decode_kv_scale_down_threshold) == (0.9, 0.5)
    assert (planner.prefill_queue_scale_up_threshold, planner.prefill_queue_scale_down_threshold) == (0.5, 0.2)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("adjustment-interval: 0", "adjustment_interval"),
        ("metric-pulling-interval: -1", "metric_pulling_interval"),
        ("metric-pulling-interval: 31", "must not exceed adjustment_interval"),
        ("min-gpu-budget: 9", "must not exceed max_gpu_budget"),
        ("prefill-queue-scale-up-threshold: 0.1", "prefill_queue_scale_down_threshold"),
        ("decode-kv-scale-up-threshold: 1.5", "decode_kv_scale_up_threshold"),
        ("environment: moon", "environment"),
        ("environment: kubernetes", "environment kubernetes is for a planner in a pod"),
        ("namespace: other", "namespace is 'other'"),
        ("ServiceArgs: {workers: 1}", "no Planner service"),
    ],
)
def test_planner_options_are_checked_and_named(option: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"Planner.*{reason}"):
        run(f"Planner:\n  {option}\n")


def test_planner_budget_counts_what_the_graph_starts_with() -> None:
    words = ["--VllmWorker.ServiceArgs.workers=9"]
    with pytest.raises(ConfigError, match="max_gpu_budget is 8, but the graph starts with 9 GPUs"):
        run("Planner: {}", words)

    assert run("", words).service("VllmWorker").workers == 9


def test_planner_config_reads_either_spelling() -> None:
    config = load_config(None, env={}, overrides=["--Planner.no-operation", "--Planner.adjustment_interval=5"])

    planner = planner_config(graph(), config)

    assert (planner.no_operation, planner.adjustment_interval) == (True, 5.0)


def test_schema_of_a_graph_knows_its_sections_and_both_spellings() -> None:
    """`dynamo config schema graphs.disagg:Frontend`."""
    schema = config_json_schema(graph())

    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == {"Common", "Host", "Planner", "Frontend", "VllmWorker"}
    assert schema["additionalProperties"] is False
    worker = schema["properties"]["VllmWorker"]
    assert {"model", "max-local-prefill-length", "max_local_prefill_length", "ServiceArgs", "common-configs"} <= set(
        worker["properties"]
    )
    assert worker["additionalProperties"] is False
    assert schema["properties"]["Frontend"]["additionalProperties"] is True
    assert "VllmWorker.EngineOptions" in schema["$defs"]


def test_every_reference_of_the_schema_resolves() -> None:
    schema = config_json_schema(graph())
    text = json.dumps(schema)

    references = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}

    assert references
    assert references <= set(schema["$defs"])


def test_schema_without_a_graph_takes_any_service() -> None:
    schema = config_json_schema(None)

    assert "gpus" in schema["properties"]["Host"]["properties"]
    assert "adjustment-interval" in schema["properties"]["Planner"]["properties"]
    assert "ServiceArgs" in schema["additionalProperties"]["properties"]


def test_router_kv_needs_a_router_service() -> None:
    with pytest.raises(ConfigError, match="Frontend: router is kv, but the graph has no Router service"):
        run("Frontend: {router: kv}")


@pytest.mark.parametrize(
    ("words", "flag", "starts"),
    [
        ([], None, False),
        ([], True, True),
        (["--Planner.adjustment-interval=5"], None, True),
        (["--Planner.enabled=false"], None, False),
        (["--Planner.enabled=false"], True, True),
        (["--Planner.adjustment-interval=5"], False, False),
    ],
)
def test_a_planner_section_starts_it_unless_it_says_otherwise(
    words: list[str], flag: bool | None, starts: bool
) -> None:
    config = load_config(None, env={}, overrides=words)
    assert planner_starts(graph(), config, flag=flag) is starts


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ([Role.PREFILL], "it has none"),
        ([Role.DECODE, Role.AGGREGATED], "it has S0, S1"),
        ([Role.DECODE, Role.PREFILL, Role.PREFILL], "one prefill component, but this one has S1, S2"),
    ],
)
def test_a_planner_needs_to_know_which_component_is_which(roles: list[Role], told: str) -> None:
    spec = GraphSpec("dynamo", "g:S", tuple(ServiceSpec(f"S{n}", role) for n, role in enumerate(roles)))
    with pytest.raises(ConfigError, match=told):
        planned_components(spec)


def test_the_planned_components_of_both_kinds_of_graph() -> None:
    prefill, decode = ServiceSpec("P", Role.PREFILL), ServiceSpec("D", Role.DECODE)
    assert planned_components(GraphSpec("dynamo", "g:S", (prefill, decode))) == ("P", "D")
    aggregated = ServiceSpec("A", Role.AGGREGATED)
    assert planned_components(GraphSpec("dynamo", "g:S", (aggregated,))) == (None, "A")

"""`examples/vllm_serve`, and when our Frontend comes with a graph of servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.graph import with_commands
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.core.types import GraphSpec, Role
from dynamo_local.errors import ConfigError
from tests.tools.clean_imports import clean_imports
from tests.tools.pages import ROOT

EXAMPLES = ROOT / "examples" / "vllm_serve"
SERVER = "{command: 'serve {port:http}', runtime: http, role: %s}"


def spec_of(file: Path) -> GraphSpec:
    """The graph that this file alone is."""
    config = load_config(file, env={})
    return resolve(with_commands(None, config, file), config, namespace=None)


def written(folder: Path, text: str) -> GraphSpec:
    file = folder / "deployment.yaml"
    file.write_text(text)
    return spec_of(file)


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("agg.yaml", {"Frontend": Role.FRONTEND, "Vllm": Role.AGGREGATED}),
        ("disagg.yaml", {"Frontend": Role.FRONTEND, "Prefill": Role.PREFILL, "Decode": Role.DECODE}),
        ("two_models.yaml", {"Frontend": Role.FRONTEND, "Chat": Role.AGGREGATED, "Embed": Role.AGGREGATED}),
    ],
)
def test_an_example_is_a_graph_with_our_frontend(name: str, roles: dict[str, Role]) -> None:
    spec = spec_of(EXAMPLES / name)
    assert {service.name: service.role for service in spec.services} == roles
    assert spec.service("Frontend").target == "dynamo_local.components.commands.http_frontend:ProxyFrontend"
    assert all(service.resources.gpu == 1 for service in spec.services if service.name != "Frontend")


def test_the_disaggregated_examples_words_reach_vllm_as_they_are() -> None:
    command = spec_of(EXAMPLES / "disagg.yaml").service("Decode").config["command"]
    words = placeholders.words_of(command)
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    assert json.loads(words[-1]) == config
    assert placeholders.port_names(words) == ("nixl", "http")


def test_the_frontends_section_is_its_options(tmp_path: Path) -> None:
    spec = written(tmp_path, f"Frontend: {{port: 9000, router: kv-load}}\nS: {SERVER % 'decode'}")
    assert spec.service("Frontend").config == {"port": 9000, "router": "kv-load"}
    with pytest.raises(ConfigError, match="router"):
        written(tmp_path, f"Frontend: {{router: kv}}\nS: {SERVER % 'decode'}")


def test_servers_that_serve_no_model_want_no_frontend(tmp_path: Path) -> None:
    assert [service.name for service in written(tmp_path, f"S: {SERVER % 'other'}").services] == ["S"]


def test_the_planner_does_not_scale_servers_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decode without metrics, whose load nobody knows"):
        written(tmp_path, "Planner: {}\nS: {command: 'serve {port:http}', runtime: http, role: decode, metrics: null}")

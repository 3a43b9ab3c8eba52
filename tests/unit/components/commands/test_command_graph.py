"""YAML sections with a `command` as services of a graph, and what is refused before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_local.arbiter.deployment import COMMAND_ENTRY, worker_argv
from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.components.commands.graph import check_commands, with_commands
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.core.types import GraphSpec, Role
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.sdk import service
from dynamo_local.sdk.loader import LoadedGraph, build_graph
from tests.tools.clean_imports import clean_imports

ROOT = Path(__file__).parents[4]


@service
class Root:
    """Belongs to a Python graph."""


@pytest.fixture(autouse=True)
def _clean_imports() -> Any:
    with clean_imports():
        yield


def graph(text: str, python: LoadedGraph | None = None) -> tuple[LoadedGraph, GraphSpec]:
    """The graph of YAML text, beside a Python graph or alone."""
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text})
    loaded = with_commands(python, config, None)
    return loaded, resolve(loaded, config, namespace=None)


AGG = """
F: {command: "dynamo-frontend --http-port {port:http}", role: frontend, runtime: dynamo-1x}
W:
  command: [mocker, "{model}"]
  role: aggregated
  runtime: dynamo-1x
  model: tiny
  ServiceArgs: {workers: 2, resources: {gpu: 1}, envs: {A: b}}
"""


def test_a_file_of_commands_is_a_graph() -> None:
    loaded, spec = graph(AGG)
    assert loaded.root.name == "F"
    assert [(s.name, s.role, s.workers, s.resources.gpu, s.runtime) for s in spec.services] == [
        ("F", Role.FRONTEND, 1, 0, "dynamo-1x"),
        ("W", Role.AGGREGATED, 2, 1, "dynamo-1x"),
    ]
    assert spec.service("W").envs == {"A": "b"}
    assert spec.service("F").max_workers == 1
    assert spec.service("W").max_workers is None


def test_its_workers_are_started_by_their_own_entry_point() -> None:
    _loaded, spec = graph(AGG)
    argv = worker_argv(spec.target, spec.service("W"))
    assert argv == (sys.executable, "-S", COMMAND_ENTRY, "--service-name", "W")
    assert Path(COMMAND_ENTRY).is_file()


def test_commands_stand_beside_the_services_of_a_python_graph() -> None:
    _loaded, spec = graph("Side: {command: sleep 60}\n", build_graph(Root, (), "tests:Root"))
    assert [s.name for s in spec.services] == ["Root", "Side"]
    assert spec.target == "tests:Root"
    assert worker_argv(spec.target, spec.service("Root"))[2:4] == ("dynamo_local.worker.serve_dynamo", "tests:Root")


def test_a_python_graph_without_commands_is_left_as_it_is() -> None:
    python = build_graph(Root, (), "tests:Root")
    assert graph("Root: {}\n", python)[0] is python


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no graph to serve"),
        ("W: {role: decode}", "there is no graph to serve"),
        ("W: {command: x, runtime: dynamo-2x}", "W: runtime 'dynamo-2x' is unknown; one of dynamo-1x, http, none"),
        ("W: {command: x, role: decoder}", "W: role"),
        ("W: {command: x, colour: red}", "W: unknown key 'colour'"),
        ("W: {command: []}", "command is empty"),
        ("W: {command: 'x {gpu}'}", "known: {port:NAME}"),
        ("W: {command: 'x {model}'}", "no `model:` in the section"),
        ("W: {command: x, ports: {http: 8000}}", "ports.http has no effect"),
        ("W: {command: 'x {port:http}', ports: {http: 99999}}", "ports"),
        ("W: {command: 'x {port:http}', ports: {http: true}}", "ports"),
        ("W: {command: 'x {port:a} {port:b}', ports: {a: 8000, b: 8000}}", "one number to two names"),
        ("W: {command: x, stop-timeout-s: 600}", "stop_timeout_s"),
        ("W: {command: x, health-url: 'ftp://x'}", "must begin with http://"),
        ("W: {command: x, health-url: 'http://127.0.0.1:{port:http}/'}", "does not listen there"),
        ("W_1: {command: x}", "ends in '_<number>'"),
        ("w w: {command: x}", "not a service name"),
        ("Host: {command: x}", "Host"),
        ("W: {command: x}\nw: {command: x}", "differ only in case"),
        ("W: {command: 'x {port:http}', ports: {http: 8000}, ServiceArgs: {workers: 2}}", "at most 1 can run"),
        ("W: {command: x, role: decode}\nPlanner: {}", "planner cannot scale a decode of runtime none"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        graph(text)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_section_that_is_a_service_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="Root is a service of tests:Root and has a `command`"):
        graph("Root: {command: x}\n", build_graph(Root, (), "tests:Root"))


def checked(text: str, *, only_plan: bool) -> tuple[str, ...]:
    """What is said of this host."""
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text})
    return check_commands(with_commands(None, config, None), config, {"PATH": "/usr/bin:/bin"}, only_plan=only_plan)


def test_a_program_that_is_not_here_is_refused_and_only_noted_in_a_dry_run() -> None:
    assert checked("W: {command: sleep 60}", only_plan=False) == ()
    with pytest.raises(ConfigError, match="no program 'no-such-thing' here"):
        checked("W: {command: no-such-thing}", only_plan=False)
    (note,) = checked("W: {command: no-such-thing}", only_plan=True)
    assert "no-such-thing" in note


def test_a_python_without_the_module_is_refused_and_only_noted_in_a_dry_run(tmp_path: Path) -> None:
    assert checked("W: {command: python -m http.server 80}", only_plan=False) == ()
    with pytest.raises(ConfigError, match="W: 'python' has no module 'no_such_server' here; install it there"):
        checked("W: {command: python -m no_such_server.launch}", only_plan=False)
    (note,) = checked("W: {command: python3 -m no_such_server.launch --port 1}", only_plan=True)
    assert "no_such_server" in note
    (tmp_path / "no_such_server.py").touch()
    envs = f"{{PYTHONPATH: {tmp_path}}}"
    assert checked(f"W: {{command: python -m no_such_server, ServiceArgs: {{envs: {envs}}}}}", only_plan=False) == ()


def test_a_port_variable_in_envs_would_have_no_effect_and_is_refused() -> None:
    text = "W: {command: sleep 60, runtime: dynamo-1x, ServiceArgs: {envs: {DYN_SYSTEM_PORT: 8081}}}"
    with pytest.raises(ConfigError, match="DYN_SYSTEM_PORT is set by dynamo serve itself"):
        checked(text, only_plan=False)


@pytest.mark.parametrize("name", ["agg", "disagg", "vllm_disagg"])
def test_the_examples_are_graphs(name: str, tmp_path: Path) -> None:
    folder = ROOT / "examples" / "dynamo_1x"
    options = ServeOptions(target=None, file=folder / f"{name}.yaml", gpus="sim:4")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    request = understand(options, env, folder, only_plan=True)
    assert request.graph.target == str(folder / f"{name}.yaml")
    assert {s.runtime for s in request.graph.services} == {"dynamo-1x"}


def test_the_model_of_the_examples_is_complete() -> None:
    folder = ROOT / "examples" / "dynamo_1x"
    sections = yaml.safe_load((folder / "agg.yaml").read_text())
    model = folder / sections["Mocker"]["model"]
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert all(json.loads((model / name).read_text()) for name in names)

"""The options of a planner in a pod: `--config`, words over it, and the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.planner import (
    METRICS_PORT,
    PodOptions,
    dynamo_namespace,
    expected_of,
    lease_name,
    read_config,
)

PROFILE = "dynamo_H200_TP1P_TP1D"
TEXTS = {
    "yaml": f"policy: slo\nttft-ms: 300\nitl_ms: 10\nmax_gpu_budget: 4\nprofile_results_dir: {PROFILE}\n",
    "section": "Common: {model: m}\nPlanner: {policy: slo, ttft_ms: 300, itl_ms: 10, max_gpu_budget: 4}\n",
    "json": '{"policy": "slo", "ttft_ms": 300, "itl_ms": 10, "max_gpu_budget": 4}',
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANNER_PROMETHEUS_PORT", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("kind", "as_file"), [("yaml", True), ("section", True), ("json", True), ("json", False)])
def test_options_are_read_by_name(kind: str, as_file: bool, tmp_path: Path) -> None:
    """Dynamo's own files are JSON or YAML; JSON may also be the word itself."""
    file = tmp_path / "planner"
    file.write_text(TEXTS[kind])
    config, port = read_config(str(file) if as_file else TEXTS[kind], {})
    assert (config.policy, config.ttft_ms, config.max_gpu_budget) == ("slo", 300, 4)
    assert (config.environment, port) == ("kubernetes", METRICS_PORT)


def test_words_go_over_the_file() -> None:
    config, _ = read_config(TEXTS["json"], {"max_gpu_budget": 16})
    assert (config.max_gpu_budget, config.ttft_ms) == (16, 300)


def test_a_file_of_dynamos_planner_names_no_policy_and_gets_what_that_does() -> None:
    told = {"environment": "kubernetes", "optimization_target": "sla", "ttft_ms": 300, "itl_ms": 10}
    config, _ = read_config(json.dumps({**told, "metric_reporting_prometheus_port": 9000}), {})
    assert config.policy == "throughput-load"


@pytest.mark.parametrize(
    ("options", "variable", "port"),
    [
        ({"metric_reporting_prometheus_port": 9000}, None, 9000),
        ({"metric_reporting_prometheus_port": 0}, "9100", 0),
        ({}, "9100", 9100),
    ],
)
def test_the_port_of_its_metrics(
    options: dict[str, Any], variable: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("PLANNER_PROMETHEUS_PORT", variable)
    assert read_config(json.dumps({**json.loads(TEXTS["json"]), **options}), {})[1] == port


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/away/planner.yaml", "--config /away/planner.yaml cannot be read: No such file"),
        ('{"policy": "slo", "environment": "global-planner"}', "environment is 'global-planner'"),
        ('{"policy": "slo", "environment": "local"}', "has its planner in its arbiter"),
        ('{"metric_reporting_prometheus_port": "many"}', "must be a port"),
        ('{"Planner": 5}', "must hold the planner's options"),
        ('{"policy": "slo", "strange": 1}', "strange"),
        ('{"policy": "slo", "max_gpu_budget": -3}', "max_gpu_budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config(text, {})


def test_what_a_graph_must_have_follows_from_the_options() -> None:
    config, _ = read_config('{"policy": "throughput-load", "mode": "decode", "decode_min_endpoint": 2}', {})
    expected = expected_of(config)
    assert (expected.only, expected.floors[Role.DECODE], expected.prefill) == (Role.DECODE, 2, None)
    assert lease_name("g", expected.only) == "g-dynamo-local-planner-decode"


def test_the_graphs_namespace_within_dynamo_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it tells its pods, else as it makes it."""
    options = PodOptions(read_config(TEXTS["json"], {})[0])
    assert dynamo_namespace(options, "graph", "team") == "team-graph"
    monkeypatch.setenv("DYN_NAMESPACE", "told")
    assert dynamo_namespace(options, "graph", "team") == "told"

"""Which workers can change their role, and what is in the way, named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynamo_local.arbiter.checks import with_flips
from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.components.commands.launch import DYNAMO_1X
from dynamo_local.config.loading import Config
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from tests.drivers.served import ROOT

LLM = ROOT / "examples" / "llm"


def served(tmp_path: Path, target: str | None = "graphs.disagg:Frontend", **sections: object) -> GraphSpec:
    """`graphs.disagg` with these sections."""
    config = {"Common": {"model": "sim-tiny"}, "VllmWorker": {"remote-prefill": True}, **sections}
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(config))
    return understand(ServeOptions(target, file=file), {}, LLM, only_plan=True).graph


def why(graph: GraphSpec, name: str = "VllmWorker") -> str:
    """Why that component's workers cannot flip."""
    spec = graph.service(name)
    assert spec.flips_to is None
    return spec.cannot_flip


def test_the_two_sides_of_a_graph_become_each_other(tmp_path: Path) -> None:
    graph = served(
        tmp_path,
        VllmWorker={"remote-prefill": True, "max-num-waiting": 7},
        PrefillWorker={"max-concurrent-prefills": 3},
    )
    assert graph.service("VllmWorker").flips_to == "PrefillWorker"
    assert graph.service("PrefillWorker").flips_to == "VllmWorker"
    assert why(graph, "Frontend") == "a frontend has no other role"


DECODE = {"remote-prefill": True}


@pytest.mark.parametrize(
    ("decode", "prefill", "words"),
    [
        ({"sim": {"block_size": 32}}, {}, "sim: {} in PrefillWorker, {'block_size': 32} in VllmWorker"),
        ({"max-model-len": 100}, {"max-model-len": 200}, "max_model_len: 200 in PrefillWorker, 100 in VllmWorker"),
        ({"ServiceArgs": {"resources": {"gpu": 2}}}, {}, "GPUs per worker: 1 in PrefillWorker, 2 in VllmWorker"),
        ({"ServiceArgs": {"envs": {"A_TOKEN": "secret"}}}, {}, "envs: A_TOKEN"),
        ({"remote-prefill": False}, {}, "VllmWorker: remote-prefill is off"),
        ({}, {"ServiceArgs": {"flippable": False}}, "PrefillWorker: flippable is false in its ServiceArgs"),
        ({"served-model-name": "other"}, {}, "name: 'sim-tiny' in PrefillWorker, 'other' in VllmWorker"),
    ],
)
def test_each_difference_is_named(
    tmp_path: Path, decode: dict[str, object], prefill: dict[str, object], words: str
) -> None:
    graph = served(tmp_path, VllmWorker={**DECODE, **decode}, PrefillWorker=prefill)
    assert words in why(graph)
    assert why(graph, "PrefillWorker") == why(graph)
    assert "secret" not in why(graph)


def test_engine_arguments_of_vllm_are_compared(tmp_path: Path) -> None:
    model = str(tmp_path)
    graph = served(
        tmp_path,
        Common={},
        VllmWorker={**DECODE, "model": model, "dtype": "float32", "block-size": 16},
        PrefillWorker={"model": model, "dtype": "float16", "block-size": 16},
    )
    assert why(graph) == "dtype: 'float16' in PrefillWorker, 'float32' in VllmWorker"


def test_an_aggregated_graph_has_nothing_to_become(tmp_path: Path) -> None:
    graph = served(tmp_path, "graphs.agg:Frontend", VllmWorker={})
    assert why(graph) == "no other component has an engine like its own"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"runtime": "http", "command": ["python", "-V", "--port", "{port:http}"], "model": "m"}, "names no call that"),
        ({"runtime": "none", "command": ["python", "-V"]}, "what its command does is not ours to change"),
    ],
)
def test_commands_cannot_and_it_is_said_why(tmp_path: Path, section: dict[str, object], words: str) -> None:
    sections = {"Common": {}, "VllmWorker": {**section, "role": "decode"}, "Pre": {**section, "role": "prefill"}}
    assert words in why(served(tmp_path, None, **sections))


SGLANG = ["python", "-V", "--port", "{port:http}", "--disaggregation-mode"]
SWITCHED = {"runtime": "http", "model": "m", "role-switch": "/pd_role_switch"}


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        ({}, None),
        ({"stop-timeout-s": 3.0}, None),
        ({"command": [*SGLANG, "prefill", "--tp", "2"]}, "command: "),
        ({"role-switch-body": {"mode": "{role}"}}, "role_switch_body: {'mode': '{role}'} in Pre"),
        ({"role-switch": None}, "Pre: runtime: http has a server of its own"),
        ({"ServiceArgs": {"envs": {"A": "b"}}}, "envs: A"),
    ],
)
def test_servers_that_change_their_role_when_asked_flip(
    tmp_path: Path, prefill: dict[str, object], words: str | None
) -> None:
    sections: dict[str, object] = {
        "Dec": {**SWITCHED, "command": [*SGLANG, "decode"], "role": "decode"},
        "Pre": {**SWITCHED, "command": [*SGLANG, "prefill"], "role": "prefill", **prefill},
    }
    graph = served(tmp_path, None, Common={}, VllmWorker={"command": ["python", "-V"]}, **sections)
    if words is None:
        assert (graph.service("Dec").flips_to, graph.service("Pre").flips_to) == ("Pre", "Dec")
    else:
        assert words in why(graph, "Dec")


def test_workers_of_dynamo_1x_cannot() -> None:
    spec = ServiceSpec("VllmWorker", Role.DECODE, runtime=DYNAMO_1X)
    other = ServiceSpec("Pre", Role.PREFILL, runtime=DYNAMO_1X)
    graph = with_flips(LoadedGraph, GraphSpec("dynamo", "", (spec, other)), Config)  # type: ignore[arg-type]
    assert "Dynamo 1.x" in why(graph)


def plan(tmp_path: Path, target: str, **worker: object) -> None:
    """`dynamo serve --dry-run` of a graph whose VllmWorker has real vLLM and that section."""
    args = {"standby": 0, **worker.pop("ServiceArgs", {})}  # type: ignore[dict-item]
    config = {"VllmWorker": {"engine": "vllm", "model": str(tmp_path), **worker, "ServiceArgs": args}}
    if target == "disagg":
        config["PrefillWorker"] = {"engine": "vllm", "model": str(tmp_path)}
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(config))
    understand(ServeOptions(f"graphs.{target}:Frontend", file=file), {}, ROOT / "examples" / "llm", only_plan=True)


@pytest.mark.parametrize(
    ("target", "worker", "why"),
    [
        (
            "agg",
            {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1"}},
            "with the KV connector LMCacheConnectorV1",
        ),
        (
            "agg",
            {"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1"}'},
            "the KV connector LMCacheConnectorV1",
        ),
        ("agg", {"ServiceArgs": {"resources": {"gpu": 0}}}, "vLLM's CPU platform has no sleep mode"),
    ],
)
def test_what_keeps_vllm_awake_is_named(tmp_path: Path, target: str, worker: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        plan(tmp_path, target, **worker)
    assert "VllmWorker" in str(refused.value)
    assert "ServiceArgs.standby" in str(refused.value)
    assert "remove it" in str(refused.value)

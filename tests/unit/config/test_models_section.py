"""The section `Models`: the services that it becomes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_local.components.commands.graph import with_commands
from dynamo_local.components.prefill_worker import PrefillWorkerConfig
from dynamo_local.components.vllm_worker import VllmWorkerConfig
from dynamo_local.config.loading import Config, load_config
from dynamo_local.config.models import TO_DECODE, TO_PREFILL, component_of, target_of
from dynamo_local.config.resolve import planned_components, resolve
from dynamo_local.core.types import GraphSpec, Role
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import load_graph

TINY = {"model": "sim-tiny", "engine": "sim"}


def config_of(models: dict[str, Any], *overrides: str, **sections: Any) -> Config:
    """The configuration of a file with these models."""
    return load_config(None, env={}, base=yaml.safe_dump({"Models": models, **sections}), overrides=overrides)


def graph_of(config: Config) -> GraphSpec:
    return resolve(load_graph(target_of(list(config.models)), base_dir=Path.cwd()), config, namespace=None)


def test_each_model_is_a_component_with_a_part_of_the_gpus() -> None:
    models = {"qwen": {**TINY, "gpus": 2, "floor": 1, "weight": 3}, "Llama-3.1": {**TINY, "idle-s": 60}}
    graph = graph_of(config_of(models))
    qwen, llama = graph.service("qwen"), graph.service("Llama31")
    assert (qwen.workers, qwen.resources.gpu, llama.workers) == (1, 2, 0), "a model begins with its floor"
    assert qwen.sharing is not None
    assert llama.sharing is not None
    assert (qwen.sharing.floor, qwen.sharing.weight, llama.sharing.idle_s) == (1, 3.0, 60.0)
    assert llama.config["served_model_name"] == "Llama-3.1"


def test_the_frontend_knows_which_requests_it_may_hold() -> None:
    config = config_of({"a": {**TINY, "max-held": 7}, "b": {**TINY, "served-model-name": "org/b", "max-wait-s": 5}})
    shared = config.sections["Frontend"]["models"]
    assert {name: (each["component"], each["max_held"], each["max_wait_s"]) for name, each in shared.items()} == {
        "a": ("a", 7, 120.0),
        "org/b": ("b", 256, 5.0),
    }


@pytest.mark.parametrize(
    ("section", "more", "engine"),
    [
        ({"model": "/m/a", "engine": "vllm"}, {}, "vllm"),
        ({"model": "/m/a"}, {}, "vllm"),
        (TINY, {}, "sim"),
        ({"model": "sim-tiny"}, {}, "sim"),
        ({"model": "/m/a"}, {"a": {"engine": "sim"}}, "sim"),
        ({"model": "/m/a", "common-configs": ["engine"]}, {"Common": {"engine": "sim"}}, "sim"),
        ({"model": "/m/a"}, {"Common": {"engine": "sim"}}, "vllm"),
    ],
)
def test_the_frontend_knows_the_engine_of_a_model_without_a_worker(
    section: dict[str, Any], more: dict[str, Any], engine: str
) -> None:
    assert config_of({"a": section}, **more).sections["Frontend"]["models"]["a"]["engine"] == engine


def test_the_frontend_expects_no_engine_behind_a_command() -> None:
    assert "engine" not in config_of({"a": SERVER}).sections["Frontend"]["models"]["a"]


@pytest.mark.parametrize(("router", "routed"), [("kv", True), ("slo", True), ("least-loaded", False)])
def test_a_policy_that_knows_what_is_cached_brings_a_router(router: str, routed: bool) -> None:
    config = config_of({"a": {**TINY, "router": router, "ttft": 500}, "b": TINY})
    graph = graph_of(config)
    assert any(spec.name == "a_Router" for spec in graph.services) is routed
    assert not any(spec.name == "b_Router" for spec in graph.services)
    assert config.sections["a_Processor"]["router"] == router
    if routed:
        assert (graph.service("a_Router").config["router"], graph.service("a_Router").config["ttft"]) == (router, 500)


def test_prefill_workers_are_beside_the_workers_of_their_model() -> None:
    apart = {"gpus": 2, "floor": 1, "prefill": 3, "max-local-prefill-length": 7, "max-concurrent-prefills": 4}
    graph = graph_of(config_of({"a": {**TINY, **apart}, "b": TINY}))
    decode, prefill = graph.service("a"), graph.service("a_PrefillWorker")
    assert (decode.workers, prefill.workers, prefill.resources.gpu, prefill.role) == (1, 3, 2, Role.PREFILL)
    assert prefill.sharing is not None
    assert (prefill.sharing.beside, prefill.sharing.each) == ("a", 3)
    assert (decode.config["remote_prefill"], decode.config["max_local_prefill_length"]) == (True, 7)
    assert prefill.config["max_concurrent_prefills"] == 4
    assert decode.config["prefill_queue"] == prefill.config["prefill_queue"] == "a"
    assert "remote_prefill" not in graph.service("b").config


def test_each_option_of_a_model_goes_to_the_workers_that_read_it() -> None:
    decode, prefill = set(VllmWorkerConfig.model_fields), set(PrefillWorkerConfig.model_fields)
    assert (decode - prefill, prefill - decode) == (TO_DECODE, TO_PREFILL)


SERVER = {"command": "llama-server -m {model} --alias a --port {port:http}", "model": "/m/a.gguf"}


def test_a_command_is_a_server_that_shares_the_gpus() -> None:
    """It needs no Processor, and its Frontend passes requests on."""
    config = config_of({"a": {**SERVER, "gpus": 2, "aliases": ["small"], "metrics": None, "idle-s": 60}})
    graph = resolve(with_commands(None, config, None), config, namespace=None)
    spec = graph.service("a")
    assert (spec.runtime, spec.role, spec.resources.gpu, spec.workers) == ("http", Role.AGGREGATED, 2, 0)
    assert spec.sharing is not None
    assert spec.sharing.idle_s == 60.0
    assert config.models == ()
    assert spec.config["must_serve"] == ["a", "small"]
    held = config.sections["Frontend"]["models"]
    assert {name: each["component"] for name, each in held.items()} == {"a": "a", "small": "a"}


def test_a_server_without_a_list_of_models_is_not_asked_for_its_names() -> None:
    section = config_of({"a": {**SERVER, "served-model-name": "org/a"}}).sections["a"]
    assert (section["served_model_name"], "must_serve" in section) == ("org/a", False)


def test_what_a_file_or_a_person_says_of_a_service_is_laid_over_it() -> None:
    config = config_of({"a": TINY}, "--Models.a.cap=3", "--a.sim.speed=2", Frontend={"port": 9})
    spec = graph_of(config).service("a")
    assert spec.sharing is not None
    assert (spec.sharing.cap, spec.config["sim"]) == (3, {"speed": 2})
    assert config.sections["Frontend"]["port"] == 9


def test_a_planner_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="a share the GPUs by the section Models"):
        planned_components(graph_of(config_of({"a": TINY})))


@pytest.mark.parametrize(
    ("name", "component"),
    [("qwen", "qwen"), ("Qwen/Qwen3-8B", "Qwen_Qwen3_8B"), ("llama-3.1", "llama31"), ("3b", "m3b"), ("--", "model")],
)
def test_a_component_never_looks_like_anothers_further_worker(name: str, component: str) -> None:
    assert component_of(name) == component


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({}, "has 0 models"),
        ({"a": {"engine": "sim"}}, "model"),
        ({"a-b": TINY, "a_b": TINY}, "another service is called a_b"),
        ({"Frontend": TINY}, "another service is called Frontend"),
        ({"a": {**TINY, "served-model-name": "b"}, "b": TINY}, "two models are named 'b'"),
        ({"a": {**TINY, "floor": 3, "cap": 2}}, "cap is 2, less than the floor of 3"),
        ({"a": {**TINY, "floor": 2, "workers": 1}}, "fewer than its floor"),
        ({"a": {**TINY, "gpus": 0}}, "nothing to share"),
        ({"a": {**TINY, "weight": -1}}, "weight"),
        ({"a": 7}, "holds a model's options, not 7"),
        ({"a": SERVER, "b": TINY}, "Models.a is a command and Models.b an engine of ours"),
        ({"a": {**TINY, "aliases": ["b"]}}, "aliases are of a command"),
        ({"a": {**SERVER, "aliases": ["b"]}, "b": SERVER}, "two models are named 'b'"),
    ],
)
def test_what_cannot_be_is_said_with_the_models_name(models: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        graph_of(config_of(models))

"""A worker's view of the configuration, under Dynamo's accessors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ConfigDict

from dynamo_local.errors import ConfigError
from dynamo_local.sdk import service
from dynamo_local.sdk.service_config import ServiceConfig
from dynamo_local.sdk.settings import load_settings

SECTIONS = {
    "Common": {"model": "tiny", "block-size": 64},
    "VllmWorker": {
        "max-model-len": 16384,
        "common-configs": ["model", "block-size"],
        "enforce-eager": True,
        "router": None,
        "enable-prefix-caching": False,
        "kv-transfer-config": {"kv_connector": "Nixl"},
        "ServiceArgs": {"workers": 2},
    },
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps(SECTIONS))
    ServiceConfig.reset()
    yield
    ServiceConfig.reset()


def test_get_instance_reads_the_variable_once() -> None:
    """One object for the process, as Dynamo's."""
    assert ServiceConfig.get_instance() is ServiceConfig.get_instance()


def test_get_is_a_dicts_get_and_dynamos() -> None:
    config = ServiceConfig.get_instance()

    assert config.get("Frontend", {}) == {}
    assert config.get("VllmWorker", {})["max-model-len"] == 16384
    assert config["VllmWorker"]["max_model_len"] == 16384
    assert "max-model-len" in config["VllmWorker"]
    assert config.get("VllmWorker", "block-size") == 64
    assert config.get("VllmWorker", "missing", 5) == 5
    assert config.get("Frontend", "port") is None


def test_require_names_service_and_key() -> None:
    config = ServiceConfig.get_instance()

    assert config.require("VllmWorker", "model") == "tiny"
    with pytest.raises(ConfigError, match=r"VllmWorker\.dtype must be specified"):
        config.require("VllmWorker", "dtype")


def test_as_args_gives_command_line_words() -> None:
    assert ServiceConfig.get_instance().as_args("VllmWorker") == [
        "--max-model-len",
        "16384",
        "--enforce-eager",
        "--enable-prefix-caching",
        "false",
        "--kv-transfer-config",
        '{"kv_connector": "Nixl"}',
        "--model",
        "tiny",
        "--block-size",
        "64",
    ]


def test_as_args_with_a_prefix_takes_and_strips_it() -> None:
    config = ServiceConfig.get_instance()

    assert config.as_args("VllmWorker", prefix="max-model-") == ["--len", "16384"]
    assert config.as_args("VllmWorker", prefix="max_model_") == ["--len", "16384"]
    assert config.as_args("Nobody") == []


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}'])
def test_broken_variable_is_refused_without_quoting_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo went on with an empty configuration."""
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", text)
    ServiceConfig.reset()

    with pytest.raises(ConfigError, match="DYNAMO_SERVICE_CONFIG"):
        ServiceConfig.get_instance()


def test_unset_variable_is_an_empty_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A component that runs without `dynamo serve`."""
    monkeypatch.delenv("DYNAMO_SERVICE_CONFIG")
    ServiceConfig.reset()

    assert ServiceConfig.get_instance() == {}


def test_load_settings_gives_the_services_model() -> None:

    class Options(BaseModel):
        model_config = ConfigDict(extra="allow")
        model: str
        max_model_len: int

    declared = service(name="VllmWorker", config=Options)(type("VllmWorker", (), {}))

    settings = load_settings(declared)

    assert (settings.model, settings.max_model_len) == ("tiny", 16384)
    assert load_settings(service(type("Plain", (), {}))) is None

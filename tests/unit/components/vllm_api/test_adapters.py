"""Adapters that a Processor's section names: what they are, and that they are listed beside their model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.components.models_view import EngineApi, ModelCard, ModelsView, adapters_prefix
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.processor import Adapter, Processor, ProcessorConfig, adapters_of
from dynamo_local.engines.vllm.options import words_of
from dynamo_local.errors import ConfigError
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent
from tests.fakes.data_plane.processor import FakeEndpoint
from tests.fakes.data_plane.worker_context import FakeCluster

VLLM = EngineApi("vllm", "0.32.0", ["--model=/models/tiny"], ["generate"])


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """Closed at the end."""
    made = FakeCluster(ack_wait_s=0.3)
    yield made
    await made.close()


@pytest.mark.parametrize(
    "given",
    [
        "law=org/law",
        ["law=org/law"],
        [{"name": "law", "path": "org/law"}],
        {"name": "law", "path": "org/law", "base_model_name": "tiny"},
        ['{"name": "law", "path": "org/law"}'],
    ],
)
@pytest.mark.parametrize("key", ["lora-modules", "lora_modules"])
def test_the_forms_that_vllm_serve_takes(key: str, given: Any):
    assert adapters_of({key: given, "enable-auto-tool-choice": True}) == [Adapter("law", "org/law")]
    option, *words = words_of({key: given})
    for word in words:
        assert "=" in word or json.loads(word)["name"] == "law"
    assert option.startswith("--lora-modules")


@pytest.mark.parametrize("given", [["law"], [7], [{"name": "law"}], "{", ["law=a,b=c"]])
def test_what_names_no_adapter_is_refused(given: Any):
    with pytest.raises(ConfigError, match=r"serve-args.*NAME=FOLDER"):
        adapters_of({"lora-modules": given})


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path):
    """A worker would find it out in the middle of a request."""
    given = {"lora-modules": [f"law={tmp_path}"]}
    with pytest.raises(ConfigError, match=r"'law' is not in .*adapter_config.json"):
        adapters_of(given)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapters_of(given) == [Adapter("law", str(tmp_path))]


async def listed(models: ModelsView, adapters: ModelsView, path: str = "/v1/models") -> httpx.Response:
    """A Frontend's answer."""
    endpoint = FakeEndpoint()
    app = create_app(FrontendDeps(chat=endpoint, completions=endpoint, models=models, adapters=adapters))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        return await client.get(path)


async def test_adapters_are_listed_beside_their_model_and_go_with_it(cluster: FakeCluster):
    """As `vllm serve` lists them: with the folder for the root, and the model for the parent."""
    prefix = adapters_prefix("dynamo")
    args = {"lora-modules": ["law=org/law", "art=org/art"]}
    processor = await cluster.start(
        Processor, ProcessorConfig(router="round-robin", served_model_name="tiny", serve_args=args)
    )
    models, adapters = ModelsView("dynamo"), ModelsView("dynamo", prefix=prefix)
    keys = [key for key in processor.context.keys if key.startswith(prefix)]
    for key in keys:
        found = await cluster.kv.get(key)
        assert found is not None
        adapters.apply(PutEvent(found))
    assert (await listed(models, adapters)).json()["data"] == []
    card = ModelCard("tiny", "VllmWorker", "generate", 4096, 1000.0, VLLM)
    models.apply(PutEvent(KeyValue("dynamo/models/tiny:a1", card.encode(), 0xA1)))
    data = (await listed(models, adapters)).json()["data"]
    assert [(each["id"], each["root"], each["parent"], each["max_model_len"]) for each in data] == [
        ("tiny", "/models/tiny", None, 4096),
        ("art", "org/art", "tiny", None),
        ("law", "org/law", "tiny", None),
    ]
    assert {each["owned_by"] for each in data} == {"vllm"}
    assert all(each["permission"][0]["allow_sampling"] for each in data)
    assert (await listed(models, adapters, "/v1/models/law")).json() == data[2]
    models.apply(DeleteEvent("dynamo/models/tiny:a1"))
    assert (await listed(models, adapters)).json()["data"] == []

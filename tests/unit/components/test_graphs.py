"""Tests the graphs that ship, and a Frontend that serves several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.models_view import ModelCard, ModelsView
from dynamo_local.components.openai.by_model import EndpointByModel
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.config.models import GRAPHS
from dynamo_local.errors import GraphError
from dynamo_local.ports import KeyValue, PutEvent
from dynamo_local.sdk.loader import load_graph


def services(name: str) -> list[str]:
    return list(load_graph(f"{GRAPHS}:{name}", base_dir=Path.cwd()).services)


def test_each_name_has_its_own_links_however_often_it_is_loaded() -> None:
    routed = ["Frontend", "Processor", "Router", "VllmWorker"]
    assert services("agg_router") == routed
    assert services("agg") == ["Frontend", "Processor", "VllmWorker"]
    assert services("disagg") == ["Frontend", "Processor", "VllmWorker", "PrefillWorker"]
    assert services("agg_router") == routed


def test_each_model_has_a_processor_and_workers() -> None:
    graph = load_graph(f"{GRAPHS}:models__qwen__llama3", base_dir=Path.cwd())
    assert sorted(graph.services) == ["Frontend", "llama3", "llama3_Processor", "qwen", "qwen_Processor"]
    clients = graph.bindings("qwen_Processor")
    assert clients["worker"] is graph.services["qwen"]
    assert set(graph.bindings("Frontend")) == {"qwen_Processor", "llama3_Processor"}


def test_a_model_may_have_a_router() -> None:
    graph = load_graph(f"{GRAPHS}:models__qwen__qwen_Router__llama3", base_dir=Path.cwd())
    names = ["Frontend", "llama3", "llama3_Processor", "qwen", "qwen_Processor", "qwen_Router"]
    assert sorted(graph.services) == names
    assert graph.bindings("qwen_Processor")["router"] is graph.services["qwen_Router"]
    assert graph.bindings("qwen_Router")["worker"] is graph.services["qwen"]
    assert graph.bindings("llama3_Processor")["router"] is None


def test_a_model_may_have_prefill_workers_of_its_own() -> None:
    graph = load_graph(f"{GRAPHS}:models__a__a_PrefillWorker__b", base_dir=Path.cwd())
    assert sorted(graph.services) == ["Frontend", "a", "a_PrefillWorker", "a_Processor", "b", "b_Processor"]
    assert graph.bindings("a")["prefill_worker"] is graph.services["a_PrefillWorker"]
    assert graph.bindings("b")["prefill_worker"] is None


def test_no_process_waits_for_a_models_worker() -> None:
    graph = load_graph(f"{GRAPHS}:models__qwen__llama3", base_dir=Path.cwd())
    assert graph.services["qwen_Processor"].depends["worker"].optional


@pytest.mark.parametrize("name", ["models", "models__a__a", "models__", "nothing"])
def test_another_name_is_no_graph(name: str) -> None:
    with pytest.raises(GraphError, match=name):
        services(name)


class Named:
    """An endpoint that answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def call(self, payload: Any, **_options: Any) -> str:
        return self.name


def by_model() -> Any:
    models, adapters = ModelsView("dynamo", ("a", "late")), ModelsView("dynamo", prefix="dynamo/adapters/")
    for at, (view, model, component) in enumerate(
        [(models, "a", "a"), (models, "b", "b"), (adapters, "b-lora", "b_Processor")]
    ):
        card = ModelCard(model, component, "generate", 100, 0.0)
        view.apply(PutEvent(KeyValue(f"dynamo/models/{model}:{at}", card.encode(), at)))
    one, two = Named("one"), Named("two")
    clients: Any = {"a_Processor": one, "a": one, "b_Processor": two, "b": two}
    return EndpointByModel(clients, models, adapters)


@pytest.mark.parametrize(("model", "answers"), [("a", "one"), ("b", "two"), ("b-lora", "two")])
async def test_a_request_goes_to_its_models_processor(model: str, answers: str) -> None:
    endpoint, body = by_model(), msgspec.json.encode({"model": model})
    assert await endpoint.call({"model": model}) == answers
    assert await endpoint.call({"kind": "tokenize", "request": {"model": model}}) == answers
    assert await endpoint.call(ApiRequest("r", "/v1/chat/completions", [], body)) == answers


async def test_a_model_that_nobody_serves_is_answered_with_those_that_are_there() -> None:
    said = r"`c` does not exist here; served now: `a`, `b`; without a ready worker now: `late`"
    with pytest.raises(ApiError, match=said) as refused:
        await by_model().call({"model": "c"})
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


async def test_a_model_whose_first_worker_is_not_there_yet_is_to_be_asked_for_again() -> None:
    with pytest.raises(ApiError, match="`late` has no ready worker") as refused:
        await by_model().call({"model": "late"})
    assert refused.value.status == 503
    assert int(refused.value.headers["Retry-After"]) > 0

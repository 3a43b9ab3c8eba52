"""vLLM models that share the GPUs: a request wakes the model that it names, whatever it asks for, and is answered by
that model's API."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.models_view import EngineApi, ModelCard, ModelsView
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.by_model import EndpointByModel
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.openai.held import HeldRequests
from dynamo_local.components.openai.settings import FrontendConfig, SharedModel
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent
from tests.drivers.eventually import eventually
from tests.fakes.data_plane.processor import FakeEndpoint, answer

VLLM = EngineApi("vllm", "0.33.0", ["--model", "m"], ["generate"])
JSON = {"status": 200, "headers": {"content-type": "application/json"}, "stream": False}
A, B = "a", "b"
CHAT, SCORE = "/v1/chat/completions", "/score"
MESSAGES = [{"role": "user", "content": "Hi"}]
BEYOND_PLAIN = [
    (CHAT, {"messages": MESSAGES, "tools": []}),
    (CHAT, {"messages": MESSAGES, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "guided_json": {}}),
    (CHAT, {"messages": MESSAGES, "n": 2}),
    (SCORE, {"text_1": "x", "text_2": "y"}),
    ("/rerank", {"query": "x", "documents": ["y"]}),
]


class House:
    """A Frontend before the models A and B, which share the GPUs. Each has a scripted Processor."""

    def __init__(self, *awake: str, engine: str = "vllm", **settings: Any) -> None:
        shared = {
            name: SharedModel(component=name, max_wait_s=30.0, max_held=9, max_held_bytes=9_999, engine=engine)
            for name in (A, B)
        }
        self.models, self.adapters = ModelsView("dynamo", (A, B)), ModelsView("dynamo", prefix="dynamo/adapters/")
        self.models.apply(SnapshotEvent((), 1))
        for name in awake:
            self.wake(name)
        self.light = {name: FakeEndpoint(answer(f"light {name}")) for name in (A, B)}
        self.api = {name: FakeEndpoint([[JSON], [{"body": b'"api"'}]]) for name in (A, B)}
        self.held = HeldRequests(shared, self.models, self.adapters, AsyncioClock())
        light = self._by_model(self.light)
        self.app = create_app(
            FrontendDeps(
                chat=light,
                completions=light,
                api=self._by_model(self.api),
                models=self.models,
                adapters=self.adapters,
                settings=FrontendConfig(**settings),
                held=self.held,
            )
        )

    def _by_model(self, endpoints: dict[str, FakeEndpoint]) -> EndpointByModel:
        clients = {**endpoints, **{f"{name}_Processor": each for name, each in endpoints.items()}}
        return EndpointByModel(clients, self.models, self.adapters)

    def wake(self, name: str) -> None:
        """A worker of that model became ready."""
        card = ModelCard(name, name, "generate", 4096, 1000.0, VLLM)
        self.models.apply(PutEvent(KeyValue(f"dynamo/models/{name}:a1", card.encode(), 0xA1)))

    def adapt(self, name: str, parent: str) -> None:
        """A Processor lists an adapter of that model."""
        card = ModelCard(name, f"{parent}_Processor", "generate", None, 1000.0, parent=parent)
        self.adapters.apply(PutEvent(KeyValue(f"dynamo/adapters/{name}:a1", card.encode(), 0xA1)))

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            return await client.request(method, path, json=body)

    async def woken(self, path: str, body: Any) -> httpx.Response:
        """The answer to a request that is held for B until B has a worker."""
        asked = asyncio.create_task(self.ask("POST", path, body))
        await eventually(lambda: asked.done() or self.held.now())
        assert {name: each.count for name, each in self.held.now().items()} == {B: 1}, "the arbiter is told of B alone"
        assert self.asked() == ([], []), "nothing is sent before B has a worker"
        self.wake(B)
        async with asyncio.timeout(5.0):
            return await asked

    def asked(self) -> tuple[list[str], list[str]]:
        """The models whose Processor was asked: by our API, and by vLLM's."""
        light, api = ([n for n in (A, B) for _ in by[n].payloads] for by in (self.light, self.api))
        return light, api


@pytest.mark.parametrize("awake", [(A,), ()], ids=["one is awake", "all sleep"])
@pytest.mark.parametrize(("path", "body"), BEYOND_PLAIN)
async def test_a_request_that_is_not_plain_wakes_its_model_and_is_answered_by_that_models_api(
    awake: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    house = House(*awake)
    response = await house.woken(path, {"model": B, **body})
    assert (response.status_code, response.json()) == (200, "api")
    assert house.asked() == ([], [B])


@pytest.mark.parametrize("awake", [(A,), ()], ids=["one is awake", "all sleep"])
@pytest.mark.parametrize(("plain_requests", "asked"), [("light", ([B], [])), ("engine", ([], [B]))])
async def test_a_plain_request_wakes_its_model(awake: tuple[str, ...], plain_requests: str, asked: Any) -> None:
    house = House(*awake, plain_requests=plain_requests)
    response = await house.woken(CHAT, {"model": B, "messages": MESSAGES})
    assert (response.status_code, house.asked()) == (200, asked)


@pytest.mark.parametrize("awake", [(A,), ()], ids=["one is awake", "all sleep"])
async def test_a_request_for_an_adapter_wakes_the_model_that_it_adapts(awake: tuple[str, ...]) -> None:
    house = House(*awake)
    house.adapt("b-lora", B)
    response = await house.woken(CHAT, {"model": "b-lora", "messages": MESSAGES})
    assert (response.status_code, house.asked()) == (200, ([], [B]))


@pytest.mark.parametrize("awake", [(A,), ()], ids=["one is awake", "all sleep"])
async def test_a_model_that_nobody_knows_wakes_none(awake: tuple[str, ...]) -> None:
    house = House(*awake)
    response = await house.ask("POST", SCORE, {"model": "nobody"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert not house.held.now()


@pytest.mark.parametrize("body", [{"messages": MESSAGES}, {"model": 7}, [1]])
async def test_a_request_that_names_no_model_wakes_none(body: Any) -> None:
    house = House()
    response = await house.ask("POST", CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert not house.held.now()


async def test_a_model_without_a_worker_keeps_no_response() -> None:
    house = House()
    response = await house.ask("GET", "/v1/responses/resp_1")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    assert not house.held.now()


async def test_simulated_models_that_sleep_have_no_other_api_than_ours() -> None:
    house = House(engine="sim")
    assert (await house.ask("POST", SCORE, {"model": B})).status_code == 404
    response = await house.woken(CHAT, {"model": B, "messages": MESSAGES, "tools": []})
    assert (response.status_code, house.asked()) == (200, ([B], []))

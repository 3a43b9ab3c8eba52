"""A Frontend before a model whose engine has an API of its own: it passes bodies on, and answers back, unread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dynamo_local.components.models_view import EngineApi, ModelCard, ModelsView
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.components.vllm_api.relay import PATHS
from dynamo_local.errors import EngineError, WorkerBusy, WorkerLost
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent
from tests.fakes.data_plane.processor import FakeEndpoint, Step, answer

VLLM = EngineApi("vllm", "0.32.0", ["--model", "m"], ["generate"])
JSON = {"status": 200, "headers": {"content-type": "application/json"}, "stream": False}
EVENTS = {"status": 200, "headers": {"content-type": "text/event-stream; charset=utf-8"}, "stream": True}


class House:
    """A Frontend, a scripted Processor's two sides, and a model of that engine."""

    def __init__(self, *script: Step, engine: EngineApi | None = VLLM, **settings: Any) -> None:
        self.models = ModelsView("dynamo")
        self.models.apply(SnapshotEvent((), 1))
        card = ModelCard("tiny", "VllmWorker", "generate", 4096, 1000.0, engine)
        self.models.apply(PutEvent(KeyValue("dynamo/models/tiny:a1", card.encode(), 0xA1)))
        self.light, self.api = FakeEndpoint(answer("light")), FakeEndpoint(list(script))
        deps = FrontendDeps(
            chat=self.light,
            completions=self.light,
            api=self.api,
            models=self.models,
            settings=FrontendConfig(**{"plain_requests": "engine", **settings}),
        )
        self.deps = deps
        self.app = create_app(deps)

    async def get(self, url: str) -> httpx.Response:
        """One request without a body."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            return await client.get(url)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """One request."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            return await client.post(path, content=content, headers=headers)


def bodies(*parts: bytes) -> Sequence[Step]:
    """A batch for each part."""
    return [[{"body": part, "tokens": 1}] for part in parts]


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_every_path_of_the_engine_is_passed_on(path: str):
    """The body as it came, whatever is in it; the answer as the engine gave it, its status too."""
    house = House([{**JSON, "status": 422}], [{"body": b'{"object": "any"}'}])
    response = await house.post(path, {"model": "tiny", "anything": [None]}, authorization="Bearer secret")
    assert (response.status_code, response.json()) == (422, {"object": "any"})
    (sent,) = house.api.payloads
    assert (sent.path, json.loads(sent.body)) == (path, {"model": "tiny", "anything": [None]})
    assert "authorization" not in dict(sent.headers), "the Frontend's key is nobody else's business"
    assert not house.light.payloads


async def test_a_stream_comes_as_it_was_made():
    house = House([EVENTS], *bodies(b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"))
    response = await house.post("/v1/chat/completions", {"model": "tiny", "stream": True})
    assert response.content == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert house.deps.metrics.counters()["osl_sum"] == 3


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", {"model": "nobody"}, {"model": 7}, {}])
async def test_what_is_wrong_with_a_body_is_for_the_engine_to_say(body: Any):
    house = House([{**JSON, "status": 404}], [{"body": b'{"error": "said by the engine"}'}])
    response = await house.post("/v1/completions", body)
    assert (response.status_code, response.json()) == (404, {"error": "said by the engine"})


@pytest.mark.parametrize(
    ("error", "status"), [(WorkerBusy("full", retry_after_s=3.0), 429), (EngineError("it failed"), 500)]
)
async def test_the_graphs_own_failures_have_their_status(error: Exception, status: int):
    house = House(error)
    response = await house.post("/v1/responses", {"model": "tiny", "stream": True})
    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_a_failure_in_a_stream_is_its_last_event():
    """And there is no `[DONE]`: who sees none has not seen all."""
    house = House([EVENTS], *bodies(b"data: 1\n\n"), EngineError("it failed"))
    response = await house.post("/v1/completions", {"model": "tiny", "stream": True})
    assert b"data: 1\n\n" in response.content
    assert b"it failed" in response.content
    assert b"[DONE]" not in response.content


async def test_an_answer_that_nobody_has_seen_is_asked_for_again():
    """Its worker was lost after some tokens, which only the Processor has seen."""
    house = House()
    house.api = FakeEndpoint([WorkerLost("gone")], [[JSON], [{"body": b'{"whole": 1}'}]])
    house.deps = replace(house.deps, api=house.api)
    house.app = create_app(house.deps)
    response = await house.post("/v1/completions", {"model": "tiny"})
    assert (response.status_code, response.json(), len(house.api.payloads)) == (200, {"whole": 1}, 2)


async def test_a_kept_response_is_the_engines_business():
    house = House([{**JSON, "status": 404}], [{"body": b"{}"}])
    assert (await house.get("/v1/responses/resp_1?stream=true&starting_after=3")).status_code == 404
    assert (await house.post("/v1/responses/resp_1/cancel", b"")).status_code == 404
    kept, cancelled = house.api.payloads
    assert (kept.method, kept.path, kept.query) == ("GET", "/v1/responses/resp_1", "stream=true&starting_after=3")
    assert (cancelled.method, cancelled.path) == ("POST", "/v1/responses/resp_1/cancel")


async def test_other_engines_keep_no_response():
    """The error is the one that vLLM has by default."""
    house = House(engine=None)
    for response in (await house.get("/v1/responses/resp_1"), await house.post("/v1/responses/resp_1/cancel", b"")):
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (404, "invalid_request_error", "response_id")
        assert error["message"] == "Response with id 'resp_1' not found."


async def test_other_models_are_answered_as_before():
    house = House(engine=None)
    chat = await house.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]})
    assert chat.json()["choices"][0]["message"]["content"] == "light"
    assert (await house.post("/v1/messages/count_tokens", {})).status_code == 404
    assert not house.api.payloads


@pytest.mark.parametrize(
    ("more", "light"),
    [
        ({}, True),
        ({"temperature": 0, "seed": 3, "stream_options": None}, True),
        ({"logprobs": True}, False),
        ({"tools": []}, False),
        ({"temperature": -1}, False),
        ({"model": "an-adapter"}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, False),
    ],
)
async def test_plain_requests_may_be_answered_without_the_engines_api(more: dict[str, Any], light: bool):
    house = House([JSON], [{"body": b"{}"}], plain_requests="light")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **more}
    assert (await house.post("/v1/chat/completions", body)).status_code == 200
    assert (len(house.light.payloads), len(house.api.payloads)) == ((1, 0) if light else (0, 1))

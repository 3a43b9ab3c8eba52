"""A Processor's API of vLLM, with a small application in place of vLLM's: when it is made, how it asks workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from dynamo_local.components.dispatcher import Dispatcher
from dynamo_local.components.messages import ApiRequest
from dynamo_local.components.models_view import EngineApi, ModelCard, ModelsView
from dynamo_local.components.vllm_api.host import ApiHost
from dynamo_local.core.routing.choice import RoundRobin
from dynamo_local.errors import ConfigError, NoWorkers, WorkerBusy, WorkerLost
from dynamo_local.ports import KeyValue, PutEvent, SamplingParams, SnapshotEvent
from tests.fakes.data_plane.endpoints import FakeEndpointClient

SERVING = "dynamo_local.engines.vllm.api_server"
REQUEST = ApiRequest("r1", "/v1/completions", [("content-type", "application/json")], b"{}")
CORE = [b"vLLM's own words", b"a tensor"]


async def good(payload: Any, _context: Any) -> AsyncIterator[Any]:
    """Accepts, then two tokens."""
    yield {"token_ids": []}
    yield {"token_ids": [1, 2], "finish_reason": "length"}


async def lost(payload: Any, _context: Any) -> AsyncIterator[Any]:
    """Accepts, and dies."""
    yield {"token_ids": []}
    raise WorkerLost("gone")


class FakeApi:
    """`engines.vllm.api_server.VllmApi`: answers with the tokens that a worker gave to one request."""

    made: Any = None

    def __init__(self, engine: Any, serve_words: list[str], send: Any) -> None:
        logging.disable(logging.INFO)  # as vLLM's parser does, and forgets about it
        self.engine, self.serve_words, self._send = engine, serve_words, send
        FakeApi.made = self

    async def app(self) -> Any:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            tokens: list[int] = []
            sampling = SamplingParams(max_tokens=4)
            call = SimpleNamespace(token_ids=[5, 6], sampling=sampling, core=CORE, prefill_here="a salt", lora_id=7)
            async for batch in self._send(call):
                for item in batch:
                    tokens += item["token_ids"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": str(tokens).encode()})

        return answer

    def close(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's side is the fake one; FakeApi.made is the last that was made."""
    module = ModuleType(SERVING)
    build = staticmethod(lambda engine, words, send: FakeApi(engine, words, send))
    module.Engine = lambda *told: told  # type: ignore[attr-defined]
    module.VllmApi = SimpleNamespace(build=build.__func__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, SERVING, module)


def models(*, ready: bool = True) -> ModelsView:
    """With a vLLM worker, or none yet."""
    view = ModelsView("dynamo", "tiny")
    view.apply(SnapshotEvent((), 1))
    if ready:
        appear(view)
    return view


def appear(view: ModelsView) -> None:
    """A worker of vLLM becomes ready."""
    engine = EngineApi("vllm", "0.32.0", ["--model=m"], ["generate"])
    card = ModelCard("tiny", "VllmWorker", "generate", 4096, 1.0, engine)
    view.apply(PutEvent(KeyValue("dynamo/models/tiny:a1", card.encode(), 0xA1)))


def host(client: FakeEndpointClient, view: ModelsView) -> ApiHost:
    return ApiHost(Dispatcher(client, RoundRobin(), lambda ids: {}), view, "tiny", {"tool-call-parser": "hermes"})


async def body_of(subject: ApiHost) -> bytes:
    """Of the answer to one request."""
    return b"".join([item.get("body", b"") async for item in subject.run(REQUEST)])


@pytest.mark.usefixtures("serving")
async def test_a_request_goes_to_a_worker_in_vllms_own_words():
    """With what the graph must know beside them. The API is made of what the worker's card says, and our options."""
    client = FakeEndpointClient({1: good})
    assert await body_of(host(client, models())) == b"[1, 2]"
    (call,) = client.calls
    assert call.payload["core"] == CORE
    assert (call.payload["token_ids"], call.payload["prefill_here"]) == ([5, 6], "a salt")
    assert call.payload["lora_id"] == 7
    assert call.request_id == "r1"
    assert FakeApi.made.engine == (["--model=m"], 4096, ["generate"], "0.32.0")
    assert FakeApi.made.serve_words == ["--tool-call-parser=hermes"]
    assert not logging.root.manager.disable, "the Processor's log would end here"


@pytest.mark.usefixtures("serving")
async def test_a_request_that_gave_nothing_is_the_same_request_elsewhere():
    """Seed, grammar and number of answers are in vLLM's words, which are sent again as they were."""
    client = FakeEndpointClient({1: lost, 2: good})
    assert await body_of(host(client, models())) == b"[1, 2]"
    first, second = client.calls
    assert first.payload == second.payload
    assert [first.instance_id, second.instance_id] == [1, 2]


@pytest.mark.usefixtures("serving")
async def test_full_workers_are_told_as_that():
    client = FakeEndpointClient({1: good})
    client.refuse(1, WorkerBusy("full", retry_after_s=3.0))
    with pytest.raises(WorkerBusy) as raised:
        await body_of(host(client, models()))
    assert raised.value.details["retry_after_s"] == 3.0


@pytest.mark.usefixtures("serving")
async def test_it_is_made_for_the_first_request_that_finds_a_worker_of_vllm():
    FakeApi.made, view = None, models(ready=False)
    subject = host(FakeEndpointClient({1: good}), view)
    with pytest.raises(NoWorkers):
        await body_of(subject)
    appear(view)
    assert FakeApi.made is None
    await body_of(subject)
    assert FakeApi.made is not None


async def test_a_processor_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, SERVING, None)
    with pytest.raises(ConfigError, match="needs it in the Processor"):
        await body_of(host(FakeEndpointClient({1: good}), models()))

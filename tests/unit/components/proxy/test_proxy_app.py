"""The proxying Frontend before scripted workers: bytes untouched, statuses kept, failures sent on, hand-overs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_local.components.dispatcher import Dispatcher
from dynamo_local.components.models_view import ModelCard, ModelsView, prefill_models_prefix
from dynamo_local.components.openai.http_io import Whole
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.components.proxy import messages as payloads
from dynamo_local.components.proxy.app import ProxyDeps, create_app
from dynamo_local.components.proxy.messages import HttpFrontendConfig
from dynamo_local.components.proxy.pool import ModelDispatchers
from dynamo_local.core.routing.choice import RoundRobin
from dynamo_local.errors import DynamoError, WorkerDraining, WorkerLost
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent
from tests.fakes.data_plane.endpoints import FakeEndpointClient

Handler = Callable[[Any, Any], AsyncIterator[Any]]
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
CHAT = "/v1/chat/completions"
KV = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}


def answers(body: bytes, status: int = 200, headers: Mapping[str, str] = JSON) -> Handler:
    """A server that answers at once."""

    async def handle(payload: Any, _context: Any) -> AsyncIterator[Any]:
        yield payloads.Head(status, headers).item()
        for part in payloads.parts(body):
            yield part

    return handle


def streams(*pieces: bytes, fail: DynamoError | None = None, gate: asyncio.Event | None = None) -> Handler:
    """A server that streams, and may fail after that."""

    async def handle(payload: Any, _context: Any) -> AsyncIterator[Any]:
        yield payloads.Head(200, EVENTS).item()
        for piece in pieces:
            yield piece
        if gate is not None:
            await gate.wait()
        if fail is not None:
            raise fail

    return handle


def fails(error: DynamoError) -> Handler:
    """A worker that gives nothing but an error."""

    async def handle(payload: Any, _context: Any) -> AsyncIterator[Any]:
        raise error
        yield

    return handle


def refuses(status: int, body: bytes = b'{"error": "theirs"}', **headers: str) -> Handler:
    """A server that answers with that status, as its worker tells it."""
    return fails(payloads.refused("the server", Whole(status, body, {**JSON, **headers})))


class House:
    """An application before workers by instance id; `prefill` are the prefill workers, if there are any."""

    def __init__(
        self, workers: Mapping[int, Handler], prefill: Mapping[int, Handler] | None = None, **settings: Any
    ) -> None:
        self.workers = FakeEndpointClient(workers, component="Decode")
        self.prefill = FakeEndpointClient(prefill or {}, component="Prefill")
        models = ModelsView("dynamo")
        prefilling = ModelsView("dynamo", prefix=prefill_models_prefix("dynamo"))
        for view, handlers, component in ((models, workers, "Decode"), (prefilling, prefill, "Prefill")):
            view.apply(SnapshotEvent((), 1))
            for lease in handlers or {}:
                card = ModelCard("m", component, "generate", 100, 1.0)
                view.apply(PutEvent(KeyValue(f"m:{lease:x}", card.encode(), lease)))
        options = HttpFrontendConfig(**{"request_timeout_s": 10.0, **settings})
        clients = {"Decode": self.workers, "Prefill": self.prefill}

        async def make(components: tuple[str, ...]) -> Dispatcher:
            client = clients[components[0]]
            return Dispatcher(client, RoundRobin(), lambda ids: {}, options.max_tries, produced=payloads.produced)

        self.deps = ProxyDeps(
            models=models,
            settings=options,
            options=options,
            servers=ModelDispatchers(models, make),
            prefill=ModelDispatchers(prefilling, make),
        )
        self.app = create_app(self.deps)

    async def post(self, path: str = CHAT, **members: Any) -> httpx.Response:
        """One request, in memory."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            return await client.post(path, json={"model": "m", **members}, headers={"authorization": "Bearer k"})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its URL, on a real socket."""
        server = HttpServer(self.app, bind_socket("127.0.0.1", 0))
        await server.start()
        try:
            yield server.url
        finally:
            await server.stop()

    def asked(self, client: FakeEndpointClient) -> list[dict[str, Any]]:
        """The bodies that its workers were sent."""
        return [json.loads(call.payload["body"]) for call in client.calls]


async def test_a_whole_answer_comes_back_as_the_server_gave_it() -> None:
    body = b'{"id": "chatcmpl-1",  "choices": [], "own": {"a":1}}'
    house = House({1: answers(body)})
    answer = await house.post(messages=[], seed=7)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, body, "application/json")
    (call,) = house.workers.calls
    assert call.payload["path"] == CHAT
    assert json.loads(call.payload["body"]) == {"model": "m", "messages": [], "seed": 7}
    assert call.payload["headers"]["authorization"] == "Bearer k"
    # Unique inside, as servers name requests after it; and it begins with what the client looks for in their logs.
    assert call.payload["headers"]["x-request-id"] == call.request_id
    assert call.request_id.startswith(answer.headers["x-request-id"] + "-")


async def test_a_stream_comes_back_byte_for_byte() -> None:
    pieces = [b'data: {"a":1}\n\n', b": a comment\n\n", b"data: [DO", b"NE]\n\n"]
    answer = await House({1: streams(*pieces)}).post(stream=True)
    assert answer.content == b"".join(pieces)
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_other_paths_go_on_too(path: str) -> None:
    house = House({1: answers(b"{}")})
    assert (await house.post(path, input="x")).status_code == 200
    assert house.workers.calls[0].payload["path"] == path


async def test_a_clients_mistake_is_told_in_the_servers_words_and_not_repeated() -> None:
    house = House({n: answers(b'{"error": "too long"}', 400) for n in (1, 2)})
    answer = await house.post()
    assert (answer.status_code, answer.content) == (400, b'{"error": "too long"}')
    assert len(house.workers.calls) == 1


@pytest.mark.parametrize(
    "broken",
    [
        fails(WorkerLost("gone")),
        fails(WorkerDraining("leaving")),
        refuses(429),
        refuses(503),
        refuses(500),
        streams(fail=WorkerLost("gone after the head")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_gave_nothing_is_sent_to_another_server(broken: Handler, stream: bool) -> None:
    good = streams(b"data: x\n\n") if stream else answers(b"good")
    house = House({1: broken, 2: good})
    answer = await house.post(stream=stream)
    assert answer.status_code == 200
    assert answer.content == (b"data: x\n\n" if stream else b"good")


async def test_a_whole_answer_that_broke_off_is_begun_anew_elsewhere() -> None:
    async def breaks(payload: Any, _context: Any) -> AsyncIterator[Any]:
        yield payloads.Head(200, JSON).item()
        yield {"part": b"half an ans"}
        raise WorkerLost("gone")

    answer = await House({1: breaks, 2: answers(b"good")}).post()
    assert (answer.status_code, answer.content) == (200, b"good")


@pytest.mark.parametrize(("status", "retry_after"), [(429, "7"), (503, "7"), (500, None)])
async def test_when_all_fail_the_client_gets_the_servers_own_words(status: int, retry_after: str | None) -> None:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    answer = await House({n: refuses(status, b"full up", **headers) for n in (1, 2)}).post()
    assert (answer.status_code, answer.content) == (status, b"full up")
    assert answer.headers.get("retry-after") == retry_after


async def test_servers_may_fail_a_request_only_so_often() -> None:
    house = House({n: refuses(500) for n in range(1, 7)}, max_tries=2)
    assert (await house.post()).status_code == 500
    assert len(house.workers.calls) == 2


async def test_a_lost_server_without_another_is_a_typed_retryable_error() -> None:
    answer = await House({1: fails(WorkerLost("gone"))}).post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")


async def test_a_stream_that_broke_off_ends_with_an_error_and_no_done() -> None:
    house = House({1: streams(b"data: one\n\n", fail=WorkerLost("gone")), 2: streams(b"data: never\n\n")})
    answer = await house.post(stream=True)
    first, error, rest = answer.content.split(b"\n\n")
    assert (answer.status_code, first, rest) == (200, b"data: one", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_lost"


async def test_unknown_and_absent_models() -> None:
    house = House({1: answers(b"{}")})
    assert (await house.post(model="other")).status_code == 404
    house.deps.models.apply(SnapshotEvent((), 2))
    answer = await house.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")


async def test_a_client_that_goes_away_ends_the_servers_work() -> None:
    gate = asyncio.Event()
    house = House({1: streams(b"data: one\n\n", gate=gate)})
    async with house.served() as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", CHAT, json={"model": "m", "stream": True}) as response:
            async for _ in response.aiter_raw():
                break
        (stream,) = house.workers.streams
        async with asyncio.timeout(5):
            await asyncio.wait([stream.task])
    assert stream.task.cancelled()
    assert house.deps.activity.open == 0


async def test_the_metrics_count_what_passes() -> None:
    events = [b'data: {"choices":[]}\n\n'] * 3 + [b"data: [DONE]\n\n"]
    house = House({1: streams(*events)})
    await house.post(stream=True)
    text = house.deps.metrics.exposition().decode()
    assert 'dynamo_frontend_output_tokens_total{model="m"} 3.0' in text
    labels = 'endpoint="chat_completions",model="m",request_type="stream",status="success"'
    assert f"dynamo_frontend_requests_total{{{labels}}} 1.0" in text


async def test_the_metrics_take_a_whole_answers_usage_and_count_errors() -> None:
    usage = b'{"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
    house = House({1: answers(usage)})
    await house.post()
    text = house.deps.metrics.exposition().decode()
    assert 'dynamo_frontend_output_tokens_total{model="m"} 5.0' in text
    assert 'dynamo_frontend_input_sequence_tokens_sum{model="m"} 9.0' in text
    house = House({1: answers(b"{}", 400)})
    await house.post()
    assert 'status="error"} 1.0' in house.deps.metrics.exposition().decode()


# --- hand-overs ----------------------------------------------------------------------------------

PREFILLED = json.dumps({"id": "p", "kv_transfer_params": KV}).encode()


async def test_a_request_is_handed_over_in_two_steps_under_one_id() -> None:
    house = House({1: streams(b"data: x\n\ndata: y\n\n")}, {7: answers(PREFILLED)})
    answer = await house.post(stream=True, max_tokens=50, messages=[])
    assert answer.content == b"data: x\n\ndata: y\n\n"
    (prefill,), (decode,) = house.asked(house.prefill), house.asked(house.workers)
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode == {"model": "m", "stream": True, "max_tokens": 50, "messages": [], "kv_transfer_params": KV}
    ids = {call.payload["headers"]["x-request-id"] for call in (*house.prefill.calls, *house.workers.calls)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    "broken",
    [
        fails(WorkerLost("gone")),
        refuses(500),
        refuses(429),
        answers(b"{}"),
        answers(b"no json"),
        answers(b'{"error": "bad"}', 400),
        streams(b"data: surprise\n\n"),
    ],
)
async def test_a_prefill_that_fails_costs_the_hand_over_not_the_request(broken: Handler) -> None:
    house = House({1: answers(b"good")}, {7: broken})
    answer = await house.post(max_tokens=50)
    assert (answer.status_code, answer.content) == (200, b"good")
    assert house.asked(house.workers) == [{"model": "m", "max_tokens": 50}]


async def test_another_prefill_server_is_asked_first() -> None:
    house = House({1: answers(b"good")}, {7: fails(WorkerLost("gone")), 8: answers(PREFILLED)})
    await house.post()
    assert house.asked(house.workers) == [{"model": "m", "kv_transfer_params": KV}]


async def test_a_prefill_server_that_takes_too_long_is_not_waited_for() -> None:
    gate = asyncio.Event()
    house = House({1: answers(b"good")}, {7: streams(gate=gate)}, prefill_timeout_s=0.05)
    assert (await house.post()).content == b"good"


@pytest.mark.parametrize(
    "broken",
    [
        refuses(500),
        refuses(503),
        answers(b'{"error": "no such engine"}', 400),
        fails(WorkerLost("gone")),
        streams(b'data: {"error": {"message": "KV load failed"}}\n\n'),
        streams(
            b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
            b'data: {"error": {"message": "KV load failed"}}\n\n',
        ),
    ],
)
async def test_kv_that_cannot_be_used_is_computed_again_where_it_is_decoded(broken: Handler) -> None:
    """The prefill server may be gone before its KV was pulled: the client has got nothing, so it sees nothing."""

    async def handle(payload: Any, context: Any) -> AsyncIterator[Any]:
        with_kv = "kv_transfer_params" in json.loads(payload["body"])
        async for item in (broken if with_kv else streams(b"data: good\n\n"))(payload, context):
            yield item

    house = House({1: handle, 2: handle}, {7: answers(PREFILLED)})
    answer = await house.post(stream=True)
    assert (answer.status_code, answer.content) == (200, b"data: good\n\n")
    with_kv = [("kv_transfer_params" in asked) for asked in house.asked(house.workers)]
    assert with_kv in ([True, False], [True, True, False])  # 503: another one may have room for it


async def test_a_clients_mistake_is_told_also_where_prefills_are_handed_over() -> None:
    house = House({1: answers(b'{"error": "too long"}', 400)}, {7: answers(b'{"error": "too long"}', 400)})
    answer = await house.post()
    assert (answer.status_code, answer.content) == (400, b'{"error": "too long"}')


async def test_a_full_decode_server_sends_a_handed_over_request_to_another_with_its_kv() -> None:
    house = House({1: refuses(429), 2: answers(b"good")}, {7: answers(PREFILLED)})
    assert (await house.post()).content == b"good"
    assert all(asked["kv_transfer_params"] == KV for asked in house.asked(house.workers))


async def test_a_chats_first_event_is_held_back_and_then_given() -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    house = House({1: streams(role, b"data: a\n\n")}, {7: answers(PREFILLED)})
    assert (await house.post(stream=True)).content == role + b"data: a\n\n"
    house = House({1: streams(role)}, {7: answers(PREFILLED)})
    assert (await house.post(stream=True)).content == role


@pytest.mark.parametrize(("path", "members"), [("/v1/embeddings", {"input": "x"}), (CHAT, {"n": 2})])
async def test_what_cannot_be_handed_over_goes_straight_to_a_decode_server(path: str, members: dict[str, Any]) -> None:
    house = House({1: answers(b"good")}, {7: answers(PREFILLED)})
    assert (await house.post(path, **members)).content == b"good"
    assert house.prefill.calls == []


async def test_prefill_servers_alone_serve_no_model() -> None:
    house = House({}, {7: answers(PREFILLED)})
    assert (await house.post()).status_code == 404

"""The application's answers, in memory: routes, refusals, errors, health and the model list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dynamo_local import errors
from dynamo_local.ports import DeleteEvent
from tests.fakes.data_plane.processor import FakeEndpoint, answer, last, prompt, text, usage

Make = Callable[..., Any]
MODEL = "sim-Model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}
CHAT_URL = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def post(house: Any, url: str = CHAT_URL, body: Any = None, **kwargs: Any) -> httpx.Response:
    """One request against an application in memory."""
    async with house.client() as client:
        return await client.post(url, json=CHAT if body is None else body, **kwargs)


def problem(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, which must be all that the body holds."""
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert response.headers["content-type"] == "application/json"
    return body["error"]


async def test_a_chat_answer(house: Make):
    made = house(FakeEndpoint(answer("Hello", ", ", "world", reason="length")))
    response = await post(made)
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["created"] > 1_600_000_000
    assert {name: body[name] for name in ("object", "model", "system_fingerprint")} == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": None,
    }
    assert body["choices"][0]["message"]["content"] == "Hello, world"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == usage(completion_tokens=3)
    assert made.endpoint.streams[0].ended
    assert made.endpoint.streams[0].closed.is_set()


async def test_a_completion_answer(house: Make):
    response = await post(house(), "/v1/completions", COMPLETION)
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Hello world")


async def test_the_processor_gets_the_request_with_an_id_of_its_own(house: Make):
    made = house()
    for _ in range(2):
        await post(made, body={**CHAT, "max_completion_tokens": 5, "stop": "x"}, headers={"x-request-id": "same"})
    first, second = made.endpoint.payloads
    request_id = first.pop("request_id")
    assert first == {**CHAT, "max_tokens": 5, "stop": ["x"]}
    assert made.endpoint.calls[0] == {"instance_id": None, "request_id": request_id, "timeout_s": 10.0}
    assert second["request_id"] not in (request_id, "same")


async def test_the_clients_request_id_is_echoed(house: Make):
    async with house().client() as client:
        for url in ("/health", "/v1/models", "/metrics", "/nowhere"):
            assert (await client.get(url, headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        response = await client.post(CHAT_URL, json=CHAT, headers={"x-request-id": "abc-2"})
        assert response.headers["x-request-id"] == "abc-2"
        assert len((await client.get("/live")).headers["x-request-id"]) == 32
        for bad in ("a b", "x" * 129):
            assert len((await client.get("/live", headers={"x-request-id": bad})).headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "n": 129}, "n"),
        ({**CHAT, "functions": [{}]}, "functions"),
        ({**CHAT, "max_tokens": "x"}, "max_tokens"),
        ({**CHAT, "colour": 1}, "colour"),
        ({"model": MODEL}, "messages"),
    ],
)
async def test_a_bad_request_is_a_400_that_names_the_parameter(house: Make, body: Any, param: str):
    made = house()
    response = await post(made, body=body)
    assert response.status_code == 400
    assert problem(response)["param"] == param
    assert made.endpoint.payloads == []


async def test_a_body_that_is_not_json_is_a_400(house: Make):
    async with house().client() as client:
        for content in (b"", b"{", b"\xff"):
            response = await client.post(CHAT_URL, content=content, headers=JSON)
            assert response.status_code == 400
            assert problem(response)["code"] == "invalid_json"


async def test_a_body_too_large_is_a_413(house: Make):

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    made = house(max_body_bytes=1024)
    async with made.client() as client:
        for content in (b"x" * 1025, pieces()):
            response = await client.post(CHAT_URL, content=content, headers=JSON)
            assert response.status_code == 413
            assert "1024" in problem(response)["message"]
        assert (await client.post(CHAT_URL, json=CHAT)).status_code == 200


async def test_a_body_that_does_not_come_is_a_408(house: Make, monkeypatch: pytest.MonkeyPatch):
    """A client must not hold up a drain for ever."""
    monkeypatch.setattr("dynamo_local.components.openai.http_io.BODY_TIMEOUT_S", 0.02)

    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with house().client() as client:
        response = await client.post(CHAT_URL, content=stuck(), headers=JSON)
    assert response.status_code == 408
    assert problem(response)["code"] == "request_timeout"


async def test_an_unknown_model_is_a_404(house: Make):
    made = house()
    for response in (
        await post(made, body={**CHAT, "model": "other"}),
        await post(made, "/v1/completions", {**COMPLETION, "model": "other"}),
    ):
        assert response.status_code == 404
        error = problem(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "`other`" in error["message"]
    async with made.client() as client:
        assert problem(await client.get("/v1/models/other"))["code"] == "model_not_found"


async def test_a_model_without_a_worker_is_a_503_that_says_when_to_come_back(house: Make, serve_model: Make):
    """Once seen, or expected by `served_model_name`; any other is still a 404."""
    made = house(serve_model=False, served_model_name="expected")
    made.models.apply(DeleteEvent(serve_model(made.models, "seen", 5)))
    for name, status in (("expected", 503), ("seen", 503), ("never", 404)):
        response = await post(made, body={**CHAT, "model": name})
        assert response.status_code == status
        assert ("retry-after" in response.headers) is (status == 503)
        async with made.client() as client:
            assert (await client.get(f"/v1/models/{name}")).status_code == status


async def test_the_model_list(house: Make, serve_model: Make):
    made = house(serve_model=False)
    async with made.client() as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
        key = serve_model(made.models, "org/m", 7, created=12.9, max_model_len=77)
        expected = {"id": "org/m", "object": "model", "created": 12, "owned_by": "dynamo", "max_model_len": 77}
        expected["root"] = "org/m"
        assert (await client.get("/v1/models")).json()["data"] == [expected]
        assert (await client.get("/v1/models/org/m")).json() == expected
        made.models.apply(DeleteEvent(key))
        assert (await client.get("/v1/models")).json()["data"] == []


async def test_health_says_whether_a_model_is_served(house: Make, serve_model: Make):
    made = house(serve_model=False)
    async with made.client() as client:

        async def health() -> tuple[int, Any]:
            response = await client.get("/health")
            return response.status_code, response.json()

        assert await health() == (503, {"status": "starting", "models": [], "instances": 0})
        serve_model(made.models, "m", 1)
        serve_model(made.models, "m", 2)
        assert await health() == (200, {"status": "ready", "models": ["m"], "instances": 2})
        made.deps.draining.set()
        assert await health() == (503, {"status": "draining", "models": ["m"], "instances": 2})
        live = await client.get("/live")
        assert (live.status_code, live.json()) == (200, {"status": "live"})


async def test_a_draining_frontend_takes_nothing_new(house: Make):
    made = house()
    made.deps.draining.set()
    response = await post(made)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["connection"] == "close"
    assert problem(response)["code"] == "worker_draining"
    assert made.endpoint.payloads == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["call", "stream", "after the prompt"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.NoWorkers("no VllmWorker is registered"), 503),
        (errors.WorkerBusy("all are full", retry_after_s=2.5), 429),
        (errors.InvalidRequest("5000 tokens do not fit", param="messages"), 400),
        (errors.DeadlineExceeded("late"), 504),
        (errors.StreamGap("gap"), 502),
        (errors.EngineError("broken"), 500),
        (errors.RemoteError("bug", type="KeyError"), 500),
        (errors.NatsUnavailable("away"), 503),
        (RuntimeError("a bug of ours"), 500),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(
    house: Make, error: Exception, status: int, where: str, stream: bool
):
    script = {"call": error, "stream": [error], "after the prompt": [[prompt()], error]}[where]
    made = house(FakeEndpoint(script))
    response = await post(made, body={**CHAT, "stream": stream})
    assert response.status_code == status
    wanted = {503: "1", 429: "3"}.get(status)
    assert response.headers.get("retry-after") == wanted
    shown = problem(response)
    assert shown["param"] == ("messages" if status == 400 else None)
    if isinstance(error, errors.DynamoError):
        assert shown["message"] == error.message
    assert all(stream.closed.is_set() for stream in made.endpoint.streams)
    assert made.deps.activity.open == 0


async def test_an_unexpected_failure_is_logged_with_its_traceback(house: Make, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        await post(house(FakeEndpoint(RuntimeError("a bug of ours"))))
    assert "a bug of ours" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("error", [errors.WorkerDraining("leaving"), errors.WorkerLost("died")])
async def test_another_processor_is_asked_when_one_took_nothing(house: Make, error: Exception):
    made = house(FakeEndpoint(error, error, answer("Hello")))
    assert (await post(made)).json()["choices"][0]["message"]["content"] == "Hello"
    assert len({payload["request_id"] for payload in made.endpoint.payloads}) == 1


async def test_asking_other_processors_is_bounded(house: Make):
    made = house(FakeEndpoint(errors.WorkerDraining("leaving")))
    assert (await post(made)).status_code == 503
    assert len(made.endpoint.payloads) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([[text("Hel")]], 502),
        ([], 502),
        ([[last(reason="error")]], 500),
        ([[last(reason="abort")]], 503),
    ],
)
async def test_an_answer_without_a_good_end_is_no_answer(house: Make, script: Any, status: int, stream: bool):
    """Missing text is never passed off as all there is."""
    response = await post(house(FakeEndpoint(script)), body={**CHAT, "stream": stream})
    if stream and script == [[text("Hel")]]:
        assert response.status_code == 200
        assert "worker_lost" in response.text
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_the_frontends_own_deadline_holds(house: Make, stream: bool):
    """Also when the data plane forgets its own."""
    made = house(FakeEndpoint([asyncio.Event()]), request_timeout_s=0.02)
    response = await post(made, body={**CHAT, "stream": stream})
    assert response.status_code == 504
    assert "request_timeout_s" in problem(response)["message"]
    assert made.endpoint.streams[0].closed.is_set()


async def test_beyond_max_inflight_is_a_429(house: Make):
    gate = asyncio.Event()
    made = house(FakeEndpoint([gate, *answer("x")]), max_inflight=1)
    running = asyncio.create_task(post(made))
    await made.endpoint.called.wait()
    response = await post(made)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert problem(response)["type"] == "rate_limit_error"
    gate.set()
    assert (await running).status_code == 200
    assert (await post(made)).status_code == 200


async def test_a_stream_that_ends_badly_after_its_last_item_is_complete(house: Make):
    for stream in (False, True):
        made = house(FakeEndpoint([*answer("Hello"), errors.WorkerLost("x")]))
        response = await post(made, body={**CHAT, "stream": stream})
        assert response.status_code == 200
        assert "error" not in response.text


async def test_a_processor_that_lingers_after_its_last_item_is_cut_off(house: Make, monkeypatch: pytest.MonkeyPatch):
    """The wait for a stream's end is bounded."""
    monkeypatch.setattr("dynamo_local.components.openai.generation.END_WAIT_S", 0.01)
    made = house(FakeEndpoint([*answer("Hello"), asyncio.Event()]))
    assert (await post(made)).json()["choices"][0]["message"]["content"] == "Hello"
    assert made.endpoint.streams[0].closed.is_set()


async def test_an_unknown_url_or_method_is_told_in_the_same_format(house: Make):
    async with house().client() as client:
        assert problem(await client.get("/v1/nothing"))["code"] == "unknown_url"
        response = await client.get(CHAT_URL)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert "GET /v1/chat/completions" in problem(response)["message"]

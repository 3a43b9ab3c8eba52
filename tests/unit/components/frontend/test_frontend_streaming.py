"""Over a real socket: server-sent events, the `openai` client, clients that leave, and a drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from dynamo_local import errors
from dynamo_local.components.openai.server import HttpServer
from dynamo_local.system.executors import ended
from tests.fakes.data_plane.processor import FakeEndpoint, answer, last, prompt, text, usage

Make = Callable[..., Any]
MODEL = "sim-Model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
STREAM = {**CHAT, "stream": True}
CHAT_URL = "/v1/chat/completions"
HEADERS = [(b"content-type", b"application/json")]
JSON = "Content-Type: application/json\r\n"
SOON_S = 5.0


def events(raw: str) -> list[Any]:
    """The `data:` of each event; `[DONE]` as the string it is."""
    blocks = raw.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def openai_client(url: str, **options: Any) -> openai.AsyncOpenAI:
    """The real client, without its retries unless asked for."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0, **options})


def gated(house: Make) -> tuple[Any, asyncio.Event]:
    """What streams "a", and "b" once the event is set."""
    gate = asyncio.Event()
    return house(FakeEndpoint([[text("a")], gate, [text("b")], [last()]])), gate


async def test_a_stream_is_made_of_events(house: Make):
    made = house(FakeEndpoint([[prompt(7)], [text("Hel"), text("lo")], [text("!"), last(reason="length")]]))
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(CHAT_URL, json=STREAM)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {"content": "!"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
        assert all("usage" not in chunk for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1

        response = await client.post(CHAT_URL, json={**STREAM, "stream_options": {"include_usage": True}})
        *chunks, counted, _ = events(response.text)
        assert (counted["choices"], counted["usage"]) == ([], usage())
        assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_completion_streams_too(house: Make):
    async with house().served() as server, httpx.AsyncClient(base_url=server.url) as client:
        body = {"model": MODEL, "prompt": "Hi", "stream": True}
        *chunks, _ = events((await client.post("/v1/completions", json=body)).text)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " world", ""]
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_tokens_are_sent_as_they_come(house: Make):
    made, gate = gated(house)
    async with (
        asyncio.timeout(SOON_S),
        made.served() as server,
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", CHAT_URL, json=STREAM) as response,
    ):
        lines = response.aiter_lines()
        seen = ""
        while '"content":"a"' not in seen:
            seen = await anext(lines)
        gate.set()
        assert '"content":"b"' in "".join([line async for line in lines])


async def test_items_that_come_together_are_written_together(house: Make):
    made = house(FakeEndpoint([[text(str(n)) for n in range(50)], [last()]]))
    sent: list[dict[str, Any]] = []
    body = json.dumps(STREAM).encode()
    inbox = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT_URL, "headers": HEADERS}
    scope |= {"query_string": b"", "root_path": ""}
    await made.app(scope, receive, send)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert [item.count(b"data: ") for item in bodies] == [51, 2, 0]


async def test_an_error_in_mid_stream_is_the_last_event(house: Make):
    """And no `[DONE]` after it: a client that has not seen that has not seen everything."""
    made = house(FakeEndpoint([[text("Hel")], errors.WorkerLost("the decode worker died")]))
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(CHAT_URL, json=STREAM)
        assert response.status_code == 200
        *_, end = events(response.text)
        assert end == {
            "error": {
                "message": "the decode worker died",
                "type": "server_error",
                "param": None,
                "code": "worker_lost",
            }
        }
        assert (await client.get("/live")).status_code == 200


async def test_an_error_in_a_stream_of_anthropics_is_an_event_of_its_name(house: Make):
    """Its client reads named events alone: without the name a cut answer would look like a whole one."""
    item = {"text": "Hel", "num_tokens": 1, "finish_reason": None, "usage": None, "index": 0}
    made = house(FakeEndpoint([[item], errors.WorkerLost("the decode worker died")]))
    body = {"model": MODEL, "max_tokens": 9, "stream": True, "messages": CHAT["messages"]}
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        last = (await client.post("/v1/messages", json=body)).text.strip().split("\n\n")[-1]
        name, data = last.splitlines()
        assert name == "event: error"
        told = json.loads(data.removeprefix("data: "))
        assert (told["type"], told["error"]["type"], told["error"]["code"]) == ("error", "api_error", "worker_lost")
        refused = await client.post("/v1/messages", json={**body, "model": "nobody"})
        assert (refused.status_code, refused.json()["type"]) == (404, "error")
        assert refused.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", [CHAT_URL, "/v1/messages"])
async def test_an_answer_that_nobody_has_seen_is_asked_for_again(house: Make, path: str):
    item = {"index": 0, "finish_reason": None, "usage": None, "text": "Hel", "num_tokens": 1}
    end = [{**item, "text": "", "num_tokens": 0, "finish_reason": "stop"}, {**item, "num_tokens": 0, "usage": usage()}]
    good = answer("Hello") if path == CHAT_URL else [[{**item, "text": "Hello"}], end[:1], end[1:]]
    taken = [{**item, "text": "", "num_tokens": 0}]
    body = {"model": MODEL, "max_tokens": 9, "messages": CHAT["messages"]}
    for begun, stream in (([item], False), (taken, False), (taken, True)):
        made = house(FakeEndpoint([begun, errors.WorkerLost("gone")], good))
        async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post(path, json={**body, "stream": stream})
        assert (response.status_code, len(made.endpoint.calls)) == (200, 2)
        assert response.text.count("Hel") == 1
        assert "error" not in response.text
        assert all(each.closed.is_set() for each in made.endpoint.streams)


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (errors.WorkerLost("gone"), 3),
        (errors.WorkerLost("gone", tried=3), 1),
        (errors.KillsWorkers("gone"), 1),
        (errors.EngineError("broken"), 1),
        (errors.NoWorkers("none"), 1),
    ],
)
async def test_what_no_worker_can_do_is_not_asked_for_ever(house: Make, error: Exception, calls: int):
    """Nor again at all, where several workers were lost with it before it gave a token: it may be its fault."""
    made = house(FakeEndpoint([error]))
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post(CHAT_URL, json=CHAT)).status_code >= 500
    assert len(made.endpoint.calls) == calls


async def test_a_repetition_says_how_many_workers_were_lost_with_the_request(house: Make):
    made = house(FakeEndpoint([errors.WorkerLost("gone", lost=1)], answer("Hello")))
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post(CHAT_URL, json=CHAT)).status_code == 200
    assert [payload.get("lost") for payload in made.endpoint.payloads] == [None, 1]


async def test_the_deadline_in_mid_stream_is_an_error_event(house: Make):
    """A stream that stalls does not hang its client."""
    made = house(FakeEndpoint([[text("Hel")], asyncio.Event()]), request_timeout_s=0.1)
    async with made.served() as server, httpx.AsyncClient(base_url=server.url) as client:
        *_, end = events((await client.post(CHAT_URL, json=STREAM)).text)
        assert end["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(house: Make, stream: bool):
    """It cannot read them. The end of the connection ends its body."""
    made = house(FakeEndpoint(answer("Hello", " world")))
    body = json.dumps({**CHAT, "stream": stream}).encode()
    async with made.served() as server, asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(f"POST {CHAT_URL} HTTP/1.0\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _, whole = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.split(b"\r\n")[0].endswith(b"200 OK")
    assert b"chunked" not in head
    events = [json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")] if stream else None
    if events is None:
        assert json.loads(whole)["choices"][0]["message"]["content"] == "Hello world"
    else:
        assert whole.startswith(b"data: {")
        assert whole.endswith(b"data: [DONE]\n\n")
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "Hello world"


@pytest.mark.timing
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_its_request_at_once(house: Make, stream: bool, begun: bool):
    made = house(FakeEndpoint([*([[text("a")]] if begun else []), asyncio.Event()]))
    body = json.dumps({**CHAT, "stream": stream}).encode()
    async with made.served() as server, asyncio.timeout(SOON_S):
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {CHAT_URL} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await made.endpoint.called.wait()
        if stream and begun:
            await reader.readuntil(b'"content":"a"')
        writer.close()
        await writer.wait_closed()
        left_s = asyncio.get_running_loop().time()
        await made.endpoint.streams[0].closed.wait()
        assert asyncio.get_running_loop().time() - left_s < 1.0
        await made.deps.activity.wait_idle()
    assert b"dynamo_frontend_disconnected_clients 1.0" in made.deps.metrics.exposition()


@asynccontextmanager
async def unread_stream(
    house: Make, source: Any, request_timeout_s: float = 60.0
) -> AsyncIterator[tuple[Any, HttpServer, asyncio.StreamReader, asyncio.Transport]]:
    """A stream of these items, whose client does not read yet."""
    made = house(FakeEndpoint(source), request_timeout_s=request_timeout_s)
    body = json.dumps(STREAM).encode()
    async with made.served() as server, asyncio.timeout(30):
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = f"POST {CHAT_URL} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await made.endpoint.called.wait()
        yield made, server, reader, writer.transport
        writer.transport.abort()
        await made.deps.activity.wait_idle()


async def test_a_slow_reader_holds_its_own_stream_back(house: Make):
    taken = 0

    def counted(_: Any) -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield [text("x" * 10_000)]

    async with unread_stream(house, counted) as (made, _, _, transport):
        before = -1
        while taken != before:
            before = taken
            await asyncio.sleep(0.1)
        assert 0 < taken * 10_000 < 32 * 1024 * 1024
        transport.abort()
        await made.endpoint.streams[0].closed.wait()


def endless(_: Any) -> Any:
    while True:
        yield [text("x" * 10_000)]


async def waiting_for_its_reader(made: Any) -> Any:
    """The Frontend's activity, once its answer waits for a client that does not read."""
    activity = made.deps.activity
    while not activity.unread_s():
        await asyncio.sleep(0.01)
    return activity


async def test_a_stream_that_nobody_reads_ends_while_the_frontend_leaves(house: Make):
    async with unread_stream(house, endless) as (made, _, _, _):
        activity = await waiting_for_its_reader(made)
        ending = asyncio.create_task(activity.end_unread(0.2))
        await activity.wait_idle()
        assert activity.abandoned == 1
        await ended(ending)


async def test_one_that_is_read_a_little_at_a_time_does_not(house: Make):
    async with unread_stream(house, endless) as (made, _, reader, transport):
        activity = await waiting_for_its_reader(made)
        ending = asyncio.create_task(activity.end_unread(0.3))
        transport.resume_reading()
        taken = 0
        for _ in range(10):
            await asyncio.sleep(0.1)
            taken += len(await reader.readexactly(200_000))
        assert activity.abandoned == 0
        await ended(ending)


LARGE = "x" * 8_000_000
"""More than the buffers of both sides take."""


@pytest.mark.parametrize(
    "script",
    [[[text("a")], [last(LARGE)]], [[text(LARGE)], [text("more")], [last()]]],
    ids=["the end", "a part before the end"],
)
async def test_who_never_reads_an_answer_is_cut_off(house: Make, monkeypatch: pytest.MonkeyPatch, script: Any):
    """A drain waits for every exchange, and would for ever."""
    for module in ("route", "http_io"):
        monkeypatch.setattr(f"dynamo_local.components.openai.{module}.SEND_TIMEOUT_S", 0.1)
    async with unread_stream(house, script, request_timeout_s=0.5) as (made, server, _, _):
        await made.deps.activity.wait_idle()
        await server.wait_unconnected()


async def test_the_openai_client_gets_an_answer(house: Make):
    async with house().served() as server, openai_client(server.url) as client:
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            temperature=0.0,
            max_completion_tokens=5,
            stop=["x"],
            user="me",
            extra_body={"ignore_eos": True, "nvext": {"top_k": 3}},
        )
        assert chat.choices[0].message.content == "Hello world"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.total_tokens == 9
        assert chat.usage.prompt_tokens_details is not None
        completion = await client.completions.create(model=MODEL, prompt="Hi")
        assert completion.choices[0].text == "Hello world"
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "dynamo"


async def test_the_openai_client_streams(house: Make):
    async with house().served() as server, openai_client(server.url) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        parts = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
        assert "".join([part.choices[0].text async for part in parts]) == "Hello world"


async def test_the_openai_client_raises_its_own_errors(house: Make):
    made = house(
        FakeEndpoint(
            errors.WorkerBusy("full"), errors.NoWorkers("none"), [[text("a")], errors.StreamGap("frames are missing")]
        )
    )
    async with made.served() as server, openai_client(server.url) as client:
        create = client.chat.completions.create
        message: Any = [{"role": "user", "content": "Hi"}]
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model=MODEL, messages=message, n=129)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="other", messages=message)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.RateLimitError):
            await create(model=MODEL, messages=message)
        with pytest.raises(openai.InternalServerError):
            await create(model=MODEL, messages=message)
        cut = aiter(await create(model=MODEL, messages=message, stream=True))
        assert [(await anext(cut)).choices[0].delta.content for _ in range(2)] == ["", "a"]
        with pytest.raises(openai.APIError, match="frames are missing"):
            await anext(cut)


async def test_the_openai_client_comes_back_after_retry_after(house: Make):
    made = house(FakeEndpoint(errors.WorkerBusy("full"), answer("Hello")))
    async with made.served() as server, openai_client(server.url, max_retries=1) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        assert chat.choices[0].message.content == "Hello"


async def test_many_streams_at_once_are_all_right(house: Make):

    def script(payload: dict[str, Any]) -> Any:
        said = payload["messages"][0]["content"]
        return [[prompt()], *([text(f"{said}:{n} ")] for n in range(5)), [last()]]

    made = house(FakeEndpoint(script))
    limits = httpx.Limits(max_connections=200)
    async with made.served() as server, httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:

        async def one(n: int) -> str:
            body = {**STREAM, "messages": [{"role": "user", "content": f"r{n}"}]}
            *chunks, done = events((await client.post(CHAT_URL, json=body)).text)
            assert done == "[DONE]"
            return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

        texts = await asyncio.gather(*(one(n) for n in range(200)))
    assert texts == ["".join(f"r{n}:{k} " for k in range(5)) for n in range(200)]


async def test_a_drain_lets_streams_finish_and_refuses_what_is_new(house: Make):
    """Then the socket is closed, and with it the connections that idle."""
    made, gate = gated(house)
    async with (
        asyncio.timeout(SOON_S),
        made.served() as server,
        httpx.AsyncClient(base_url=server.url) as client,
        httpx.AsyncClient(base_url=server.url) as other,
    ):
        running = asyncio.create_task(client.post(CHAT_URL, json=STREAM))
        await made.endpoint.called.wait()
        made.deps.draining.set()
        refused = await other.post(CHAT_URL, json=STREAM)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert (await other.get("/health")).json()["status"] == "draining"
        idle = asyncio.create_task(made.deps.activity.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        gate.set()
        *_, done = events((await running).text)
        assert done == "[DONE]"
        await idle
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/live")

"""Two plain HTTP servers under `dynamo serve -f`: requests, scaling, drains, crashes, on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.drivers.http_graphs import MODEL, ask, cut, held, http_graph, kill_server, loaded, section, seen, text_of
from tests.drivers.scaled import ascale, kinds, names, settled
from tests.drivers.scaled import events as event_log
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    """In turn, so that each server has its share, whatever the loads."""
    with http_graph(Frontend={"router": "round-robin"}, Server=section("aggregated", 2)) as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    """The module's graph with two ready servers, before and after."""
    yield shared_graph
    await settled(shared_graph, 60.0)
    if names(shared_graph, "Server") != ["Server", "Server_1"]:
        await ascale(shared_graph, "Server", "=1")
        await auntil(lambda: names(shared_graph, "Server") == ["Server"], what=shared_graph.states)
        await ascale(shared_graph, "Server", "=2")
        await settled(shared_graph, 60.0)


async def test_openais_client_gets_answers_whole_and_streamed_from_both(graph: Served) -> None:
    async with graph.client() as client:
        assert await ask(client, 6) == text_of(6)
        assert await ask(client, 6, stream=True) == text_of(6)
        answer = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=3)
        assert (answer.choices[0].text, answer.usage and answer.usage.completion_tokens) == (text_of(3), 3)
        assert (await client.embeddings.create(model=MODEL, input="Hi")).data[0].embedding == [0.5]
        (model,) = (await client.models.list()).data
        assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, 4096)
        await asyncio.gather(*(ask(client, 20) for _ in range(8)))
    assert len({note["port"] for note in seen(graph, path="/v1/chat/completions")}) == 2
    async with httpx.AsyncClient(base_url=graph.url) as http:
        other = await http.post("/v1/chat/completions", json={"model": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found"), "the server's own error"
        assert (await http.get("/health")).json() == {"status": "ready", "models": [MODEL], "instances": 2}
        assert 'dynamo_frontend_requests_total{endpoint="chat_completions"' in (await http.get("/metrics")).text


async def test_scaling_up_and_down_under_load_fails_no_request(graph: Served) -> None:
    async with loaded(graph) as found:
        row = await auntil(lambda: (w := graph.worker("Server")).get("load") and w, what=lambda: graph.worker("Server"))
        assert (row["state"], bool(row["lease"]), row["load"]["kv_total_blocks"]) == ("ready", True, 1000)
        for target, count in (("=4", 4), ("=1", 1), ("=2", 2)):
            await ascale(graph, "Server", target)
            await auntil(lambda count=count: len(names(graph, "Server")) == count, 60.0, what=graph.states)
            await auntil(lambda: set(graph.states().values()) == {"ready"}, 60.0, what=graph.states)
            await found.more(10)
    found.check()
    assert list(cut(graph)) == []
    assert len(seen(graph, sigterm_with=0)) >= 3


async def test_a_drained_worker_finishes_its_streams_before_its_server_is_asked_to_go(graph: Served) -> None:
    async with graph.client() as client:
        streams = [asyncio.create_task(ask(client, 150, stream=True)) for _ in range(4)]
        await auntil(lambda: held(graph, "Server_1"), what=lambda: seen(graph)[-4:])
        await ascale(graph, "Server", "-1")
        assert await asyncio.gather(*streams) == [text_of(150)] * 4
    await auntil(lambda: "Server_1" not in graph.states(), 30.0, what=graph.states)
    assert list(cut(graph)) == []


async def test_a_killed_server_cuts_only_what_it_had_begun_and_comes_back(graph: Served) -> None:
    async with graph.client() as client:
        streams = [asyncio.create_task(ask(client, 400, stream=True)) for _ in range(4)]
        await auntil(lambda: held(graph, "Server") == held(graph, "Server_1") == 2, what=lambda: seen(graph)[-4:])
        kill_server(graph, "Server")
        answers = await asyncio.gather(*streams, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(failed) == 2
        assert all(isinstance(error, openai.APIError) and error.code == "worker_lost" for error in failed), failed
        assert [answer for answer in answers if isinstance(answer, str)] == [text_of(400)] * 2
        assert await asyncio.gather(*(ask(client, 5) for _ in range(4))) == [text_of(5)] * 4
    await auntil(lambda: names(graph, "Server") == ["Server", "Server_1"], 60.0, what=graph.states)
    assert "ProcessExited" in kinds(event_log(graph, "Server"))


PLANNER = {"adjustment-interval": 2, "metric-pulling-interval": 0.5, "max-gpu-budget": 2}
STREAMS = 20
"""The server has room for so many: its KV is full."""


@pytest.mark.full
@pytest.mark.timeout(150)
async def test_a_full_cache_brings_another_server_and_an_idle_one_goes() -> None:
    server = section("aggregated", 1)
    server["ServiceArgs"] = {"workers": 1, "resources": {"gpu": 1}}
    with http_graph(Planner=PLANNER, Server=server).started() as served:
        async with served.client() as client:
            streams = [asyncio.create_task(ask(client, 20_000, stream=True)) for _ in range(STREAMS)]
            await auntil(lambda: names(served, "Server") == ["Server", "Server_1"], 40.0, what=served.states)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        await auntil(lambda: names(served, "Server") == ["Server"], 40.0, what=served.states)
        await auntil(lambda: "Server_1" not in served.states(), 20.0, what=served.states)
        explained = await asyncio.to_thread(served.cli, "planner", "explain", "20")
        assert "Server" in explained.stdout, explained.stderr
        assert list(cut(served)) == []


@pytest.mark.full
async def test_two_sections_serve_two_models_behind_one_frontend() -> None:
    sections = {"Chat": section("aggregated", 1), "Other": section("aggregated", 1, model="other")}
    with http_graph(**sections).started() as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=30.0) as http:
            models = (await http.get("/v1/models")).json()["data"]
            assert sorted(model["id"] for model in models) == sorted([MODEL, "other"])
            for model in (MODEL, "other", "other"):
                asked = {"model": model, "messages": [{"role": "user", "content": "Count!"}], "max_tokens": 3}
                answer = (await http.post("/v1/chat/completions", json=asked)).json()
                assert (answer["model"], answer["choices"][0]["message"]["content"]) == (model, text_of(3))
            unknown = await http.post("/v1/chat/completions", json={"model": "third"})
            assert unknown.status_code == 404
            assert all(name in unknown.json()["error"]["message"] for name in (MODEL, "other"))
        asked_of = [note["port"] for note in seen(served, path="/v1/chat/completions")]
        assert sorted(asked_of.count(port) for port in set(asked_of)) == [1, 2]

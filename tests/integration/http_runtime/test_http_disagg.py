"""Prefill and decode servers under `dynamo serve -f`: both see one hand-over, and no prefill is a request's end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drivers.http_graphs import ask, cut, http_graph, kill_server, loaded, section, seen, text_of
from tests.drivers.scaled import ascale, names, settled
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    with http_graph(Decode=section("decode", 2), Prefill=section("prefill", 2, "--prefill-s", "0.02")) as served:
        yield served.start()


def handed(served: Served, member: str) -> list[dict[str, object]]:
    asked = [note for note in seen(served, body=None)]
    return [note for note in asked if note["body"].get("kv_transfer_params", {}).get(member)]


@pytest.mark.full
async def test_both_servers_see_the_same_hand_over(graph: Served) -> None:
    async with graph.client() as client:
        assert await ask(client, 8, stream=True) == text_of(8)
        assert await ask(client, 8) == text_of(8)
    prefilled, decoded = handed(graph, "do_remote_decode"), handed(graph, "do_remote_prefill")
    assert len(prefilled) == len(decoded) == 2
    for first, second in zip(prefilled, decoded, strict=True):
        assert (first["body"]["max_tokens"], first["body"]["stream"]) == (1, False)
        assert second["body"]["kv_transfer_params"]["remote_port"] == first["port"] != second["port"]
        assert second["body"]["max_tokens"] == 8
        assert first["headers"]["x-request-id"] == second["headers"]["x-request-id"]


@pytest.mark.full
async def test_prefill_servers_come_and_go_under_load_and_no_request_fails(graph: Served) -> None:
    async with loaded(graph) as found:
        for target, count in (("=3", 3), ("=1", 1), ("=2", 2)):
            await ascale(graph, "Prefill", target)
            await auntil(lambda count=count: len(names(graph, "Prefill")) == count, 60.0, what=graph.states)
            await found.more(5)
    found.check()
    assert list(cut(graph)) == []


@pytest.mark.full
async def test_a_killed_prefill_server_costs_no_request(graph: Served) -> None:
    await settled(graph, 60.0)
    async with loaded(graph) as found:
        for name in ("Prefill", "Prefill_1"):
            kill_server(graph, name)
        await found.more(20)
        await auntil(lambda: names(graph, "Prefill") == ["Prefill", "Prefill_1"], 60.0, what=graph.states)
    found.check()


@pytest.mark.full
async def test_decode_servers_come_and_go_under_load_and_no_request_fails(graph: Served) -> None:
    await settled(graph, 60.0)
    async with loaded(graph) as found:
        for target, count in (("=1", 1), ("=2", 2)):
            await ascale(graph, "Decode", target)
            await auntil(lambda count=count: len(names(graph, "Decode")) == count, 60.0, what=graph.states)
            await found.more(5)
    found.check()
    assert list(cut(graph)) == []

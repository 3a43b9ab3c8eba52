"""Prefill and decode servers under `dynamo serve -f`: hand-overs, scaling, and flips by SGLang's role switch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.drivers.http_graphs import ask, cut, http_graph, kill_server, loaded, section, seen, server_of, text_of
from tests.drivers.scaled import ascale, names, settled
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra

BASE = {"Decode": 2, "Prefill": 2}
FLIP_TIMEOUT_S = 30.0


def switched(role: str, *words: str) -> dict[str, Any]:
    """Two such servers, that take requests of their role alone."""
    return section(role, 2, "--role", role, *words, **{"role-switch": "/pd_role_switch"})


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    with http_graph(
        **{role.title(): switched(role, "--prefill-s", "0.02") for role in ("decode", "prefill")}
    ) as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    """The module's graph, with two workers of each role, before and after."""
    yield shared_graph
    await settled(shared_graph)
    for gives in BASE:
        while len(there := names(shared_graph, gives)) > BASE[gives]:
            await flipped(shared_graph, there[-1])


async def flipped(served: Served, name: str) -> str:
    """`dynamo flip NAME --wait`: its new name."""
    pid, server = served.pids()[name], server_of(served, name).pid
    await asyncio.to_thread(served.ok, "flip", name, "--wait", "--json")
    (became,) = (new for new, of in served.pids().items() if of == pid)
    assert became != name
    assert server_of(served, became).pid == server
    return became


def wrong(served: Served) -> list[dict[str, Any]]:
    """Requests that reached a server in another role than they were meant for."""
    return seen(served, wrong_role=None)


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
@pytest.mark.parametrize("component", ["Prefill", "Decode"])
async def test_servers_of_either_role_come_and_go_and_no_request_fails(graph: Served, component: str) -> None:
    async with loaded(graph) as found:
        for target, count in (("=3", 3), ("=1", 1), ("=2", 2)):
            await ascale(graph, component, target)
            await auntil(lambda count=count: len(names(graph, component)) == count, 60.0, what=graph.states)
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
async def test_servers_flip_both_ways_under_load_and_no_request_fails(graph: Served) -> None:
    async with loaded(graph, 4) as found:
        for _ in range(2):
            became = await flipped(graph, names(graph, "Decode")[-1])
            assert became in names(graph, "Prefill")
            await found.more(4)
            await flipped(graph, became)
            await found.more(4)
    found.check()
    assert wrong(graph) == []
    done = [note["switch"]["new_role"] for note in seen(graph, switch=None) if note["switch"]["success"]]
    assert done == ["prefill", "decode"] * 2


@pytest.mark.full
async def test_a_flip_waits_for_its_streams_and_is_taken_back(graph: Served) -> None:
    async with graph.client() as client:
        streams = [asyncio.create_task(ask(client, 400, stream=True)) for _ in range(2)]  # one for each server
        victim = names(graph, "Decode")[-1]
        await auntil(lambda: (graph.worker(victim)["load"] or {}).get("request_active_slots"), FLIP_TIMEOUT_S)
        flipping = asyncio.create_task(asyncio.to_thread(graph.cli, "flip", victim))
        await flipping
        assert graph.states()[victim] == "flipping"
        done = await asyncio.to_thread(graph.cli, "flip", victim, "--cancel")
        assert (done.returncode, done.stderr) == (0, "")
        assert not any(stream.done() for stream in streams)
        assert graph.states()[victim] == "ready"
        async with loaded(graph, 4) as found:
            await found.more(6)
        found.check()
        assert await asyncio.gather(*streams) == [text_of(400)] * 2
    assert wrong(graph) == []


@pytest.mark.full
async def test_a_server_that_does_not_change_stays_what_it_was() -> None:
    stuck = ("--stuck", "cannot rebuild")
    with http_graph(Decode=switched("decode", *stuck), Prefill=switched("prefill", *stuck)).started() as served:
        victim = names(served, "Decode")[-1]
        done = await asyncio.to_thread(served.cli, "flip", victim, "--wait")
        assert done.returncode == 1
        assert "has stayed what it was" in done.stderr
        assert any("cannot rebuild" in note["text"] for note in served.status()["notes"])
        async with loaded(served, 4) as found:
            await found.more(6)
        found.check()
        assert served.states()[victim] == "ready"
        assert wrong(served) == []

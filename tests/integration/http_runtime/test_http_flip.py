"""Servers that change their role when asked (SGLang's call) flip under `dynamo serve -f`: idle first, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.drivers.http_graphs import ask, http_graph, loaded, section, seen, server_of, text_of
from tests.drivers.scaled import names, settled
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra

BASE = {"Decode": 2, "Prefill": 2}
FLIP_TIMEOUT_S = 30.0


def switched(role: str, *words: str) -> dict[str, Any]:
    """Two such servers, that take requests of their role alone."""
    return section(role, 2, "--role", role, *words, **{"role-switch": "/pd_role_switch"})


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    with http_graph(Decode=switched("decode"), Prefill=switched("prefill")) as served:
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
    done = await asyncio.to_thread(served.cli, "flip", name, "--wait")
    assert done.returncode == 0, done.stderr
    (became,) = (new for new, of in served.pids().items() if of == pid)
    assert became != name
    assert server_of(served, became).pid == server
    return became


def wrong(served: Served) -> list[dict[str, Any]]:
    """Requests that reached a server in another role than they were meant for."""
    return seen(served, wrong_role=None)


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
    with http_graph(Decode=switched("decode", *stuck), Prefill=switched("prefill", *stuck)) as served:
        served.start()
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

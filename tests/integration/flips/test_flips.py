"""Role flips on real processes: nothing is lost, no worker has two roles, a flip is quick; also while etcd is away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from dynamo_local.errors import WorkerDraining, WorkerLost
from tests.drivers.endpoint_client import endpoint_client, request_plane, without_news
from tests.drivers.flips import BASE, aflip, counts, each_in_one_role, facts, first_answer_s, flip, flip_to, quantiles
from tests.drivers.scaled import PATIENCE_S, events, kinds, load, names, settled, streaming
from tests.drivers.served import Served, auntil, expected, messages, tokenizer
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra

LONGER_THAN_A_FLIP = 1500
"""Tokens: nine seconds. A flip takes a fraction of one, and several on a starved machine."""


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    with Served(*counts()) as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    """The module's graph, with two workers of each role, before and after; their names may be others."""
    yield shared_graph
    await flip_to(shared_graph, BASE)


async def test_flips_both_ways_under_load_lose_nothing(graph: Served) -> None:
    before = facts(graph)
    async with load(graph, streams=8) as streams:
        for _ in range(3):
            became = await flip(graph, names(graph, "VllmWorker")[-1])
            assert became in names(graph, "PrefillWorker")
            await streams.more(8)
            await flip(graph, became)
            await streams.more(8)
    streams.check()
    assert facts(graph) == before
    listed = graph.cli("ctl", "list").stdout.strip().split(",")
    workers = [row["watcher_name"].lower() for row in graph.status()["workers"] if row["pid"]]
    assert set(workers) <= set(listed)
    assert sum("worker" in each for each in listed) == len([each for each in workers if "worker" in each])
    for row in graph.status()["workers"]:
        if row["pid"]:
            assert graph.cli("ctl", "list", row["watcher_name"]).stdout.strip() == str(row["pid"])


async def test_streams_outlast_the_role_in_which_they_began(graph: Served) -> None:
    prompts = [f"Tell me something long, number {n}." for n in range(6)]
    async with streaming(graph, *prompts, tokens=LONGER_THAN_A_FLIP) as streams:
        became = await flip(graph, names(graph, "VllmWorker")[-1])
        assert not any(stream.done() for stream in streams)
        row = graph.worker(became)
        assert row["component"] == "PrefillWorker"
        answers = await asyncio.gather(*streams)
    assert answers == [expected(prompt, LONGER_THAN_A_FLIP, ignore_eos=True) for prompt in prompts]


async def test_two_components_change_in_one_decision(graph: Served) -> None:
    there = ("PrefillWorker", "-1", "VllmWorker", "+1", "--flip", "--wait")
    await asyncio.to_thread(graph.ok, "scale", *there)
    assert [len(names(graph, each)) for each in BASE] == [3, 1]
    refused = await asyncio.to_thread(graph.cli, "scale", *there)
    assert refused.returncode == 1
    assert "without a ready worker" in refused.stderr
    await asyncio.to_thread(graph.ok, "scale", "VllmWorker", "-1", "PrefillWorker", "+1", "--flip", "--wait", "--json")
    assert [len(names(graph, each)) for each in BASE] == [2, 2]


async def test_requests_of_the_old_role_are_served_or_sent_on(graph: Served) -> None:
    ids = tokenizer().encode_chat(messages("Too late?"))
    request = {"request_id": "late", "token_ids": ids, "sampling": {"max_tokens": 4, "ignore_eos": True}}
    name = names(graph, "VllmWorker")[-1]
    where = ("VllmWorker", "generate")
    async with request_plane(graph) as (plane, kv):
        client = await plane.client(kv, graph.namespace, *where)
        await client.wait_for_instances(5.0)
        old = int(graph.worker(name)["lease"], 16)
        late = without_news(plane, client, *where)
        flipping = asyncio.create_task(aflip(graph, name))
        async with asyncio.timeout(5.0):
            while old in {each.instance_id for each in client.instances()}:
                await asyncio.sleep(0.001)  # stragglers are served for a quarter of a second only
        at_once = [item async for item in await late.call(request, instance_id=old)]
        await flipping
        await asyncio.sleep(0.5)  # twice the time for which stragglers are served
        with pytest.raises((WorkerDraining, WorkerLost)) as refused:
            await late.call(request, instance_id=old)
        sent_on = [item async for item in await late.call(request)]
    assert refused.value.retryable
    tokens = [[token for item in answer for token in item["token_ids"]] for answer in (at_once, sent_on)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4


@pytest.mark.alone
@pytest.mark.timing
@pytest.mark.parametrize(
    ("gives", "takes", "endpoint"),
    [
        ("PrefillWorker", "VllmWorker", "generate"),
        pytest.param("VllmWorker", "PrefillWorker", "canary", marks=pytest.mark.full),
    ],
)
async def test_half_a_second_from_the_command_to_the_first_request(
    graph: Served, gives: str, takes: str, endpoint: str
) -> None:
    took_s = []
    async with streaming(graph, *(f"Stay a while, {n}." for n in range(4)), tokens=12_000) as streams:
        async with endpoint_client(graph, takes, endpoint) as client:
            for _ in range(3):
                took_s.append(await first_answer_s(graph, names(graph, gives)[-1], client))
                await flip(graph, names(graph, takes)[-1])
        assert not any(stream.done() for stream in streams)
    assert min(took_s) < 0.5, took_s


async def test_a_flip_whose_canary_dies_ends_in_the_old_role(graph: Served) -> None:
    stays, other = names(graph, "PrefillWorker")[-1], names(graph, "PrefillWorker")[0]
    lease = graph.worker(stays)["lease"]
    os.kill(graph.worker(other)["pid"], signal.SIGSTOP)
    try:
        done = await asyncio.to_thread(graph.cli, "flip", stays, "--wait")
    finally:
        os.kill(graph.worker(other)["pid"], signal.SIGCONT)
    assert done.returncode == 1
    assert "has stayed what it was" in done.stderr
    await settled(graph)
    assert graph.worker(stays)["lease"] == lease
    assert kinds(events(graph, stays))[-2:] == ["FlipRequested", "FlipFailed"]
    assert any("no hand-off" in note["text"] for note in graph.status()["notes"])
    async with load(graph, streams=4) as streams:
        await streams.more(8)
    streams.check()


async def test_a_flip_is_taken_back(graph: Served) -> None:
    stays, other = names(graph, "PrefillWorker")[-1], names(graph, "PrefillWorker")[0]
    os.kill(graph.worker(other)["pid"], signal.SIGSTOP)
    try:
        await aflip(graph, stays)
        assert graph.states()[stays] == "flipping"
        done = await asyncio.to_thread(graph.cli, "flip", stays, "--cancel")
    finally:
        os.kill(graph.worker(other)["pid"], signal.SIGCONT)
    assert (done.returncode, done.stderr) == (0, "")
    assert graph.states()[stays] == "ready"
    again = await asyncio.to_thread(graph.cli, "flip", stays, "--cancel")
    assert again.returncode == 1
    async with load(graph, streams=4) as streams:
        await streams.more(8)
    streams.check()


@pytest.mark.full
async def test_an_arbiter_that_is_killed_in_mid_flip_is_followed_by_one_that_knows() -> None:
    with Served(*counts(), "--on-arbiter-death", "keep").started() as served:
        pids = set(facts(served))
        async with load(served, streams=4) as streams:
            for delay_s in (0.0, 0.02, 0.05, 0.1):
                gives = max(BASE, key=lambda each: len(names(served, each)))
                flipping = asyncio.create_task(aflip(served, names(served, gives)[-1]))
                await asyncio.sleep(delay_s)  # the moment is what is tried, not what is waited for
                await asyncio.to_thread(served.kill_arbiter)
                await asyncio.gather(flipping, return_exceptions=True)
                await asyncio.to_thread(served.adopt)
                await settled(served)
                assert set(facts(served)) == pids
                await each_in_one_role(served)
                await streams.more(4)
        streams.check()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(1800)
async def test_a_thousand_flips(graph: Served) -> None:
    before, took_s, count = facts(graph), [], int(os.environ.get("DYN_FLIPS", "1000"))
    endpoints = {"PrefillWorker": "canary", "VllmWorker": "generate"}
    async with load(graph, streams=4) as streams, contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(endpoint_client(graph, name, of)) for name, of in endpoints.items()
        }
        for n in range(count):
            gives, takes = ("PrefillWorker", "VllmWorker") if n % 2 else ("VllmWorker", "PrefillWorker")
            took_s.append(await first_answer_s(graph, names(graph, gives)[-1], clients[takes]))
            assert streams.failures == []
            if n % 50 == 49:
                print(f"{n + 1} flips, seconds to the first answer: {quantiles(took_s)}", flush=True)
    streams.check()
    await flip_to(graph, BASE)
    assert facts(graph) == before
    assert quantiles(took_s)[0.99] < 0.5, sorted(took_s)[-20:]
    for pid in before:
        assert len(os.listdir(f"/proc/{pid}/fd")) < 200


LEASE_TTL_S = 30
"""Longer than what is tried here: etcd forgets no lease while it stands still."""


def graph_on(etcd: RealEtcd, nats: RealNats, namespace: str) -> Served:
    """Two workers of each role, on an etcd that may be stopped."""
    env = {"ETCD_ENDPOINTS": etcd.endpoint, "NATS_SERVER": nats.address, "DYN_LEASE_TTL_S": str(LEASE_TTL_S)}
    return Served(*counts(), namespace=namespace, env=env)


@contextmanager
def away(etcd: RealEtcd) -> Iterator[None]:
    etcd.pause()
    try:
        yield
    finally:
        etcd.resume()


async def flip_while_away(graph: Served, etcd: RealEtcd, delay_s: float, away_s: float) -> None:
    """A flip of whichever role has more; etcd stops so long after the command."""
    victim = names(graph, max(BASE, key=lambda each: len(names(graph, each))))[-1]
    flipping = asyncio.create_task(aflip(graph, victim))
    await asyncio.sleep(delay_s)  # the moment is what is tried, not what is waited for
    with away(etcd):
        await flipping  # committed, whatever etcd does
        await asyncio.sleep(away_s)  # so long an outage is what is tried
    await settled(graph, PATIENCE_S)
    await each_in_one_role(graph)


@pytest.mark.full
async def test_a_flip_that_cannot_register_ends_in_the_old_role(own_etcd: RealEtcd, nats_server: RealNats) -> None:
    with graph_on(own_etcd, nats_server, "gone").started() as graph:
        pids = set(facts(graph))
        async with load(graph, streams=4) as streams:
            before = names(graph, "VllmWorker")
            with away(own_etcd):
                await aflip(graph, before[-1])
                await auntil(lambda: "FlipFailed" in kinds(events(graph, before[-1])), PATIENCE_S, what=graph.status)
            await settled(graph, PATIENCE_S)
            await each_in_one_role(graph)
            assert names(graph, "VllmWorker") == before
            await streams.more(4)
            for delay_s in (0.02, 0.05, 0.1):
                await flip_while_away(graph, own_etcd, delay_s, 12.0)
                await streams.more(4)
        streams.check()
        assert set(facts(graph)) == pids

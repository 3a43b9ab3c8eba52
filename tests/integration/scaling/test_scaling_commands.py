"""`dynamo scale` and `dynamo drain` under load: nothing is lost, and no worker is touched but the one that is meant."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from dynamo_local.cli.common import ArbiterRefused
from tests.drivers.scaled import ascale, command, events, kinds, load, names, settled, streaming
from tests.drivers.served import Served, asking, auntil, expected

pytestmark = pytest.mark.infra

BASE = {"VllmWorker": 2, "PrefillWorker": 2}


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    """Two decode and two prefill workers, on eight simulated GPUs.

    A token takes 20 ms and more: what a test measures must not wait for the test's own client of many streams.
    """
    counts = (f"--{name}.ServiceArgs.workers={count}" for name, count in BASE.items())
    with Served(*counts, "--VllmWorker.sim.speed=0.25") as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    yield shared_graph
    await settled(shared_graph)
    for component, count in BASE.items():
        right = [component, *(f"{component}_{n}" for n in range(1, count))]
        if names(shared_graph, component) != right:  # the names as well: so down to the template first
            await ascale(shared_graph, component, "=1")
            await auntil(lambda name=component: names(shared_graph, name) == [name], what=shared_graph.states)
            await ascale(shared_graph, component, f"={count}")
    await settled(shared_graph)
    await auntil(lambda: len(shared_graph.states()) == 1 + sum(BASE.values()), what=shared_graph.states)


BOTH = ["VllmWorker", "VllmWorker_1"]


async def test_scaling_under_load_loses_nothing_and_touches_no_sibling(graph: Served) -> None:
    before = graph.pids()
    async with load(graph) as streams:
        assert await ascale(graph, "VllmWorker", "+1") == [("spawn", "VllmWorker_2")]
        await settled(graph)
        assert await ascale(graph, "VllmWorker", "-1") == [("drain", "VllmWorker_2")]
        await settled(graph)
        assert await ascale(graph, "VllmWorker", "=4") == [("spawn", "VllmWorker_2"), ("spawn", "VllmWorker_3")]
        await settled(graph)
        assert await ascale(graph, "VllmWorker", "2") == [("drain", "VllmWorker_3"), ("drain", "VllmWorker_2")]
        await auntil(lambda: "VllmWorker_2" not in graph.states() and "VllmWorker_3" not in graph.states())
        await streams.more(20)
    streams.check()
    assert graph.pids() == before
    assert sorted(graph.statefile()["components"]) == sorted(f"dynamo_{name}" for name in before)


@pytest.mark.full
async def test_new_workers_get_the_lowest_free_names_and_their_own_devices(graph: Served) -> None:
    await ascale(graph, "VllmWorker", "+2")
    await settled(graph)
    rows = {row["watcher_name"]: row for row in graph.status()["workers"]}
    held = [gpu for row in rows.values() for gpu in row["gpus"]]
    await ascale(graph, "VllmWorker", "-2")
    await auntil(lambda: names(graph, "VllmWorker") == BOTH and len(graph.states()) == len(rows) - 2)
    assert all(len(rows[f"dynamo_VllmWorker_{n}"]["gpus"]) == 1 for n in (2, 3))
    assert len(held) == len(set(held)) == 6
    assert {w["pid"] for w in rows.values()} >= set(graph.pids().values())


@pytest.mark.timing
async def test_one_more_while_a_sibling_drains_takes_that_drain_back(graph: Served) -> None:
    before, seen, took_s = graph.pids(), len(events(graph)), []
    prompts = [f"Long story {n}." for n in range(4)]
    async with streaming(graph, *prompts, tokens=400) as streams:
        for _ in range(3):
            assert await ascale(graph, "VllmWorker", "-1") == [("drain", "VllmWorker_1")]
            await auntil(lambda: graph.worker("VllmWorker_1")["lease"] is None)
            began_s = time.monotonic()
            assert await ascale(graph, "VllmWorker", "+1") == [("cancel_drain", "VllmWorker_1")]
            await auntil(lambda: graph.states()["VllmWorker_1"] == "ready")
            took_s.append(time.monotonic() - began_s)
        leases = graph.keys("dynamo/components/VllmWorker/generate")
        answers = [await stream for stream in streams]
    async with load(graph) as after:
        await auntil(lambda: after.right > 12)
    assert answers == [expected(prompt, 400, ignore_eos=True) for prompt in prompts]
    assert min(took_s) < 1.0
    assert graph.pids() == before
    assert len(leases) == 2
    assert "Spawned" not in kinds(events(graph)[seen:])
    after.check()


async def test_drain_and_cancel_by_name(graph: Served) -> None:
    before = graph.pids()
    prompts = [f"A stream here or there, {n}." for n in range(6)]
    async with streaming(graph, *prompts, tokens=400) as streams:
        await auntil(
            lambda: (graph.worker("VllmWorker_1")["load"] or {}).get("request_active_slots"), what=graph.status
        )
        drained = await asyncio.to_thread(graph.cli, "drain", "dynamo_VllmWorker_1")
        status = await asyncio.to_thread(graph.cli, "status")
        cancelled = await asyncio.to_thread(graph.cli, "drain", "dynamo_VllmWorker_1", "--cancel", "--wait")
        answers = [await stream for stream in streams]
    assert (drained.returncode, cancelled.returncode) == (0, 0), (drained.stderr, cancelled.stderr)
    assert "draining" in drained.stdout
    row = next(line for line in status.stdout.splitlines() if "VllmWorker_1" in line)
    assert "draining" in row
    assert re.search(r"[1-9] requests? left", row), row
    assert graph.states()["VllmWorker_1"] == "ready"
    assert graph.pids() == before
    assert answers == [expected(prompt, 400, ignore_eos=True) for prompt in prompts]


@pytest.mark.full
async def test_the_last_ready_worker_needs_force_and_its_name_comes_back(graph: Served) -> None:
    with pytest.raises(ArbiterRefused, match=r"dynamo_VllmWorker would go, the last ready worker .* --force"):
        await ascale(graph, "VllmWorker", "=0")
    with pytest.raises(ArbiterRefused, match="Processor runs in Frontend's processes and has no workers of its own"):
        await ascale(graph, "Processor", "-1")
    assert names(graph, "VllmWorker") == BOTH, "a refusal changes nothing"
    going = await ascale(graph, "VllmWorker", "=0", force=True)
    await auntil(lambda: graph.states().get("VllmWorker") == "exited" and "VllmWorker_1" not in graph.states())
    template = await auntil(lambda: _template(graph), what=graph.statefile)
    async with graph.client() as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(**asking("Is nobody there?", 4))
    coming = await ascale(graph, "VllmWorker", "+1"), await ascale(graph, "VllmWorker", "+1")
    await settled(graph)
    assert going == [("drain", "VllmWorker_1"), ("drain", "VllmWorker")]
    assert (template.get("pid"), template.get("lease")) == (None, None)
    assert template["cmd"]
    assert refused.value.status_code == 503
    assert coming == ([("spawn", "VllmWorker")], [("spawn", "VllmWorker_1")])
    async with load(graph) as after:
        await auntil(lambda: after.right > 6)
    after.check()


def _template(served: Served) -> dict[str, Any] | None:
    """The bare entry, once it holds no GPU any more."""
    entry = served.statefile()["components"]["dynamo_VllmWorker"]
    return entry if entry["resources"] == {} else None


@pytest.mark.full
async def test_more_than_there_are_gpus_for_is_refused_as_a_whole(graph: Served) -> None:
    with pytest.raises(ArbiterRefused, match=r"too few GPUs: 5 needed, 4 of 8 free"):
        await ascale(graph, "VllmWorker", "+5")
    assert names(graph, "VllmWorker") == BOTH


@pytest.mark.full
async def test_the_victim_policy_chooses(graph: Served) -> None:
    async with streaming(graph, "Keep me busy.", tokens=200) as [stream]:
        busy = await auntil(lambda: _busy(graph), what=graph.status)
        idle = next(name for name in BOTH if name != busy)
        taken = await ascale(graph, "VllmWorker", "-1", victim_policy="least-loaded")
        answer = await stream
    await auntil(lambda: graph.states().get(idle, "exited") == "exited")
    await ascale(graph, "VllmWorker", "=2")
    await settled(graph)
    assert taken == [("drain", idle)]
    assert answer == expected("Keep me busy.", 200, ignore_eos=True)


def _busy(served: Served) -> str | None:
    """The one decode worker that streams, once both loads are known."""
    rows = [served.worker(name) for name in BOTH]
    slots = {
        row["watcher_name"].removeprefix("dynamo_"): (row["load"] or {}).get("request_active_slots") for row in rows
    }
    if None in slots.values() or sum(slots.values()) != 1:
        return None
    return max(slots, key=lambda name: slots[name])


@pytest.mark.timing
@pytest.mark.full
async def test_commands_are_answered_while_drains_run(graph: Served) -> None:
    await ascale(graph, "VllmWorker", "=4")
    await settled(graph)
    took_s = []
    prompts = [f"A stream that outlasts this test, {n}." for n in range(8)]
    async with streaming(graph, *prompts, tokens=400) as streams:
        going = await ascale(graph, "VllmWorker", "=2")
        more = await ascale(graph, "PrefillWorker", "+1")
        while _two_drain(graph) and len(took_s) < 20:
            took_s.append(await _answered(graph))
        answers = [await stream for stream in streams]
    assert going == [("drain", "VllmWorker_3"), ("drain", "VllmWorker_2")]
    assert more == [("spawn", "PrefillWorker_2")]
    assert len(took_s) > 3
    assert min(took_s) < 0.05, took_s
    assert statistics.median(took_s) < 0.5, took_s
    assert answers == [expected(prompt, 400, ignore_eos=True) for prompt in prompts]


async def _answered(served: Served) -> float:
    took_s = []
    for name, properties in (("status", {}), ("scale", {"component": "Frontend", "target": "=1"})):
        began_s = time.monotonic()
        await asyncio.to_thread(command, served, name, **properties)
        took_s.append(time.monotonic() - began_s)
    return max(took_s)


def _two_drain(served: Served) -> bool:
    return list(served.states().values()).count("draining") == 2

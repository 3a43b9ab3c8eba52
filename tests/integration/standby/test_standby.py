"""Workers that sleep and wake on real graphs: nothing is lost, and another worker may use the GPU meanwhile."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.errors import EXIT_FAILED
from tests.drivers.scaled import ascale, events, kinds, load, names, settled, streaming
from tests.drivers.served import AGG, Served, auntil, until
from tests.drivers.sleepers import asleep, awake, sleep, until_state, wake, wake_all

pytestmark = pytest.mark.infra

SPEED = 4.0
WAKE_S = 0.3
"""Seconds of a wake at that speed."""


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    """Two decode workers, a prefill worker, on four simulated GPUs. They keep what they run."""
    words = (
        "--gpus=sim:4",
        "--VllmWorker.ServiceArgs.workers=2",
        "--VllmWorker.ServiceArgs.standby=0",
        "--PrefillWorker.ServiceArgs.standby=0",
        f"--VllmWorker.sim.speed={SPEED}",
        f"--VllmWorker.sim.wake_s={WAKE_S * SPEED}",
        f"--VllmWorker.sim.sleep_s={0.2 * SPEED}",
        "--on-arbiter-death",
        "keep",
    )
    with Served(*words) as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    yield shared_graph
    await wake_all(shared_graph)
    await settled(shared_graph)
    assert names(shared_graph, "VllmWorker")[:2] == ["VllmWorker", "VllmWorker_1"]


CYCLES = 4
"""Each level of sleep twice."""
LATE_MAX_S = 0.05


async def test_cycles_under_load_lose_nothing(graph: Served) -> None:
    pid = graph.pids()["VllmWorker_1"]
    async with load(graph, 8) as streams:
        for turn in range(CYCLES):
            await asleep(graph, "VllmWorker_1", level=1 + turn % 2)
            row = graph.worker("VllmWorker_1")
            assert (row["gpus"], row["endpoints"], row["standby"]["gpus"]) == ([], [], ["1"])
            assert row["lease"]
            await auntil(lambda: graph.worker("VllmWorker_1")["load"] is not None)
            await streams.more(4)
            await awake(graph, "VllmWorker_1")
            await streams.more(4)
        streams.check()
    assert graph.pids()["VllmWorker_1"] == pid
    whole = ["SleepRequested", "Slept", "WakeRequested", "Woken"]
    await auntil(lambda: kinds(events(graph, "VllmWorker_1"))[-4:] == whole)


async def test_a_long_stream_is_finished_before_its_worker_sleeps(graph: Served) -> None:
    async with streaming(graph, "tell me", "tell me more", tokens=1500) as tasks:
        victim = next(name for name in ("VllmWorker", "VllmWorker_1") if graph.worker(name)["load"] is not None)
        sleep(graph, victim)
        await auntil(lambda: graph.states()[victim] in ("falling_asleep", "sleeping"))
        assert [reason for _, reason in await asyncio.gather(*tasks)] == ["length", "length"]
    await until_state(graph, victim, "sleeping")


@pytest.mark.alone
@pytest.mark.timing
@pytest.mark.full
async def test_a_wake_takes_what_is_configured_and_at_most_fifty_milliseconds(graph: Served) -> None:
    took_s = []
    for _ in range(5):
        await asleep(graph, "VllmWorker_1")
        await awake(graph, "VllmWorker_1")
        await auntil(lambda: kinds(events(graph, "VllmWorker_1"))[-2:] == ["WakeRequested", "Woken"])
        asked, woken = events(graph, "VllmWorker_1")[-2:]
        took_s.append(woken["time"] - asked["time"])
    assert WAKE_S <= statistics.median(took_s) <= WAKE_S + LATE_MAX_S


async def test_a_sleepers_gpu_is_given_to_somebody_else_and_it_is_told_who_has_it(graph: Served) -> None:
    await asleep(graph, "VllmWorker_1")
    made = await ascale(graph, "PrefillWorker", "+2")
    assert [kind for kind, _ in made] == ["spawn", "spawn"]
    await until_state(graph, "PrefillWorker_2", "ready")
    assert graph.worker("PrefillWorker_2")["gpus"] == ["1"]
    with pytest.raises(ArbiterRefused, match=r"cannot be woken on its GPUs.*dynamo_PrefillWorker_2 holds GPU 1"):
        wake(graph, "VllmWorker_1")
    await ascale(graph, "PrefillWorker", "=1")
    reply = wake(graph, "VllmWorker_1")
    assert reply["state"] in ("sleeping", "waking")
    await until_state(graph, "VllmWorker_1", "ready")
    await auntil(lambda: "PrefillWorker_2" not in graph.states())


async def test_scale_wakes_before_it_starts(graph: Served) -> None:
    await asleep(graph, "VllmWorker_1")
    assert await ascale(graph, "VllmWorker", "+1") == [("wake", "VllmWorker_1")]
    await until_state(graph, "VllmWorker_1", "ready")
    await asleep(graph, "VllmWorker_1")
    assert await ascale(graph, "VllmWorker", "+1", no_wake=True) == [("spawn", "VllmWorker_2")]
    await until_state(graph, "VllmWorker_2", "ready")
    assert graph.states()["VllmWorker_1"] == "sleeping"
    assert await ascale(graph, "VllmWorker", "-1") == [("drain", "VllmWorker_2")]
    await auntil(lambda: "VllmWorker_2" not in graph.states())


async def test_the_commands_wait_and_answer_as_their_siblings(graph: Served) -> None:
    done = await asyncio.to_thread(graph.ok, "sleep", "VllmWorker_1", "--level", "2", "--wait", "--json")
    assert json.loads(done)["watcher_name"] == "dynamo_VllmWorker_1"
    assert graph.states()["VllmWorker_1"] == "sleeping"
    shown = await asyncio.to_thread(graph.cli, "status")
    assert "sleeping" in shown.stdout
    refused = await asyncio.to_thread(graph.cli, "sleep", "VllmWorker_1", "--level", "1")
    assert refused.returncode == EXIT_FAILED
    assert "sleeping at level 2 already" in refused.stderr
    await asyncio.to_thread(graph.ok, "wake", "VllmWorker_1", "--wait", "--json")
    assert graph.states()["VllmWorker_1"] == "ready"


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("falling_asleep", marks=pytest.mark.full),
        "sleeping",
        pytest.param("waking", marks=pytest.mark.full),
    ],
)
async def test_an_arbiter_that_dies_meanwhile_is_succeeded_by_one_that_goes_on(graph: Served, state: str) -> None:
    async with load(graph, 4) as streams:
        if state == "falling_asleep":
            await asyncio.to_thread(sleep, graph, "VllmWorker_1")
        else:
            await asleep(graph, "VllmWorker_1")
        if state == "waking":
            await asyncio.to_thread(wake, graph, "VllmWorker_1")
        pid = graph.pids()["VllmWorker_1"]
        await asyncio.to_thread(graph.kill_arbiter)
        await asyncio.to_thread(graph.adopt)
        await until_state(graph, "VllmWorker_1", "ready" if state == "waking" else "sleeping")
        assert graph.pids()["VllmWorker_1"] == pid
        await streams.more(4)
        if state != "waking":
            await awake(graph, "VllmWorker_1")
        await streams.more(4)
        streams.check()
    until(lambda: graph.states()["VllmWorker_1"] == "ready")


WORDS = (
    "--gpus=sim:3",
    "--VllmWorker.ServiceArgs.workers=1",
    "--VllmWorker.sim.speed=4",
    "--VllmWorker.sim.sleep_host_bytes=1000000",
)
GOES_WRONG = (*WORDS, "--VllmWorker.ServiceArgs.standby=0", "--VllmWorker.ServiceArgs.workers=2")
"""Both awake at first."""


@pytest.mark.full
async def test_so_many_are_kept_asleep() -> None:
    with Served(*WORDS, "--VllmWorker.ServiceArgs.standby=1", target=AGG).started() as served:
        await until_state(served, "VllmWorker_1", "sleeping")
        row = served.worker("VllmWorker_1")
        assert row["standby"]["wanted"]
        assert (row["standby"]["vram_bytes"], row["standby"]["host_bytes"]) == (1_500_000_000, 1_000_000)
        async with load(served, 4) as streams:
            assert await ascale(served, "VllmWorker", "+1") == [("wake", "VllmWorker_1")]
            await until_state(served, "VllmWorker_1", "ready")
            await until_state(served, "VllmWorker_2", "sleeping")
            await streams.more(4)
            assert await ascale(served, "VllmWorker", "-1") == [("drain", "VllmWorker_1")]
            await streams.more(4)
            streams.check()
        await auntil(lambda: "VllmWorker_1" not in served.states(), 60.0)
        assert (await asyncio.to_thread(served.cli, "drain", "VllmWorker_2", "--wait")).returncode == 0
        await until_state(served, "VllmWorker_1", "sleeping")


@pytest.mark.full
async def test_an_engine_that_answers_otherwise_after_a_wake_serves_nobody() -> None:
    with Served(*GOES_WRONG, "--VllmWorker.sim.corrupt_after_wakes=2", target=AGG).started() as served:
        pid = served.pids()["VllmWorker_1"]
        async with load(served, 4) as streams:
            await asleep(served, "VllmWorker_1")
            wake(served, "VllmWorker_1")
            await auntil(lambda: served.pids().get("VllmWorker_1", pid) != pid, 60.0)
            await until_state(served, "VllmWorker_1", "ready")
            await streams.more(4)
            streams.check()
        why = "after wake 2 the engine answers otherwise than at its start"
        await auntil(lambda: why in str(events(served, "VllmWorker_1")), 10.0)  # a thread writes the log

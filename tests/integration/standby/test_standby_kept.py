"""`ServiceArgs.standby: N`, and engines that go wrong in their sleep, on a real graph."""

from __future__ import annotations

import asyncio

import pytest

from tests.drivers.scaled import ascale, events, load
from tests.drivers.served import AGG, Served, auntil
from tests.drivers.sleepers import asleep, until_state, wake

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
    with Served(*WORDS, "--VllmWorker.ServiceArgs.standby=1", target=AGG) as served:
        served.start()
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
    with Served(*GOES_WRONG, "--VllmWorker.sim.corrupt_after_wakes=2", target=AGG) as served:
        served.start()
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


@pytest.mark.full
async def test_a_process_whose_memory_grows_is_replaced() -> None:
    with Served(*GOES_WRONG, "--VllmWorker.sim.sleep_growth_bytes=700000000", target=AGG) as served:
        served.start()
        pid = served.pids()["VllmWorker_1"]
        async with load(served, 4) as streams:
            await asleep(served, "VllmWorker_1")  # once grown, since the rehearsal: still below the bound
            assert served.pids()["VllmWorker_1"] == pid
            wake(served, "VllmWorker_1")
            await until_state(served, "VllmWorker_1", "ready")
            assert served.pids()["VllmWorker_1"] == pid
            await asleep(served, "VllmWorker_1")
            await auntil(lambda: served.pids().get("VllmWorker_1", pid) != pid, 60.0)
            await until_state(served, "VllmWorker_1", "sleeping", "ready")
            await streams.more(4)
            streams.check()
        assert "has grown from" in " ".join(note["text"] for note in served.status()["notes"])

"""Drains on real processes: how fast a worker is out of routing, what it finishes, what its deadline cuts."""

from __future__ import annotations

import asyncio
import re
import time

import openai
import pytest

from tests.drivers.scaled import ascale, command, events, load, names, settled, streaming
from tests.drivers.served import AGG, Served, auntil

pytestmark = pytest.mark.infra


@pytest.mark.full
async def test_a_processor_drains_while_everything_streams_through_it() -> None:
    with Served("--Processor.ServiceArgs.workers=2", target=AGG) as served:
        served.start()
        async with load(served) as streams:
            for _ in range(2):
                assert await ascale(served, "Processor", "-1") == [("drain", "Processor_1")]
                await auntil(lambda: "Processor_1" not in served.states(), what=served.states)
                assert await ascale(served, "Processor", "+1") == [("spawn", "Processor_1")]
                await settled(served)
                await streams.more(6)
        streams.check()


@pytest.mark.full
async def test_a_drain_deadline_cuts_what_is_left_and_says_what() -> None:
    words = ("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.ServiceArgs.drain-deadline-s=1")
    with Served(*words) as served:
        served.start()
        prompts = [f"I go on for ever, {n}." for n in range(6)]
        async with streaming(served, *prompts, tokens=50_000) as streams:
            await auntil(lambda: _slots(served, "VllmWorker_1") == 3, what=served.status)
            await ascale(served, "VllmWorker", "-1")
            await auntil(lambda: "VllmWorker_1" not in served.states(), 15.0, what=served.states)
            await auntil(lambda: sum(stream.done() for stream in streams) == 3)
            cut = [stream for stream in streams if stream.done()]
            others = [stream for stream in streams if not stream.done()]
            errors = [stream.exception() for stream in cut]
        notes = " ".join(note["text"] for note in served.status()["notes"])
        passed = next(record for record in events(served) if record["event"] == "DrainDeadlinePassed")

    assert (len(cut), len(others)) == (3, 3)
    assert all(isinstance(error, openai.APIError) for error in errors), errors
    assert passed["requests_cut"] == 3
    cut = r"dynamo_VllmWorker_1 was not gone 1 s after .*; 3 requests were cut: ([\w-]+, ){2}[\w-]+"
    assert re.search(cut, notes), notes


def _slots(served: Served, name: str) -> int | None:
    sample = served.worker(name)["load"]
    return None if sample is None else int(sample["request_active_slots"])


@pytest.mark.full
async def test_a_rolling_restart_needs_no_spare_gpu_and_loses_nothing() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2", "--gpus", "sim:2", target=AGG) as served:
        served.start()
        before, gpus = served.pids(), {name: served.worker(name)["gpus"] for name in names(served, "VllmWorker")}
        fewest = 2
        async with load(served) as streams:
            reply = await asyncio.to_thread(command, served, "restart", name="VllmWorker", rolling=True)
            began_s = time.monotonic()
            while set(served.pids().items()) & {(name, before[name]) for name in gpus} or fewest == 2:
                fewest = min(fewest, len(names(served, "VllmWorker")))
                assert time.monotonic() - began_s < 40.0, served.states()
                await asyncio.sleep(0.02)
            await settled(served)
            await streams.more(12)
        streams.check()
        after = served.pids()

        assert reply["workers"] == ["dynamo_VllmWorker_1", "dynamo_VllmWorker"]
        assert fewest == 1
        assert {name for name in before if before[name] != after[name]} == set(gpus)
        assert {name: served.worker(name)["gpus"] for name in gpus} == gpus
        assert "Faulted" not in {record["event"] for record in events(served)}

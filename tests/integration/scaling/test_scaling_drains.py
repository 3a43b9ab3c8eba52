"""Drains and restarts on graphs of their own, also of several Frontends on one port."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from dynamo_local.cli.common import ArbiterRefused
from tests.drivers.scaled import ascale, command, events, load, names, settled, streaming
from tests.drivers.served import AGG, Served, asking, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.mark.full
async def test_a_processor_drains_while_everything_streams_through_it() -> None:
    with Served("--Processor.ServiceArgs.workers=2", target=AGG).started() as served:
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
    workers = ("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.ServiceArgs.drain-deadline-s=1")
    words = (*workers, "--Processor.migration-limit=0")
    with Served(*words).started() as served:
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
    with Served("--VllmWorker.ServiceArgs.workers=2", "--gpus", "sim:2", target=AGG).started() as served:
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


@pytest.mark.full
async def test_the_only_workers_are_replaced_under_load_and_no_request_is_lost() -> None:
    with Served("--gpus", "sim:2", "--Frontend.ServiceArgs.colocate=[]", target=AGG).started() as served:
        url, before = served.url, served.pids()
        async with load(served) as streams:
            for component in ("VllmWorker", "Processor", "Frontend"):
                done = await asyncio.to_thread(served.ok, "restart", component, "--wait")
                assert f"dynamo_{component}_1 is started first, and takes the place of dynamo_{component}" in done
                await streams.more(12)
        streams.check()
        assert served.url == url
        assert served.pids().keys() == {"Frontend_1", "Processor_1", "VllmWorker_1"}
        assert not set(served.pids().values()) & set(before.values())
        await asyncio.to_thread(served.ok, "restart", "VllmWorker", "--wait")
        assert names(served, "VllmWorker") == ["VllmWorker"], "the lowest free name"


@pytest.mark.full
async def test_without_a_spare_gpu_it_is_refused_with_the_reason() -> None:
    with Served("--gpus", "sim:1", target=AGG).started() as served:
        before = served.pids()
        with pytest.raises(ArbiterRefused, match=r"VllmWorker is the only worker .*too few GPUs.*--force"):
            command(served, "restart", name="VllmWorker")
        assert served.pids() == before
        reply = command(served, "restart", name="VllmWorker", force=True)
        await auntil(lambda: served.pids().get("VllmWorker") not in (None, before["VllmWorker"]), what=served.status)
        await settled(served)
        assert reply["warnings"][0].startswith("dynamo_VllmWorker is the only worker of VllmWorker")


TWO = "--Frontend.ServiceArgs.workers=2"


def started_requests(served: Served) -> float:
    page = httpx.get(f"{served.url}/metrics").text.splitlines()
    (line,) = [line for line in page if line.startswith("dynamo_frontend_requests_started_total{")]
    return float(line.rpartition(" ")[2])


async def asked_anew(served: Served, count: int) -> list[int]:
    """The statuses of so many short requests, each on a connection of its own, as many clients' scripts ask."""

    async def one(number: int) -> int:
        async with httpx.AsyncClient(base_url=served.url, timeout=60.0) as http:
            return (await http.post("/v1/chat/completions", json=asking(f"Request {number}", 2))).status_code

    return list(await asyncio.gather(*(one(number) for number in range(count))))


@pytest.mark.full
async def test_frontends_come_go_and_are_replaced_under_load_and_no_request_is_lost() -> None:
    """Requests come on kept connections and on new ones. /metrics of the port tells the sum, which never falls."""
    with Served("--gpus", "sim:1", TWO, target=AGG).started() as served:
        url, before = served.url, served.pids()
        assert names(served, "Frontend") == ["Frontend", "Frontend_1"]
        statuses: list[int] = []
        done = asyncio.Event()

        async def asking_anew() -> None:
            while not done.is_set():
                statuses.extend(await asked_anew(served, 4))

        async with load(served) as streams:
            others = asyncio.create_task(asking_anew())
            try:
                counted = [started_requests(served)]
                assert await ascale(served, "Frontend", "+1") == [("spawn", "Frontend_2")]
                await settled(served)
                await streams.more(12)
                counted.append(started_requests(served))
                ((kind, victim),) = await ascale(served, "Frontend", "-1")
                assert kind == "drain"
                await auntil(lambda: victim not in served.pids(), what=served.states)
                counted.append(started_requests(served))
                await asyncio.to_thread(served.ok, "restart", "Frontend", "--wait")
                await streams.more(12)
                counted.append(started_requests(served))
            finally:
                done.set()
                await others
        streams.check()
        assert set(statuses) == {200}
        assert counted == sorted(counted)
        assert started_requests(served) == streams.right + len(statuses)
        after = served.pids()
        assert served.url == url
        assert not {pid for name, pid in before.items() if name.startswith("Frontend")} & set(after.values())


def holds_connections(pid: int, url: str) -> bool:
    """Whether clients of that address are connected to that process."""
    port = urlsplit(url).port
    return any(
        each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process(pid).net_connections("tcp")
    )


async def test_a_killed_frontend_ends_its_own_streams_and_no_other() -> None:
    with Served("--gpus", "sim:1", TWO, target=AGG).started() as served:
        url, before = served.url, served.pids()
        victim = before["Frontend_1"]
        streams: list[asyncio.Task[Any]] = []
        async with AsyncExitStack() as stack:
            # Whichever is awake takes a connection: on a busy machine that may be the same one for a while.
            while not all(holds_connections(before[name], url) for name in ("Frontend", "Frontend_1")):
                assert len(streams) < 100, "one takes them all"
                more = streaming(served, f"Stream number {len(streams)}", tokens=900)
                streams += await stack.enter_async_context(more)
            os.kill(victim, signal.SIGKILL)
            ended = await asyncio.gather(*streams, return_exceptions=True)
            assert set(await asked_anew(served, 20)) == {200}
        broken = [each for each in ended if isinstance(each, BaseException)]
        whole = [each for each in ended if not isinstance(each, BaseException)]
        assert broken, "some were its own"
        assert whole, "some were not"
        assert {reason for _, reason in whole} == {"length"}
        assert "error after" not in served.log("Frontend"), "those that broke were not the survivor's"
        await auntil(lambda: served.pids().get("Frontend_1") not in (None, victim), what=served.states)
        await settled(served)
        assert served.pids()["Frontend"] == before["Frontend"]
        assert served.url == url


@pytest.mark.full
async def test_frontends_outlive_their_arbiter_and_are_scaled_by_the_next() -> None:
    with Served("--gpus", "sim:1", TWO, "--on-arbiter-death=keep", target=AGG).started() as served:
        url = served.url
        async with load(served) as streams:
            await asyncio.to_thread(served.kill_arbiter)
            await streams.more(12)
            await asyncio.to_thread(served.adopt)
            assert served.url == url
            await ascale(served, "Frontend", "1")
            await auntil(lambda: len(names(served, "Frontend")) == 1, what=served.states)
            await ascale(served, "Frontend", "+1")
            await settled(served)
            await streams.more(12)
        streams.check()
        assert set(await asked_anew(served, 20)) == {200}

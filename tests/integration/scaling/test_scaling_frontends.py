"""Several Frontends on one port, as real processes: they come, go, are replaced and die under load."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.drivers.scaled import ascale, load, names, settled, streaming
from tests.drivers.served import AGG, Served, asking, auntil

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

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

"""Dynamo 1.x's frontend and aggregated mockers under `dynamo serve`: they come, go and are seen like native workers."""

from __future__ import annotations

import asyncio

import pytest
from openai import APIError

from tests.drivers.scaled import ascale, command, events, kinds, names, settled
from tests.drivers.served import auntil
from tests.dynamo1x.dynamo_graphs import (
    WAIT_S,
    ask,
    commands_of,
    graph,
    in_flight,
    instances,
    json_of,
    listed,
    listening,
    load,
    long_answers,
)

pytestmark = [pytest.mark.timeout(500)]

START_S = 120.0
LEAVE_S = 120.0
LONG = 4000
"""Tokens of a stream that outlasts what is done meanwhile: 6 ms each, or more."""


async def test_workers_come_and_go_under_load_without_a_failed_request() -> None:
    with graph("agg").started() as served:
        await listed(served)
        async with load(served) as found:
            await ascale(served, "Mocker", "4")
            await auntil(lambda: len(names(served, "Mocker")) == 4, START_S, what=served.states)
            assert len(instances(served)) == 4
            await found.more(200)
            await ascale(served, "Mocker", "1")
            await auntil(lambda: names(served, "Mocker") == ["Mocker"], LEAVE_S, what=served.states)
            await settled(served, LEAVE_S)
            assert len(instances(served)) == 1
            await found.more(500 - min(found.right, 490))
        found.check(500)
        for name in ("Mocker_1", "Mocker_2", "Mocker_3"):
            left = [event for event in events(served, name) if event["event"] == "ProcessExited"]
            assert [event["exit_code"] for event in left] == [0], kinds(events(served, name))


@pytest.mark.full
async def test_a_drain_waits_for_streams_and_can_be_taken_back() -> None:
    with graph("agg", "--Mocker.ServiceArgs.workers=2").started() as served:
        await listed(served)
        before, child = instances(served), commands_of(served, "Mocker_1")
        async with long_answers(served, 6, LONG) as tasks:
            await auntil(lambda: in_flight(served, "Mocker_1") > 0, WAIT_S, what=served.status)
            await asyncio.to_thread(command, served, "drain", name="dynamo_Mocker_1")
            await auntil(lambda: len(instances(served)) == 1, WAIT_S, what=lambda: served.keys("v1/"))
            assert served.states()["Mocker_1"] == "draining"
            assert served.worker("Mocker_1")["drain"]["left_requests"] > 0
            await asyncio.to_thread(command, served, "drain", name="dynamo_Mocker_1", cancel=True)
            await auntil(lambda: instances(served) == before, WAIT_S, what=lambda: served.keys("v1/"))
            assert served.states()["Mocker_1"] == "ready"
            assert commands_of(served, "Mocker_1") == child
            assert await asyncio.wait_for(asyncio.gather(*tasks), LEAVE_S) == [LONG] * 6
        async with load(served) as found:
            await found.more(20)
        found.check(20)


@pytest.mark.full
async def test_leaving_finishes_what_streams_and_waits_for_no_lull() -> None:
    with graph("agg").started() as served:
        await listed(served)
        async with long_answers(served, 3, 900) as tasks, served.client() as others:

            async def knock() -> None:
                while True:
                    try:
                        await ask(others, "one more", 4)
                    except (APIError, AssertionError):
                        await asyncio.sleep(0.05)

            knocking = asyncio.create_task(knock())
            down = asyncio.create_task(asyncio.to_thread(served.down))
            assert await asyncio.wait_for(asyncio.gather(*tasks), LEAVE_S) == [900] * 3
            await asyncio.wait_for(down, LEAVE_S)
            knocking.cancel()


@pytest.mark.full
async def test_they_are_seen_like_native_workers_and_listen_on_loopback_alone() -> None:
    with graph("agg").started() as served:
        await listed(served)
        entry = served.statefile()["components"]["dynamo_Mocker"]
        worker = served.worker("Mocker")
        assert (entry["state"], entry["pid"], entry["lease"]) == ("ready", worker["pid"], worker["lease"])
        assert entry["cmd"].endswith("dynamo_local/worker/serve_command.py --service-name Mocker")
        assert worker["role"] == "aggregated"
        await auntil(lambda: served.worker("Mocker")["load"] is not None, WAIT_S, what=served.status)
        assert {row["watcher_name"] for row in json_of(served, "status")["workers"]} >= {"dynamo_Mocker"}
        top = served.cli("top", "--json", "--once")
        assert "dynamo_Mocker" in top.stdout, top.stderr
        assert kinds(events(served, "Mocker"))[:3] == ["SpawnRequested", "Spawned", "Registered"]
        assert "dynamo_mocker" in served.cli("ctl", "list").stdout.lower()
        open_to_others = [found for found in listening(served) if found[1] not in ("127.0.0.1", "::1")]
        assert open_to_others == []
        assert listening(served)

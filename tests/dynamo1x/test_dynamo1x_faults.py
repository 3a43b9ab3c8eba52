"""Deaths and outages around Dynamo 1.x's workers: little is lost, and all of it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.drivers.scaled import names
from tests.drivers.served import Served, auntil
from tests.dynamo1x.dynamo_graphs import (
    WAIT_S,
    WITHOUT_MIGRATION,
    Load,
    commands_of,
    graph,
    in_flight,
    instances,
    listed,
    load,
)

pytestmark = [pytest.mark.timeout(500)]

BACK_S = 120.0
CLIENTS = 8


async def _kill_one(served: Served, found: Load, victim: str) -> None:
    """Kill a worker's runner, or its command, with SIGKILL under load; return when it is back."""
    old = served.pids()["Mocker_1"]
    await auntil(lambda: in_flight(served, "Mocker_1") > 0, WAIT_S, what=served.status)
    os.kill(old if victim == "runner" else commands_of(served, "Mocker_1")[0], signal.SIGKILL)
    await auntil(lambda: served.pids().get("Mocker_1") not in (None, old), BACK_S, what=served.states)
    await auntil(lambda: len(names(served, "Mocker")) == 3, BACK_S, what=served.states)
    await found.more(30)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["runner", "command"])
@pytest.mark.parametrize("words", [(WITHOUT_MIGRATION,), ()], ids=["without migration", "with migration"])
async def test_a_killed_worker_costs_at_most_its_own_streams_and_none_with_migration(
    words: tuple[str, ...], victim: str
) -> None:
    with graph("agg", *words, "--Mocker.ServiceArgs.workers=3").started() as served:
        await listed(served)
        async with load(served, CLIENTS) as found:
            await found.more(30)
            await _kill_one(served, found, victim)
        assert len(found.failures) <= (CLIENTS // 2 if words else 0), found.failures
        assert found.right >= 60
        assert len(instances(served)) == 3


@pytest.mark.full
async def test_without_an_arbiter_a_dead_workers_key_goes_at_once_and_the_others_are_taken_back() -> None:
    with graph("agg", "--on-arbiter-death", "keep", "--Mocker.ServiceArgs.workers=3").started() as served:
        await listed(served)
        before = served.pids()
        kept = {name: (before[name], commands_of(served, name)) for name in ("Frontend", "Mocker", "Mocker_2")}
        async with load(served, CLIENTS) as found:
            await found.more(30)
            await asyncio.to_thread(served.kill_arbiter)
            os.kill(before["Mocker_1"], signal.SIGKILL)
            await auntil(lambda: len(instances(served)) == 2, 5.0, what=lambda: served.log("guardian"))
            await found.more(30)
            await asyncio.to_thread(served.adopt)
            await auntil(lambda: len(instances(served)) == 3, BACK_S, what=served.states)
            await auntil(lambda: set(served.states().values()) == {"ready"}, BACK_S, what=served.states)
            await found.more(30)
        found.check(90)
        pids = served.pids()
        assert {name: (pids[name], commands_of(served, name)) for name in kept} == kept
        assert pids["Mocker_1"] != before["Mocker_1"]


@pytest.mark.full
async def test_a_short_absence_of_etcd_goes_unnoticed() -> None:
    with graph("agg", "--Mocker.ServiceArgs.workers=2").started() as served:
        await listed(served)
        pids = served.pids()
        etcd = served.server_pid("etcd")
        assert etcd is not None
        async with load(served) as found:
            os.kill(etcd, signal.SIGSTOP)
            gone_s = time.monotonic()
            await auntil(lambda: time.monotonic() - gone_s > 5.5, 10.0)
            os.kill(etcd, signal.SIGKILL)
            await auntil(lambda: served.server_pid("etcd") not in (None, etcd), WAIT_S)
            seen = found.right
            await auntil(lambda: found.right > seen + 50, BACK_S, what=lambda: found.failures)
        found.check(50)
        assert served.pids() == pids


@pytest.mark.full
async def test_what_a_long_absence_of_etcd_ended_comes_back() -> None:
    """A minute without etcd ends Dynamo's processes (their own rule, 45 s)."""
    with graph("agg", "--Mocker.ServiceArgs.workers=2").started() as served:
        await listed(served)
        pids = served.pids()
        etcd = served.server_pid("etcd")
        assert etcd is not None
        os.kill(etcd, signal.SIGSTOP)
        gone_s = time.monotonic()
        await auntil(lambda: time.monotonic() - gone_s > 60.0, 70.0)
        os.kill(etcd, signal.SIGCONT)
        await auntil(
            lambda: set(served.states().values()) == {"ready"} and len(instances(served)) == 2,
            BACK_S,
            what=served.states,
        )
        assert served.pids() != pids
        await listed(served)
        async with load(served) as found:
            await found.more(50)
        found.check(50)

"""What was leaving when the arbiter died goes on leaving: drains, rolling restarts, a `down` without an arbiter."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import streaming
from tests.drivers.served import Served, auntil, expected

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
PATIENCE_S = 15.0
TOKENS = 2500


@pytest.mark.full
async def test_a_worker_that_somebody_revoked_goes_on_leaving_and_its_return_is_counted() -> None:
    with Served("--Host.on-foreign-revoke=restart", "--VllmWorker.ServiceArgs.workers=2", *KEEP) as served:
        served.start()
        before = served.pids()
        async with streaming(served, *(f"Revoked {n}." for n in range(4)), tokens=TOKENS) as streams:
            served.etcdctl("lease", "revoke", served.worker("VllmWorker_1")["lease"])
            await auntil(lambda: served.states()["VllmWorker_1"] == "draining", PATIENCE_S, what=served.status)
            await asyncio.to_thread(served.kill_arbiter)
            assert is_alive(before["VllmWorker_1"]), "its streams were to outlast the arbiter"
            await asyncio.to_thread(served.adopt)
            answers = await asyncio.gather(*streams)
        assert answers == [expected(f"Revoked {n}.", TOKENS, ignore_eos=True) for n in range(4)]
        await auntil(lambda: served.pids().get("VllmWorker_1") not in (None, before["VllmWorker_1"]), 40.0,
                     what=served.status)  # fmt: skip
        await auntil(lambda: set(served.states().values()) == {"ready"}, 40.0, what=served.status)
        failures = {name: entry.get("failures_s") for name, entry in served.statefile()["components"].items()}
        assert {name: len(found) for name, found in failures.items() if found} == {"dynamo_VllmWorker_1": 1}
        assert served.status()["state"] == "ready"


@pytest.mark.full
async def test_a_rolling_restart_goes_on_after_the_adoption() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2", *KEEP) as served:
        served.start()
        before = served.pids()
        async with streaming(served, *(f"Roll {n}." for n in range(4)), tokens=TOKENS) as streams:
            assert (await asyncio.to_thread(served.cli, "restart", "--rolling", "VllmWorker")).returncode == 0
            assert served.statefile()["restarts"][0]["todo"].keys() == {"dynamo_VllmWorker", "dynamo_VllmWorker_1"}
            await auntil(lambda: "draining" in served.states().values(), what=served.states)
            await asyncio.to_thread(served.kill_arbiter)
            assert {name: is_alive(pid) for name, pid in before.items()} == dict.fromkeys(before, True)
            await asyncio.to_thread(served.adopt)
            answers = await asyncio.gather(*streams)
        assert answers == [expected(f"Roll {n}.", TOKENS, ignore_eos=True) for n in range(4)]
        await auntil(lambda: "restarts" not in served.statefile(), 40.0, what=served.status)
        after = served.pids()
        assert set(served.states().values()) == {"ready"}
        changed = {name for name in before if after[name] != before[name]}
        assert changed == {"VllmWorker", "VllmWorker_1"}


@pytest.mark.full
async def test_down_without_an_arbiter_lets_streams_finish() -> None:
    with Served(*KEEP) as served:
        served.start()
        async with streaming(served, "A last one.", tokens=TOKENS) as (stream,):
            await asyncio.to_thread(served.kill_arbiter)

            done = await asyncio.to_thread(served.down)

            assert await stream == expected("A last one.", TOKENS, ignore_eos=True)
        assert "its arbiter is dead" in done.stdout
        assert served.leftovers() == []

"""Leases that were revoked, or expired while their worker stood still."""

from __future__ import annotations

import os
import signal
import time

import httpx
import openai
import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import answer, busy, streaming
from tests.drivers.served import AGG, Served, auntil, expected

pytestmark = pytest.mark.infra


@pytest.mark.full
async def test_a_worker_whose_lease_is_revoked_finishes_and_does_not_come_back() -> None:
    with Served("--VllmWorker.ServiceArgs.workers=2").started() as served:
        async with streaming(served, "Let me finish.", tokens=1500) as (stream,):
            name = await auntil(lambda: busy(served, "VllmWorker"), what=served.status)
            row = served.worker(name)
            served.etcdctl("lease", "revoke", row["lease"])
            await auntil(lambda: served.states()[name] == "draining", 10.0, what=served.states)
            assert not stream.done()
            assert row["lease"] not in " ".join(served.keys())
            assert await answer(served, "Who else?") == expected("Who else?", 8)[0]
            assert await stream == expected("Let me finish.", 1500, ignore_eos=True)
        await auntil(lambda: not is_alive(row["pid"]), 30.0)
        await auntil(lambda: served.states().get(name, "exited") == "exited", 30.0, what=served.states)
        assert "gone" in served.log(name).splitlines()[-1]
        workers = served.keys("dynamo/components/VllmWorker/generate")
        await auntil(lambda: _freed(served, name), 10.0, what=served.statefile)
    assert len(workers) == 1, workers


@pytest.mark.full
async def test_all_leases_revoked_by_somebody_else_make_the_graph_degraded_never_ready() -> None:
    with Served(target=AGG).started() as served:
        assert (served.status()["state"], served.status()["missing"]) == ("ready", [])
        for row in served.status()["workers"]:
            served.etcdctl("lease", "revoke", row["lease"])
        await auntil(lambda: set(served.states().values()) == {"exited"}, 30.0, what=served.states)
        status = served.status()
        table = served.cli("status").stdout
        metrics = httpx.get(status["metrics_url"]).text
    assert status["state"] == "degraded"
    for component in ("Frontend", "VllmWorker"):
        assert f"{component}: no worker serves (dynamo_{component} is exited)" in status["missing"]
        assert f"missing   {component}: dynamo_{component} left, because somebody else revoked the lease" in table
        assert f'dynamo_arbiter_lacking{{component="{component}"}} 1.0' in metrics
    assert "state degraded" in table
    assert 'dynamo_arbiter_state{state="degraded"} 1.0' in metrics
    assert 'dynamo_arbiter_state{state="ready"} 0.0' in metrics


@pytest.mark.full
async def test_with_restart_a_worker_that_was_revoked_comes_back_and_cuts_nothing() -> None:
    with Served("--Host.on-foreign-revoke=restart", target=AGG).started() as served:
        before = served.pids()["VllmWorker"]
        async with streaming(served, "Let me finish.", tokens=1000) as (stream,):
            served.etcdctl("lease", "revoke", served.worker("VllmWorker")["lease"])
            await auntil(lambda: served.status()["state"] == "degraded", 30.0, what=served.status)
            assert await stream == expected("Let me finish.", 1000, ignore_eos=True)
        await auntil(lambda: served.status()["state"] == "ready", 30.0, what=served.status)
        assert served.pids()["VllmWorker"] != before
        assert await answer(served, "Back again?") == expected("Back again?", 8)[0]


def _freed(served: Served, name: str) -> bool:
    """The statefile holds no GPU, lease or pid for the worker: once its device's memory was seen to be free."""
    entry = served.statefile()["components"].get(f"dynamo_{name}")
    return entry is None or (entry.get("lease"), entry.get("pid"), entry["resources"]) == (None, None, {})


@pytest.mark.timing
@pytest.mark.full
async def test_a_worker_that_was_stopped_past_its_lease_comes_back() -> None:
    with Served(env={"DYN_LEASE_TTL_S": "2"}).started() as served:
        before = served.pids()
        os.kill(before["VllmWorker"], signal.SIGSTOP)
        try:
            await auntil(lambda: served.worker("VllmWorker")["lease"] is None, what=served.status)
            began_s = time.monotonic()
            with pytest.raises(openai.APIStatusError) as refused:
                await answer(served, "Are you awake?")
            took_s = time.monotonic() - began_s
        finally:
            os.kill(before["VllmWorker"], signal.SIGCONT)
        await auntil(lambda: served.states()["VllmWorker"] == "ready", what=served.states)
        assert await answer(served, "Good morning.") == expected("Good morning.", 8)[0]
        assert served.pids() == before
    assert refused.value.status_code == 503
    assert took_s < 8.0

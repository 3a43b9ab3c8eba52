"""etcd and NATS die, come back, or stay away under a running graph: the registry heals, requests fail fast or work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import httpx
import pytest

from tests.drivers.served import AGG, Served, asking, auntil, expected, stream_chat
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra


async def _ask(served: Served, prompt: str) -> tuple[int, str]:
    async with httpx.AsyncClient(base_url=served.url, timeout=10.0) as http:
        response = await http.post("/v1/chat/completions", json=asking(prompt, 8))
    body = response.json()
    if response.status_code == 200:
        return 200, body["choices"][0]["message"]["content"]
    return response.status_code, body["error"]["message"]


def _right(prompt: str) -> tuple[int, str]:
    return 200, expected(prompt, 8)[0]


async def test_a_killed_etcd_is_restarted_with_its_data_and_no_request_notices() -> None:
    with Served().started() as served:
        keys, pids, old = served.keys(), served.pids(), served.server_pid("etcd")
        assert old
        async with served.client() as client:
            stream = asyncio.create_task(stream_chat(client, "Through the storm.", 200, ignore_eos=True))
            os.kill(old, signal.SIGKILL)
            prompts = [f"While etcd is away, {n}." for n in range(8)]
            answers = [await _ask(served, prompt) for prompt in prompts]
            await auntil(lambda: served.server_pid("etcd") not in (None, old), what=lambda: served.log("arbiter"))
            assert await stream == expected("Through the storm.", 200, ignore_eos=True)
        await auntil(lambda: _keys_or_none(served) == keys, what=lambda: _keys_or_none(served))
        assert await _ask(served, "After etcd came back.") == _right("After etcd came back.")
        assert served.pids() == pids
        assert set(served.states().values()) == {"ready"}
        told = [line.split(maxsplit=3)[3] for line in served.cli("events", "--worker", "etcd").stdout.splitlines()]
    assert answers == [_right(prompt) for prompt in prompts]
    assert told[0].startswith("pending -> running (ServerStarted")
    assert told[1].startswith(f"running -> restarting (ServerDied by exit:{old}: was killed by SIGKILL")
    assert told[2].startswith("restarting -> running (ServerStarted")


def _keys_or_none(served: Served) -> list[str] | None:
    try:
        return served.keys()
    except subprocess.CalledProcessError:
        return None


@pytest.mark.full
async def test_an_etcd_that_lost_its_data_is_filled_again(own_etcd: RealEtcd, nats_server: RealNats) -> None:
    env = {"ETCD_ENDPOINTS": own_etcd.endpoint, "NATS_SERVER": nats_server.address, "DYN_LEASE_TTL_S": "3"}
    with Served(namespace="lost", env=env).started() as served:
        before, pids = _endpoints(served), served.pids()
        leases = {worker["lease"] for worker in served.status()["workers"]}
        await own_etcd.restart(lose_data=True)
        during = await _ask(served, "Who remembers me?")
        await auntil(lambda: _endpoints(served) == before, what=served.keys)
        await auntil(
            lambda: leases.isdisjoint({worker["lease"] for worker in served.status()["workers"]}), what=served.status
        )
        await auntil(lambda: set(served.states().values()) == {"ready"}, what=served.states)
        assert await _ask(served, "Now you do.") == _right("Now you do.")
        assert served.pids() == pids
        state = served.statefile()["components"]
        entries = {(entry["state"], entry["lease"]) for entry in state.values()}
    assert during == _right("Who remembers me?")
    assert {state for state, _ in entries} == {"ready"}
    assert leases.isdisjoint({lease for _, lease in entries})


def _endpoints(served: Served) -> list[str]:
    return sorted(key.rpartition(":")[0] for key in served.keys(f"{served.namespace}/components/"))


@pytest.mark.full
async def test_a_killed_nats_is_restarted_and_the_graph_heals() -> None:
    with Served().started() as served:
        pids, old = served.pids(), served.server_pid("nats")
        assert old
        async with served.client() as client:
            started = asyncio.Event()
            stream = asyncio.create_task(stream_chat(client, "Do not stop.", 250, ignore_eos=True, started=started))
            await started.wait()
            os.kill(old, signal.SIGKILL)
            await auntil(lambda: served.server_pid("nats") not in (None, old), what=lambda: served.log("arbiter"))
            assert await stream == expected("Do not stop.", 250, ignore_eos=True)
        await _until_served(served)
        prompt = "After NATS came back, a prompt that is long enough to be prefilled by another worker again."
        assert await _ask(served, prompt) == _right(prompt)
        _, decided, rest = served.log("VllmWorker").rpartition("Remote prefill: True")
        assert decided
        assert "prefilled locally" not in rest
        assert served.pids() == pids
        assert set(served.states().values()) == {"ready"}


async def _until_served(served: Served, timeout_s: float = 10.0) -> None:
    """Ask until an answer comes; each try must end by itself, with a right text or with a 5xx."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        status, text = await _ask(served, "Is anybody there?")
        assert time.monotonic() - began_s < 15.0, "hung"
        if status == 200:
            assert text == expected("Is anybody there?", 8)[0]
            return
        assert status in (500, 502, 503, 504), (status, text)
        assert time.monotonic() < deadline_s, (status, text)
        await asyncio.sleep(0.1)


@pytest.mark.timing
@pytest.mark.full
async def test_while_nats_stays_away_requests_fail_fast_and_nothing_hangs(
    etcd_server: RealEtcd, own_nats: RealNats
) -> None:
    env = {"ETCD_ENDPOINTS": etcd_server.endpoint, "NATS_SERVER": own_nats.address}
    with Served(target=AGG, namespace="outage", env=env).started() as served:
        assert await _ask(served, "Before.") == _right("Before.")
        pids = served.pids()
        await own_nats.kill()
        began_s = time.monotonic()
        refused = await asyncio.gather(*(_ask(served, f"During, {n}.") for n in range(20)))
        took_s = time.monotonic() - began_s
        await own_nats.start()
        await _until_served(served)
        assert served.pids() == pids
        assert set(served.states().values()) == {"ready"}
    answered = [answer for answer in enumerate(refused) if answer[1][0] == 200]
    assert len(answered) <= 1, "one connection of a former answer is there, and needs no NATS"
    assert all(answer == _right(f"During, {n}.") for n, answer in answered)
    errors = [answer for answer in refused if answer[0] != 200]
    assert {status for status, _ in errors} <= {503, 504}, errors
    assert all("NATS" in message or "worker" in message for _, message in errors), errors
    assert took_s < 15.0


@pytest.mark.timing
@pytest.mark.full
async def test_down_works_while_nats_and_etcd_are_away(own_etcd: RealEtcd, own_nats: RealNats) -> None:
    env = {"ETCD_ENDPOINTS": own_etcd.endpoint, "NATS_SERVER": own_nats.address}
    with Served(namespace="alone", env=env).started() as served:
        await own_nats.kill()
        await own_etcd.kill()
        began_s = time.monotonic()
        await asyncio.to_thread(served.down)
        assert time.monotonic() - began_s < 40.0
        assert served.leftovers() == []

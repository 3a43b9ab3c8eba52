"""A graph under somebody's own `circusd circus.ini`, beside another watcher of theirs: real everything."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from openai import InternalServerError

from dynamo_local.system.processes import is_alive
from tests.drivers.guests import NOISY_ENV, READY_TIMEOUT_S, Guest, guest
from tests.drivers.planned import DECODE, capacity, committed, decided, open_loop, steady
from tests.drivers.scaled import load, settled, streaming
from tests.drivers.served import EXAMPLE, Served, auntil, expected, stream_chat, until
from tests.drivers.stock_circusd import StockCircusd

pytestmark = [pytest.mark.infra, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def under() -> Iterator[Guest]:
    """One that is ready, for tests that leave it as they found it."""
    with guest() as running:
        yield running.ready()


async def test_the_graph_runs_as_watchers_of_their_circusd(under: Guest) -> None:
    names = ("etcd", "nats", "guardian", "Frontend", "VllmWorker", "PrefillWorker")
    assert under.watchers() == {f"dynamo_{name}": "active" for name in names}
    assert under.circusd.statuses()["other"] == "active"
    for name, pid in under.served.pids().items():
        assert under.circusd.pids(f"dynamo_{name}") == [pid]
        assert under.served.statefile()["components"][f"dynamo_{name}"]["pid"] == pid
    async with under.served.client() as client:
        assert await stream_chat(client, "Who runs you?", 24) == expected("Who runs you?", 24)


async def test_scale_up_and_down(under: Guest) -> None:
    before = under.served.pids()
    await asyncio.to_thread(under.served.ok, "scale", "VllmWorker", "+1", "--wait")
    assert under.watchers()["dynamo_VllmWorker_1"] == "active"
    await asyncio.to_thread(under.served.ok, "scale", "VllmWorker", "-1", "--wait")
    await auntil(lambda: "dynamo_VllmWorker_1" not in under.watchers(), 5.0, what=under.watchers)
    assert under.served.pids() == before


@pytest.mark.full
async def test_the_planner_scales_their_watchers() -> None:
    sections = {
        "VllmWorker": {"max-local-prefill-length": 1000, "sim": {"speed": 0.1, "num-gpu-blocks": 30}},
        "Planner": {
            "adjustment-interval": 1.5,
            "metric-pulling-interval": 0.25,
            "max-gpu-budget": 4,
            "decode-kv-scale-up-threshold": 0.5,
            "decode-kv-scale-down-threshold": 0.2,
        },
    }
    requests = steady(rate=2, seconds=12, prompt_words=8, tokens=100)
    with guest(sections) as under:
        served = under.ready().served
        answers = await open_loop(served, requests)
        assert answers.wrong == []
        assert answers.right == len(requests)
        await auntil(lambda: capacity(served)[DECODE] == 1 and len(served.pids()) == 3, 60.0, what=served.states)
        steps = [step for _, component, step in committed(decided(served)) if component == DECODE]
        assert sum(steps) == 0
        assert steps.count(1) >= 1
        await auntil(lambda: "dynamo_VllmWorker_1" not in under.watchers(), 5.0, what=under.watchers)


@pytest.mark.full
def test_our_commands_say_whose_the_watchers_are(under: Guest) -> None:
    done = under.served.cli("ctl", "list")
    assert f"circusctl --endpoint {under.circusd.endpoint} list" in done.stdout + done.stderr
    done = under.served.cli("ctl", "dynamo_status")
    assert "dynamo_VllmWorker: ready" in done.stdout
    done = under.served.cli(*under.served.serve_words())
    assert done.returncode == 4
    assert "the circusd plugin plugin:dynamo" in done.stderr


async def test_circusctl_stop_of_a_worker_is_a_drain(under: Guest) -> None:
    await asyncio.to_thread(under.served.ok, "scale", "VllmWorker", "2", "--wait")
    async with streaming(under.served, *(f"Story {n}" for n in range(4)), tokens=400) as streams:
        await asyncio.to_thread(under.circusd.ask, "stop", name="dynamo_VllmWorker_1")
        for n, stream in enumerate(streams):
            assert await stream == expected(f"Story {n}", 400, ignore_eos=True)
    await auntil(lambda: "VllmWorker_1" not in under.served.states(), 10.0, what=under.served.states)
    await auntil(lambda: "dynamo_VllmWorker_1" not in under.watchers(), 10.0, what=under.watchers)
    told = await asyncio.to_thread(under.served.ok, "events", "--worker", "VllmWorker_1")
    assert "draining" in told


@pytest.mark.full
async def test_circusctl_reload_of_a_worker_drains_it_and_starts_it_again(under: Guest) -> None:
    """circus starts the second copy first. It has no ticket, and ends."""
    pid = under.served.pids()["PrefillWorker"]
    await asyncio.to_thread(under.circusd.ask, "reload", name="dynamo_PrefillWorker")
    await auntil(
        lambda: under.served.pids().get("PrefillWorker") not in (None, pid),
        8.0,
        what=lambda: (under.served.cli("events").stdout, under.served.status(), under.circusd.statuses()),
    )
    await auntil(lambda: under.served.states()["PrefillWorker"] == "ready", 20.0, what=under.served.states)
    assert under.circusd.pids("dynamo_PrefillWorker") == [under.served.pids()["PrefillWorker"]]


@pytest.mark.full
async def test_circusctl_stop_of_a_server_is_a_restart_of_it(under: Guest) -> None:
    pid = under.circusd.pids("dynamo_nats")[0]
    await asyncio.to_thread(under.circusd.ask, "stop", name="dynamo_nats")
    await auntil(lambda: not is_alive(pid), 5.0, what=under.logs)
    await auntil(lambda: under.watchers().get("dynamo_nats") == "active", 10.0, what=under.watchers)
    async with asyncio.timeout(20), under.served.client() as client:
        while True:  # without NATS there are no answers
            try:
                assert await stream_chat(client, "Again?", 24) == expected("Again?", 24)
            except InternalServerError:
                await asyncio.sleep(0.1)
            else:
                break


@pytest.mark.full
def test_reloadconfig_drains_the_graph_and_a_restart_of_the_plugin_brings_it_back() -> None:
    """circus drops every watcher that is not in its file."""
    with guest() as under:
        pids = under.ready().served.pids()
        under.circusd.ask("reloadconfig")
        until(lambda: not any(is_alive(pid) for pid in pids.values()), 30.0, what=under.logs)
        plugin = under.plugin_pid()
        until(lambda: under.circusd.ask("restart", name="plugin:dynamo")["status"] == "ok", 20.0, what=under.logs)
        until(lambda: not is_alive(plugin), 20.0, what=under.logs)
        under.ready()
        assert set(under.watchers().values()) == {"active"}


@pytest.mark.full
def test_down_leaves_their_watchers_and_stays_down() -> None:
    with guest() as under:
        other = under.ready().circusd.pids("other")
        under.served.down()
        left = {"other": "active", "plugin:dynamo": "stopped"}
        until(lambda: under.circusd.statuses() == left, 2.0, what=under.circusd.statuses)  # circus looks every 0.1 s
        assert under.circusd.pids("other") == other
        assert [line for _, line in under.served.processes() if "circus.circusd" not in line] == []
        assert not under.served.paths.statefile.exists()
        assert not under.served.paths.runtime.exists()
        time.sleep(1.2)  # longer than `check_delay`: circusd starts nothing again
        assert under.circusd.statuses()["plugin:dynamo"] == "stopped"
        under.circusd.ask("start", name="plugin:dynamo")
        under.ready()
        assert under.circusd.quit() < 10


@pytest.mark.full
async def test_quit_finishes_what_streams() -> None:
    with guest() as under:
        under.ready()
        async with streaming(under.served, "To the end", tokens=300) as (stream,):
            await asyncio.to_thread(under.circusd.quit)
            assert await stream == expected("To the end", 300, ignore_eos=True)


@pytest.mark.full
async def test_a_killed_plugin_comes_back_and_takes_the_graph_back() -> None:
    with guest() as under:
        pids = under.ready().served.pids()
        plugin = under.plugin_pid()
        async with streaming(under.served, "Go on", tokens=600) as (stream,):
            os.kill(plugin, signal.SIGKILL)
            await auntil(lambda: under.circusd.pids("plugin:dynamo") not in ([], [plugin]), 10.0, what=under.logs)
            await auntil(under.is_ready, READY_TIMEOUT_S, what=under.logs)
            assert under.served.pids() == pids
            assert await stream == expected("Go on", 600, ignore_eos=True)
        assert set(under.watchers().values()) == {"active"}
        await asyncio.to_thread(under.served.ok, "scale", "VllmWorker", "+1", "--wait")
        await asyncio.to_thread(under.served.ok, "drain", "dynamo_VllmWorker", "--wait")
        await auntil(lambda: not is_alive(pids["VllmWorker"]), 10.0, what=under.logs)
        under.served.down()


@pytest.mark.full
async def test_a_reload_of_circusd_brings_the_graph_down_and_up_again() -> None:
    with guest() as under:
        pids = under.ready().served.pids()
        plugin = under.plugin_pid()
        os.kill(under.circusd.pid, signal.SIGHUP)
        await auntil(lambda: not is_alive(plugin), 20.0, what=under.logs)
        under.ready()
        assert not any(is_alive(pid) for pid in pids.values())
        assert len(under.circusd.pids("plugin:dynamo")) == 1
        workers = under.served.pids().items()
        assert all(under.circusd.pids(f"dynamo_{name}") == [pid] for name, pid in workers)


@pytest.mark.full
async def test_a_killed_circusd_takes_the_graph_with_it_in_order() -> None:
    with guest() as under:
        pids = under.ready().served.pids()
        other = under.circusd.pids("other")
        async with streaming(under.served, "Still", tokens=300) as (stream,):
            under.circusd.kill()
            assert await stream == expected("Still", 300, ignore_eos=True)
        await auntil(lambda: not any(is_alive(pid) for pid in pids.values()), 20.0, what=under.logs)
        await auntil(lambda: not under.served.paths.statefile.exists(), 10.0, what=under.logs)
        assert is_alive(other[0])  # theirs outlives it: that is circus
        os.kill(other[0], signal.SIGKILL)


@pytest.mark.full
def test_a_deployment_that_cannot_run_is_said_once() -> None:
    with guest(graph="graphs.disagg:Nobody") as under:
        until(lambda: under.circusd.statuses()["plugin:dynamo"] == "stopped", 15.0, what=under.logs)
        log = (under.served.paths.logs.parent / "circusd_plugin.log").read_text()
        assert log.count("ERROR") == 1
        assert "Nobody" in log
        assert "circusctl start plugin:dynamo" in log
        assert under.watchers() == {}


@pytest.mark.full
def test_the_shipped_circus_ini_runs() -> None:
    with Served() as served:
        endpoint = f"ipc://{served.env['XDG_RUNTIME_DIR']}/circus.sock"
        app = served.folder / "llm"
        (app / "configs").mkdir(parents=True)
        for name in ("circus.ini", "graphs"):
            (app / name).symlink_to(EXAMPLE / name)
        text = (EXAMPLE / "configs" / "disagg.yaml").read_text().replace("port: 8000", "port: 0")
        (app / "configs" / "disagg.yaml").write_text(text)
        env = {**served.env, **NOISY_ENV}
        with StockCircusd(served.folder, ini=app / "circus.ini", endpoint=endpoint, env=env) as circusd:
            under = Guest(served, circusd).ready()
            assert under.circusd.statuses()["other"] == "active"
            served.down()
            circusd.quit()
        for socket in Path(served.env["XDG_RUNTIME_DIR"]).glob("circus*.sock"):
            socket.unlink()  # circus leaves them


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_the_edited_file_is_applied_and_outlives_the_plugin() -> None:
    with guest() as under:
        served, before = under.ready().served, under.served.pids()
        file = served.folder / "disagg.yaml"
        content = yaml.safe_load(file.read_text())
        content["VllmWorker"].setdefault("sim", {})["speed"] = 3.0
        file.write_text(yaml.safe_dump(content))
        async with load(served, streams=4) as streams:
            await asyncio.to_thread(served.ok, "apply", "-f", str(file), timeout_s=90.0)
            await streams.more(8)
        streams.check()
        after = served.pids()
        assert after.keys() == {"Frontend", "PrefillWorker", "VllmWorker_1"}
        assert after.items() - before.items() == {("VllmWorker_1", after["VllmWorker_1"])}
        other = served.folder / "other.yaml"
        other.write_text(file.read_text())
        for words in ((str(other),), (str(file), "--VllmWorker.sim.speed=1")):
            refused = await asyncio.to_thread(served.cli, "apply", "-f", *words)
            assert refused.returncode == 2
            assert f"circusd starts this graph from {file}" in refused.stderr
        plugin = under.plugin_pid()
        os.kill(plugin, signal.SIGKILL)
        came_back = lambda: under.is_ready() and under.plugin_pid() != plugin  # noqa: E731
        await auntil(came_back, READY_TIMEOUT_S, what=under.logs)
        await settled(served)
        assert served.pids() == after

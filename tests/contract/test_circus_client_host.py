"""Properties of a stock circusd alone, for instance its one slot for commands."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from dynamo_local.circus_plugins import client_host, exec_worker
from dynamo_local.circus_plugins.circus_client import CircusClient, CircusdBusy, CircusdError, CircusdSilent
from dynamo_local.circus_plugins.client_host import CircusClientHost, exit_code_of_zombie
from dynamo_local.system.process_host import LaunchSpec
from dynamo_local.system.processes import is_alive, kill_session, wait_exit
from tests.drivers.eventually import eventually
from tests.drivers.stock_circusd import StockCircusd

RUNS = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
STUBBORN_S = 2.0
STUBBORN = f"""
[watcher:other]
cmd = sleep 600

[watcher:stubborn]
cmd = {sys.executable} -I -S -c "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);time.sleep(600)"
graceful_timeout = {STUBBORN_S}
"""


@pytest.fixture(scope="module")
def circusd() -> Iterator[StockCircusd]:
    """With two watchers of somebody else's; stopping `stubborn` holds circusd's slot for two seconds."""
    with tempfile.TemporaryDirectory(prefix="cd-") as folder, StockCircusd(Path(folder), STUBBORN) as circusd:
        yield circusd


class Harness:
    """A host on a circusd, with its exits recorded."""

    def __init__(self, circusd: StockCircusd, folder: Path) -> None:
        self.circusd = circusd
        self.folder = folder
        self.socket = folder / "run.sock"
        self.host = CircusClientHost(circusd.endpoint, socket=self.socket, circusd_pid=circusd.pid)
        self.exits: asyncio.Queue[tuple[str, int, int | None]] = asyncio.Queue()
        self.host.on_exit = lambda *exit_: self.exits.put_nowait(exit_)

    async def start(self, name: str, **env: str) -> int:
        spec = LaunchSpec(
            name, RUNS, env=env, cwd="/", log_file=self.folder / f"{name}.log", death_signal=signal.SIGKILL
        )
        return await self.host.start_process(spec)

    async def ask(self, command: str, **properties: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.circusd.ask, command, **properties)

    async def end(self, name: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert (await asyncio.wait_for(self.exits.get(), 5))[:2] == (name, pid)
        await self.host.forget(name)


@pytest.fixture
async def harness(circusd: StockCircusd) -> AsyncIterator[Harness]:
    with tempfile.TemporaryDirectory(prefix="ch-") as folder:
        harness = Harness(circusd, Path(folder))
        await harness.host.start()
        yield harness
        for name in circusd.ask("list")["watchers"]:
            if name.startswith("ns_"):
                for pid in circusd.pids(name):
                    kill_session(pid)
                    await wait_exit(pid, 5)
                await asyncio.sleep(0.01)
                await harness.host.forget(name)
        await harness.host.close()
        assert set(circusd.ask("list")["watchers"]) == {"other", "stubborn"}


def ignores(pid: int, signum: int) -> bool:
    ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) >> signum - 1 & 1)


async def stop_stubborn(harness: Harness) -> None:
    await harness.ask("start", name="stubborn", waiting=True)
    (pid,) = harness.circusd.pids("stubborn")
    await eventually(lambda: ignores(pid, signal.SIGTERM))
    assert (await harness.ask("stop", name="stubborn"))["status"] == "ok"
    refused = await harness.ask("rm", name="stubborn", nostop=True)
    assert "already running" in refused["reason"]


@pytest.mark.timing
async def test_a_start_waits_out_somebody_elses_slow_stop(harness: Harness) -> None:
    """circusd refuses `add` while any stop runs."""
    await stop_stubborn(harness)
    began_s = time.monotonic()
    pid = await harness.start("ns_A")
    assert STUBBORN_S - 1.0 < time.monotonic() - began_s < STUBBORN_S + 1.5
    assert is_alive(pid)


@pytest.mark.full
async def test_a_start_gives_up_at_its_bound_and_names_the_reason(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_host, "START_PATIENCE_S", 0.2)
    await stop_stubborn(harness)
    with pytest.raises(OSError, match="already running watcher_stop"):
        await harness.start("ns_A")
    assert "ns_a" not in harness.circusd.ask("list")["watchers"]
    monkeypatch.undo()
    assert is_alive(await harness.start("ns_A"))


@pytest.mark.timing
@pytest.mark.full
async def test_an_exit_is_noticed_while_circusd_is_busy(harness: Harness) -> None:
    pid = await harness.start("ns_A")
    await stop_stubborn(harness)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(harness.exits.get(), 1) == ("ns_A", pid, -signal.SIGKILL)
    assert time.monotonic() - killed_s < 0.1


@pytest.mark.timing
@pytest.mark.full
async def test_a_removal_that_circusd_refuses_goes_on_in_the_background(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_host, "FORGET_PATIENCE_S", 0.05)
    pids = {name: await harness.start(name) for name in ("ns_A", "ns_B")}
    await stop_stubborn(harness)
    began_s = time.monotonic()
    for name, pid in pids.items():
        await harness.end(name, pid)
    assert time.monotonic() - began_s < 1.0
    again = await harness.start("ns_A")
    async with asyncio.timeout(10):
        while "ns_b" in (await harness.ask("list"))["watchers"]:
            await asyncio.sleep(0.05)
    assert is_alive(again)
    assert "ns_a" in (await harness.ask("list"))["watchers"]


@pytest.mark.full
@pytest.mark.parametrize("command", ["start", "restart", "incr", "reload"])
async def test_nobody_starts_a_second_copy_behind_our_back(harness: Harness, command: str) -> None:
    pid = await harness.start("ns_A")
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(harness.exits.get(), 5)
    async with asyncio.timeout(10):
        while (await harness.ask("status"))["statuses"]["ns_A"] != "stopped":
            await asyncio.sleep(0.05)
    await harness.ask(command, name="ns_A", waiting=True)
    async with asyncio.timeout(5):
        while harness.circusd.pids("ns_A"):
            await asyncio.sleep(0.05)
    assert harness.exits.empty()
    assert "the dynamo plugin starts its workers" in harness.circusd.log


@pytest.mark.full
async def test_a_second_process_of_a_live_worker_ends_at_once(harness: Harness) -> None:
    pid = await harness.start("ns_A")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-S", exec_worker.__file__, str(harness.socket), "ns_A"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert done.returncode == exec_worker.NO_TICKET
    assert "there is no ticket" in done.stderr
    assert "dynamo restart" in done.stderr
    assert is_alive(pid)


async def test_circusds_stop_signal_does_not_cut_what_streams(harness: Harness) -> None:
    pid = await harness.start("ns_A")
    assert (await harness.ask("stop", name="ns_A"))["status"] == "ok"
    await asyncio.sleep(0.3)
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    name, ended, code = await asyncio.wait_for(harness.exits.get(), 5)
    assert (name, ended) == ("ns_A", pid)
    # A watcher that stops is polled ten times a second: circusd may collect the process before we have looked (docs).
    assert code in (-signal.SIGKILL, None)


@pytest.mark.full
async def test_circusd_never_sees_the_environment(harness: Harness) -> None:
    """`circusctl options` and `ps` print what circusd was told, to anybody who reaches its endpoint."""
    pid = await harness.start("ns_A", SECRET_TOKEN="hush")
    assert b"SECRET_TOKEN=hush" in Path(f"/proc/{pid}/environ").read_bytes()
    options = await harness.ask("options", name="ns_A")
    assert "hush" not in str(options)
    assert options["options"]["respawn"] is False


@pytest.mark.full
async def test_somebody_elses_watcher_of_that_name_is_left_alone(harness: Harness) -> None:
    await harness.ask("add", name="ns_A", cmd="sleep 600", start=True, waiting=True)
    theirs = harness.circusd.pids("ns_A")
    with pytest.raises(OSError, match="another watcher named ns_A"):
        await harness.start("ns_A")
    await harness.host.sweep("ns_")
    assert harness.circusd.pids("ns_A") == theirs
    await harness.ask("rm", name="ns_A", waiting=True)


@pytest.mark.full
async def test_what_a_killed_plugin_left_is_ended_and_replaced(harness: Harness) -> None:
    first, second = await harness.start("ns_A"), await harness.start("ns_B")
    os.kill(second, signal.SIGKILL)
    await wait_exit(second, 5)
    await harness.host.close()
    successor = Harness(harness.circusd, harness.folder)
    harness.host, harness.exits = successor.host, successor.exits
    await harness.host.start()
    await harness.host.sweep("ns_")
    assert is_alive(first)  # it may be taken back
    assert "ns_b" not in harness.circusd.ask("list")["watchers"]
    assert is_alive(await harness.start("ns_A"))
    assert not is_alive(first)


@pytest.mark.full
async def test_what_a_killed_plugin_left_can_be_taken_back(harness: Harness) -> None:
    pid = await harness.start("ns_A")
    await harness.host.close()
    successor = Harness(harness.circusd, harness.folder)
    harness.host, harness.exits = successor.host, successor.exits
    await harness.host.start()
    spec = LaunchSpec("ns_A", RUNS, {}, "/", harness.folder / "ns_A.log")
    harness.host.adopt_process(spec, pid)
    with pytest.raises(KeyError):
        await harness.start("ns_A")
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(harness.exits.get(), 5) == ("ns_A", pid, -signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}"):  # until circusd has collected it
        await asyncio.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        harness.host.adopt_process(spec, pid)
    assert is_alive(await harness.start("ns_A"))


@pytest.mark.full
async def test_workers_end_with_a_killed_circusd() -> None:
    """circus itself would leave them to pid 1, with their VRAM."""
    with (
        tempfile.TemporaryDirectory(prefix="ck-") as folder,
        StockCircusd(Path(folder), "[watcher:other]\ncmd = sleep 600\n") as circusd,
    ):
        harness = Harness(circusd, Path(folder))
        harness.host = CircusClientHost(
            circusd.endpoint, socket=harness.socket, circusd_pid=circusd.pid, reply_timeout_s=0.3
        )
        harness.host.on_exit = lambda *exit_: harness.exits.put_nowait(exit_)
        await harness.host.start()
        pid = await harness.start("ns_A")
        others = circusd.pids("other")
        circusd.kill()
        name, found, _code = await asyncio.wait_for(harness.exits.get(), 2)
        assert (name, found) == ("ns_A", pid)
        with pytest.raises(OSError, match="did not answer"):
            await harness.start("ns_B")
        await harness.host.close()
        kill_session(others[0])  # circus leaves its own


@pytest.mark.full
async def test_a_hundred_calls_at_once_get_their_own_answers(circusd: StockCircusd) -> None:
    """circus's own AsyncCircusClient hangs with two."""
    client = CircusClient(circusd.endpoint)
    names = ["other", "stubborn"] * 50
    replies = await asyncio.gather(*(client.call("options", name=name) for name in names))
    assert ["stubborn" if reply["options"]["graceful_timeout"] == STUBBORN_S else "other" for reply in replies] == names
    await client.close()


@pytest.mark.full
async def test_refusals_are_told_apart(harness: Harness) -> None:
    client = harness.host.circusd
    with pytest.raises(CircusdError, match="not found") as unknown:
        await client.call("options", name="nobody")
    assert not isinstance(unknown.value, CircusdBusy)
    await stop_stubborn(harness)
    with pytest.raises(CircusdBusy):
        await client.call("rm", name="other", nostop=True)
    assert harness.circusd.pids("other")


@pytest.mark.timing
@pytest.mark.full
async def test_a_silent_circusd_is_an_error_within_the_bound(tmp_path: Path) -> None:
    """circus's own client ignores its timeout."""
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/c.sock"
        with context.socket(zmq.ROUTER) as silent:
            silent.linger = 0
            silent.bind(endpoint)
            client = CircusClient(endpoint, reply_timeout_s=0.2)
            began_s = time.monotonic()
            with pytest.raises(CircusdSilent, match=r"did not answer 'list' within 0\.2 s"):
                await client.call("list")
            assert time.monotonic() - began_s < 1.0
            await client.close()


@pytest.mark.full
def test_exit_codes_are_read_from_a_zombie_only() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"]) as child:
        fd = os.pidfd_open(child.pid)
        try:
            assert select.select([fd], [], [], 10)[0]
        finally:
            os.close(fd)
        assert exit_code_of_zombie(child.pid) == 3
    assert exit_code_of_zombie(child.pid) is None
    assert exit_code_of_zombie(os.getpid()) is None

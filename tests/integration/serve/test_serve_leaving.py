"""Leaving, in the foreground by signals and detached by `dynamo down`: what streams is finished, then nothing is left.

`Served` itself asserts at the end of each test that no process, file, socket or shared memory of ours is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from dynamo_local.errors import EXIT_OK, EXIT_TIMED_OUT
from tests.drivers.scaled import streaming
from tests.drivers.served import AGG, Served, asking, auntil, expected, until

pytestmark = pytest.mark.infra

CUT = (openai.APIError, httpx.HTTPError)
"""How a stream that is cut ends for a client of the `openai` package."""

SLOW_START = """\
import asyncio
from dynamo_local.sdk import async_on_start, endpoint, service


@service(name="Slow")
class Slow:
    @async_on_start
    async def start(self):
        print("waiting for ever", flush=True)
        await asyncio.Event().wait()
"""


async def _until_refused(client: openai.AsyncOpenAI) -> None:
    """Ask until nothing new is taken: what was on its way when the drain began is still served."""
    async with asyncio.timeout(5.0):
        while True:
            try:
                await client.chat.completions.create(**asking("Too late.", 4))
            except CUT:
                return


@pytest.mark.full
async def test_sighup_is_refused_and_ctrl_c_lets_a_stream_finish() -> None:
    with Served() as served:
        process = served.start_foreground()
        before = served.pids(), served.server_pid("etcd"), served.server_pid("nats")
        process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP is refused" in served.foreground_output(), what=served.foreground_output)
        assert (served.pids(), served.server_pid("etcd"), served.server_pid("nats")) == before
        assert set(served.states().values()) == {"ready"}
        async with served.client() as late, streaming(served, "Finish your sentence.", tokens=300) as (stream,):
            process.send_signal(signal.SIGINT)
            await auntil(lambda: served.states()["Frontend"] == "draining", what=served.foreground_output)
            await _until_refused(late)
            assert not stream.done()
            assert await stream == expected("Finish your sentence.", 300, ignore_eos=True)
        assert served.reap_foreground() == EXIT_OK
        output = served.foreground_output()
    assert "leaving (Ctrl-C)" in output
    assert "[dynamo_VllmWorker] " in output, "logs are interleaved with prefixes"


@pytest.mark.timing
@pytest.mark.full
async def test_a_second_ctrl_c_ends_at_once() -> None:
    with Served() as served:
        process = served.start_foreground()
        async with streaming(served, "Never finish.", tokens=50_000) as (stream,):
            process.send_signal(signal.SIGINT)
            await auntil(lambda: served.states()["Frontend"] == "draining", what=served.foreground_output)
            began_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            code = await asyncio.to_thread(served.reap_foreground)
            with pytest.raises(CUT):
                await stream
        assert code == EXIT_OK
        assert time.monotonic() - began_s < 15.0


@pytest.mark.full
async def test_sigterm_under_a_service_manager(notify_socket: tuple[str, socket.socket]) -> None:
    address, manager = notify_socket
    with Served(target=AGG) as served:
        process = served.start_foreground(NOTIFY_SOCKET=address)
        assert manager.recv(100) == b"READY=1"
        async with streaming(served, "Terminate politely.", tokens=150) as (stream,):
            process.send_signal(signal.SIGTERM)
            assert (await asyncio.to_thread(manager.recv, 100)) == b"STOPPING=1"
            assert await stream == expected("Terminate politely.", 150, ignore_eos=True)
        assert served.reap_foreground() == EXIT_OK
        assert all("NOTIFY_SOCKET" not in line for _, line in served.processes())


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The socket that systemd gives to a service of `Type=notify`: its address, and our end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = f"\0dynamo-test-{os.getpid()}"
        manager.bind(address)
        manager.settimeout(20.0)
        yield address.replace("\0", "@"), manager


def test_ctrl_c_during_the_start_leaves_nothing() -> None:
    with Served(target=("app:Slow",), files={"app.py": SLOW_START}, frontend=False) as served:
        process = served.popen(*served.serve_words())
        until(lambda: served.paths.control_socket.exists() and "Slow" in served.pids(), what=served.foreground_output)
        process.send_signal(signal.SIGINT)
        assert served.reap_foreground() == 130
        assert "left before it was ready" in served.foreground_output()


@pytest.mark.timing
async def test_down_lets_a_stream_finish_and_the_other_commands_answer() -> None:
    with Served().started() as served:
        async with streaming(served, "Down, but not out.", tokens=2500) as (stream,):
            down = asyncio.create_task(asyncio.to_thread(served.down))
            await auntil(lambda: served.states()["Frontend"] == "draining")
            began_s = time.monotonic()
            status = await asyncio.to_thread(served.cli, "status", "--json")
            listed = await asyncio.to_thread(served.cli, "ctl", "list")
            took_s = time.monotonic() - began_s
            assert not stream.done(), "the stream was to outlast the commands"
            assert await stream == expected("Down, but not out.", 2500, ignore_eos=True)
            done = await down
            assert served.leftovers() == []
    assert json.loads(status.stdout)["state"] == "leaving"
    assert "dynamo_vllmworker" in listed.stdout
    assert took_s < 10.0
    assert done.stdout.splitlines()[-1] == "dynamo: down"


@pytest.mark.timing
@pytest.mark.full
async def test_down_twice_is_as_polite_as_once_and_now_is_not() -> None:
    with Served().started() as served:
        async with streaming(served, "Go on and on.", tokens=50_000) as (stream,):
            first = await asyncio.to_thread(served.cli, "down", "--timeout", "0.3")
            second = await asyncio.to_thread(served.cli, "down", "--timeout", "0.3")
            alive = not stream.done()
            began_s = time.monotonic()
            await asyncio.to_thread(served.down, "--now")
            took_s = time.monotonic() - began_s
            with pytest.raises(CUT):
                await stream
    assert (first.returncode, second.returncode) == (EXIT_TIMED_OUT, EXIT_TIMED_OUT)
    assert "dynamo down --now" in first.stderr
    assert alive, "a second `dynamo down` cut a stream"
    assert took_s < 20.0


@pytest.mark.timing
def test_a_drain_deadline_ends_what_does_not_end_by_itself() -> None:
    stubborn = """\
import signal, subprocess, sys
from dynamo_local.sdk import async_on_start, on_shutdown, service


@service(name="Stubborn")
class Stubborn:
    @async_on_start
    async def start(self):
        subprocess.Popen(["sleep", "1000"])

    @on_shutdown
    async def stop(self):
        import asyncio
        await asyncio.Event().wait()
"""
    with Served(
        "--drain-deadline=1", target=("app:Stubborn",), files={"app.py": stubborn}, frontend=False
    ).started() as served:
        began_s = time.monotonic()
        served.down()
        assert 1.0 <= time.monotonic() - began_s < 20.0
        assert served.leftovers() == []
